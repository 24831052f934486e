//! Helpers for the tests of zones. The server is `tests/apps/zone_server.py`. Clients choose the
//! CPU that handles their SYN: on loopback it is the CPU on which they run.

use fsocket_testkit::{net, stock_mode, Host, Proc, Side};
use serde_json::Value;
use std::io::Read;
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// A report of the server about one connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Told {
    pub pid: i32,
    pub tid: i32,
    /// CPU that the worker is pinned to, or -1.
    pub cpu: i32,
    pub sndbuf: i64,
    pub keepidle: i64,
    pub ttl: i64,
}

/// A running `zone_server.py`.
pub struct Server {
    pub process: Proc,
    pub port: u16,
}

/// Options for the start of a server.
pub struct Start<'a> {
    pub mode: &'a str,
    pub bind: &'a str,
    pub workers: usize,
    pub options: &'a [&'a str],
    pub env: &'a [(&'a str, &'a str)],
    pub side: Side,
    /// Command that runs python, such as `setpriv …`. Empty: none.
    pub before: &'a [&'a str],
}

impl Default for Start<'_> {
    fn default() -> Self {
        // Balance is off by default: on a busy machine a worker may be off the CPU for longer than
        // the balance has patience. Tests of balance switch it on.
        let env = &[("FASTSOCKET_DISABLE", "shm,balance")];
        let (mode, bind, side) = ("fork-epoll", "127.0.0.1", Side::Accel);
        Start { mode, bind, workers: 2, options: &["pin"], env, side, before: &[] }
    }
}

impl Start<'_> {
    #[track_caller]
    pub fn run(&self, host: &Host) -> Server {
        let port = net::free_port();
        let script = fsocket_testkit::helper("zone_server.py").display().to_string();
        let (port_text, workers) = (port.to_string(), self.workers.to_string());
        let mut words: Vec<&str> = self.before.to_vec();
        words.extend([fsocket_testkit::PYTHON, &script, self.mode, self.bind, &port_text, &workers]);
        words.extend(self.options);
        let mut command = host.command(self.side, words[0]);
        command.args(&words[1..]).envs(self.env.iter().copied());
        let mut process = Proc::spawn(host.logs(), self.mode, command);
        let up = net::wait_until(Duration::from_secs(60), || !process.running() || net::kernel_sockets(port, "0A") > 0);
        assert!(up.is_ok() && process.running(), "{} does not listen: {}", self.mode, process.stderr());
        Server { process, port }
    }
}

impl Server {
    /// Stops the worker of CPU 0, and lets 100 connections wait for it.
    #[track_caller]
    pub fn hundred_wait(&self) -> (i32, Vec<TcpStream>) {
        let worker = self.ask("127.0.0.1", 0, 1)[0].pid;
        // SAFETY: `kill` takes no pointers, and the process belongs to this test.
        unsafe { libc::kill(worker, libc::SIGSTOP) };
        // Some thread of the worker may still accept until all are stopped.
        let stopped = net::wait_until(Duration::from_secs(60), || threads(worker).all(|state| state == 'T'));
        assert!(stopped.is_ok(), "{worker} does not stop");
        let address: SocketAddr = ([127, 0, 0, 1], self.port).into();
        let waiting = std::thread::scope(|s| {
            s.spawn(|| {
                pin(0);
                (0..100).map(|_| connect(address)).collect()
            })
            .join()
            .expect("nobody is refused")
        });
        (worker, waiting)
    }

    /// Stops the worker of CPU 0, lets 100 connections wait for it, and kills it. Other workers
    /// must serve every one of them.
    #[track_caller]
    pub fn kill_while_hundred_wait(&self, round: usize) {
        let (victim, waiting) = self.hundred_wait();
        // SAFETY: `kill` takes no pointers, and the process belongs to this test.
        unsafe { libc::kill(victim, libc::SIGKILL) };
        for (i, c) in waiting.iter().enumerate() {
            assert_ne!(told(c, i).pid, victim, "round {round}");
        }
    }

    /// Waits until `n` sockets listen on the port: the global one and the local ones.
    #[track_caller]
    pub fn wait_for_sockets(&self, n: usize) {
        if stock_mode() {
            return;
        }
        let found = net::wait_until(Duration::from_secs(60), || net::kernel_sockets(self.port, "0A") == n);
        assert!(found.is_ok(), "{} sockets listen instead of {n}", net::kernel_sockets(self.port, "0A"));
    }

