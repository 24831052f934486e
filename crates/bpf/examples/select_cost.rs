//! The cost of selecting a listen socket with our BPF program, for several numbers of local
//! sockets, compared with stock SO_REUSEPORT and the same number of sockets.
//!
//!     cargo run --release -p fsocket-bpf --example select_cost
//!
//! With a number of local sockets and `ours` or `stock` as arguments, it measures only that case
//! and prints the microseconds of a connection. `fastsocket bench paper` uses this.
//!
//! Otherwise it prints two figures for each case, as JSON. The first one is the BPF program's
//! nanoseconds for each run (BPF_STATS_RUN_TIME); stock has none. The second one is microseconds
//! for each connection: connect, accept, and close of both ends, with one thread for each side,
//! on loopback. Rounds of both alternate; figures are medians.

use fsocket_bpf::select::{Select, GLOBAL};
use fsocket_reuseport::{classic, listener};
use libbpf_rs::libbpf_sys;
use std::io::Read;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Instant;

const CONNECTIONS: usize = 3000;
const ROUNDS: usize = 5;

struct Group {
    global: TcpListener,
    locals: Vec<OwnedFd>,
    select: Option<Select>,
}

impl Group {
    fn new(n: usize, ours: bool) -> Group {
        let global = TcpListener::bind("127.0.0.1:0").expect("bind");
        global.set_nonblocking(true).expect("mode");
        let fd = global.as_raw_fd();
        let shape = listener::Shape::of(fd).expect("shape");
        listener::reuse_port(fd, true).expect("SO_REUSEPORT");
        let local = |_| listener::like(fd, &shape).expect("a local listen socket");
        // SAFETY: each descriptor was just made, and nothing else owns it.
        let locals: Vec<OwnedFd> = (0..n).map(local).map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }).collect();
        let select = ours.then(|| {
            let cpus = std::thread::available_parallelism().map_or(1, usize::from);
            let select = Select::load(cpus).unwrap_or_else(|e| {
                println!("SKIPPED: {e}");
                std::process::exit(if std::env::args().len() > 1 { 1 } else { 0 });
            });
            select.put(GLOBAL, global.as_fd()).expect("global");
            let mut workers = Vec::new();
            for (i, l) in locals.iter().enumerate() {
                select.put(i as u32 + 1, l.as_fd()).expect("local");
                workers.push((i as u32 + 1, (i % cpus) as u32));
            }
            select.assign(&workers, false, |_, _| None).expect("slots");
            classic::attach_loaded(fd, select.program().as_raw_fd()).expect("attach");
            select
        });
        Group { global, locals, select }
    }

    /// Runs all connections. Returns the seconds.
    fn run(&self) -> f64 {
        let address = self.global.local_addr().expect("address");
        let begun = Instant::now();
        std::thread::scope(|s| {
            s.spawn(|| client(address));
            self.serve();
        });
        begun.elapsed().as_secs_f64()
    }

    /// Number of connections that our program gave to a local socket.
    fn selected(&self) -> usize {
        let counts = self.select.iter().flat_map(|s| s.counts()).flatten();
        counts.filter(|c| matches!(c.name, "self" | "other")).map(|c| c.total() as usize).sum()
    }

    fn serve(&self) {
        let epoll = rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC).expect("epoll");
        let all: Vec<BorrowedFd> =
            std::iter::once(self.global.as_fd()).chain(self.locals.iter().map(|l| l.as_fd())).collect();
        for (i, fd) in all.iter().enumerate() {
            let data = rustix::event::epoll::EventData::new_u64(i as u64);
            rustix::event::epoll::add(&epoll, fd, data, rustix::event::epoll::EventFlags::IN).expect("epoll");
        }
        let mut done = 0;
        let mut events = Vec::with_capacity(64);
        while done < CONNECTIONS {
            events.clear();
            let _ = rustix::event::epoll::wait(&epoll, rustix::buffer::spare_capacity(&mut events), None);
            for e in &events {
                while rustix::net::accept(all[e.data.u64() as usize]).is_ok() {
                    done += 1;
                }
            }
        }
    }
}

fn client(address: SocketAddr) {
    for _ in 0..CONNECTIONS {
        // The end of the stream shows that the connection was accepted, so no queue ever fills.
        let _ = TcpStream::connect(address).expect("connect").read(&mut [0]);
    }
}

/// Run time and number of runs of all programs with this name.
fn spent() -> (u64, u64) {
    let ours = |p: &libbpf_rs::query::ProgramInfo| p.name.to_string_lossy().starts_with("select_listener");
    libbpf_rs::query::ProgInfoIter::default().filter(ours).fold((0, 0), |(t, n), p| (t + p.run_time_ns, n + p.run_cnt))
}

fn median(mut v: Vec<f64>) -> f64 {
    v.sort_by(f64::total_cmp);
    v[v.len() / 2]
}

/// Microseconds for each connection to a group of `n` sockets.
fn one(n: usize, ours: bool) -> f64 {
    let group = Group::new(n, ours);
    let us = group.run() * 1e6 / CONNECTIONS as f64;
    assert!(!ours || group.selected() >= CONNECTIONS, "selections: {}", group.selected());
    us
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [n, way] = &args[..] {
        return println!("{}", one(n.parse().expect("a number of sockets"), way == "ours"));
    }
    // SAFETY: the call takes a number, and returns a descriptor that keeps the accounting on
    // while it is open.
    let _stats = unsafe { libbpf_sys::bpf_enable_stats(libbpf_sys::BPF_STATS_RUN_TIME) };
    let mut rows = Vec::new();
    for n in [1usize, 2, 8, 32, 128, 512] {
        let (ours, stock) = (Group::new(n, true), Group::new(n, false));
        let (mut us, mut them, mut ns) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            let (t0, n0) = spent();
            us.push(ours.run() * 1e6 / CONNECTIONS as f64);
            let (t1, n1) = spent();
            // (A group of another program may have ended meanwhile.)
            ns.push(t1.saturating_sub(t0) as f64 / n1.saturating_sub(n0).max(1) as f64);
            them.push(stock.run() * 1e6 / CONNECTIONS as f64);
        }
        let round = |v: f64| (v * 10.0).round() / 10.0;
        assert!(ours.selected() >= ROUNDS * CONNECTIONS, "selections: {}", ours.selected());
        let row = serde_json::json!({
            "local_sockets": n,
            "program_ns": round(median(ns)),
            "us_per_connection": round(median(us)),
            "stock_us_per_connection": round(median(them)),
        });
        eprintln!("{row}");
        rows.push(row);
    }
    println!("{:#}", serde_json::Value::from(rows));
}