    /// Opens `n` connections, one after the other, from a thread on this CPU.
    #[track_caller]
    pub fn ask(&self, to: &str, cpu: usize, n: usize) -> Vec<Told> {
        let address: SocketAddr = format!("{}:{}", bracketed(to), self.port).parse().expect("address");
        std::thread::scope(|s| {
            s.spawn(|| {
                pin(cpu);
                (0..n).map(|i| told(&connect(address), i)).collect()
            })
            .join()
            .expect("every connection is answered")
        })
    }
}

/// The states of a process's threads.
fn threads(pid: i32) -> impl Iterator<Item = char> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("a process");
    let stat = |task: std::io::Result<std::fs::DirEntry>| std::fs::read_to_string(task.ok()?.path().join("stat")).ok();
    tasks.filter_map(stat).filter_map(|stat| stat.rsplit(") ").next()?.chars().next())
}

fn bracketed(ip: &str) -> String {
    if ip.contains(':') {
        format!("[{ip}]")
    } else {
        ip.to_owned()
    }
}

/// A connection with a time limit for reading.
#[track_caller]
pub fn connect(address: SocketAddr) -> TcpStream {
    let c = TcpStream::connect_timeout(&address, Duration::from_secs(5)).expect("connect");
    c.set_read_timeout(Some(Duration::from_secs(8))).expect("time-out");
    c
}

/// Reads the server's report about the connection.
#[track_caller]
pub fn told(mut c: &TcpStream, number: usize) -> Told {
    let mut text = String::new();
    c.read_to_string(&mut text).unwrap_or_else(|e| panic!("connection {number}: {e}"));
    let v: Vec<i64> = text.split_whitespace().map(|w| w.parse().expect("a number")).collect();
    assert!(v.len() == 6, "connection {number}: {text:?}");
    Told { pid: v[0] as i32, tid: v[1] as i32, cpu: v[2] as i32, sndbuf: v[3], keepidle: v[4], ttl: v[5] }
}

/// Moves the calling thread to a CPU.
#[track_caller]
pub fn pin(cpu: usize) {
    fsocket_testkit::process::set_affinity(0, &[cpu]).unwrap_or_else(|e| panic!("CPU {cpu}: {e}"));
}

/// Number of CPUs that this process may use; tests of locality need two.
pub fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The value of a counter, summed over all processes.
pub fn counter(zones: &Value, name: &str) -> u64 {
    zones["counters"][name].as_u64().unwrap_or(0)
}

/// Number of connections accepted in a zone, by kind: "local", "global", "remote" or "stolen".
pub fn accepted(zones: &Value, cpu: u64, kind: &str) -> u64 {
    let all = zones["zones"].as_array().map(Vec::as_slice).unwrap_or_default();
    all.iter().filter(|z| z["cpu"] == cpu).map(|z| z["accepted"][kind].as_u64().unwrap_or(0)).sum()
}

/// Waits until `n` workers, in all groups, have a place.
#[track_caller]
pub fn wait_for_places(host: &Host, n: usize) {
    let found = net::wait_until(Duration::from_secs(60), || places(host) == n);
    assert!(found.is_ok(), "{:#}", host.zones());
}

/// Number of workers that have a place, in all groups.
pub fn places(host: &Host) -> usize {
    let zones = host.zones();
    let groups = zones["groups"].as_array().map(Vec::as_slice).unwrap_or_default();
    groups.iter().map(|g| g["workers"].as_array().map_or(0, Vec::len)).sum()
}

/// Number of socket selections of this kind, over all groups and CPUs.
pub fn selected(zones: &Value, kind: &str) -> u64 {
    let all = zones["groups"].as_array().map(Vec::as_slice).unwrap_or_default();
    let by_cpu = all.iter().flat_map(|g| g["selections"][kind].as_array().map(Vec::as_slice).unwrap_or_default());
    by_cpu.map(|n| n.as_u64().unwrap_or(0)).sum()
}

/// Skips a test in which connections between hosts are steered, if that is impossible here.
#[macro_export]
macro_rules! need_steering {
    () => {
        fsocket_testkit::need_hosts!();
        if fsocket_testkit::stock_mode() {
            return eprintln!("SKIPPED: stock mode has no monitor that steers");
        }
        $crate::need_two_cpus!();
    };
}

/// Skips a test that needs two CPUs if there is only one.
#[macro_export]
macro_rules! need_two_cpus {
    () => {
        if $crate::zones::cpus() < 2 {
            eprintln!("SKIPPED: needs two CPUs");
            return;
        }
    };
}
