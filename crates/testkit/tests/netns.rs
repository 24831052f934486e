//! Tests of the hosts themselves: which CPU receives, and that nothing is left behind.

use fsocket_testkit::netns::{Chain, Receive};
use fsocket_testkit::{need_hosts, net, process, Proc};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

const CONNECTIONS: usize = 128;

/// The CPU that handled the latest packet of the socket.
fn incoming_cpu(socket: &TcpStream) -> usize {
    let mut cpu: libc::c_int = -1;
    let mut len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the kernel writes one int into `cpu`, and `len` is its size.
    let rc = unsafe {
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_INCOMING_CPU, (&raw mut cpu).cast(), &mut len)
    };
    assert_eq!(rc, 0);
    cpu as usize
}

/// Makes many connections from CPU 0 of the client. For each, returns the CPU on which the middle
/// host received the handshake, and the one on which it received later data.
fn receiving_cpus(chain: &Chain) -> Vec<(usize, usize)> {
    let address: SocketAddr = (chain.middle_front(), 80).into();
    let listener = chain.middle.within(|| TcpListener::bind(address)).expect("listen");
    let mut pairs: Vec<(TcpStream, TcpStream)> = chain.client.within(|| {
        process::set_affinity(0, &[0]).expect("affinity");
        let connect = |_| {
            let client = TcpStream::connect_timeout(&address, Duration::from_secs(5)).expect("connect");
            (client, listener.accept().expect("accept").0)
        };
        (0..CONNECTIONS).map(connect).collect()
    });
    let first: Vec<usize> = pairs.iter().map(|(_, server)| incoming_cpu(server)).collect();
    chain.client.within(|| {
        process::set_affinity(0, &[0]).expect("affinity");
        for _ in 0..5 {
            for (client, server) in &mut pairs {
                client.write_all(b"12345").expect("write");
                server.read_exact(&mut [0; 5]).expect("read");
            }
        }
    });
    pairs.iter().zip(first).map(|((_, server), first)| (first, incoming_cpu(server))).collect()
}

fn two_cpus() -> bool {
    std::thread::available_parallelism().is_ok_and(|n| n.get() >= 2)
}

#[test]
fn threads_and_rps_spread_connections_over_both_cpus_and_keep_each_on_one() {
    need_hosts!();
    if !two_cpus() {
        return eprintln!("SKIPPED: needs two CPUs");
    }
    for receive in [Receive::Threads(vec![0, 1]), Receive::Rps(vec![0, 1])] {
        let chain = Chain::new(2, &receive).expect("hosts");
        let cpus = receiving_cpus(&chain);
        let moved = cpus.iter().filter(|(first, later)| first != later).count();
        assert_eq!(moved, 0, "{receive:?}: a connection is received on one CPU");
        for cpu in [0, 1] {
            let share = cpus.iter().filter(|(first, _)| *first == cpu).count();
            // With 128 fair coins, fewer than 32 heads have a probability below 1e-8.
            assert!(share >= CONNECTIONS / 4, "{receive:?}: CPU {cpu} received {share} of {CONNECTIONS}");
        }
    }
}

#[test]
fn threads_follow_their_pinning() {
    need_hosts!();
    if !two_cpus() {
        return eprintln!("SKIPPED: needs two CPUs");
    }
    let chain = Chain::new(2, &Receive::Threads(vec![1])).expect("hosts");
    assert!(receiving_cpus(&chain).iter().all(|cpus| *cpus == (1, 1)), "all queues are CPU 1's");
}

#[test]
fn inline_receives_where_it_is_sent() {
    need_hosts!();
    let chain = Chain::new(2, &Receive::Inline).expect("hosts");
    assert!(receiving_cpus(&chain).iter().all(|cpus| *cpus == (0, 0)), "the client sends on CPU 0");
}

#[test]
fn ipv6_and_backend_are_reached_and_a_command_runs_in_its_host() {
    need_hosts!();
    let chain = Chain::new(2, &Receive::Inline).expect("hosts");
    let v6: SocketAddr = (chain.middle_front6(), 80).into();
    let listener = chain.middle.within(|| TcpListener::bind(v6)).expect("listen");
    chain.client.within(|| TcpStream::connect_timeout(&v6, Duration::from_secs(5))).expect("connect over IPv6");
    drop(listener);
    let back: SocketAddr = (chain.backend_address(), 81).into();
    let _listener = chain.backend.within(|| TcpListener::bind(back)).expect("listen");
    assert_eq!(chain.backend.within(|| net::kernel_sockets(81, "0A")), 1);
    assert_eq!(chain.middle.within(|| net::kernel_sockets(81, "0A")), 0);
    chain.middle.within(|| TcpStream::connect_timeout(&back, Duration::from_secs(5))).expect("connect to the backend");
    let direct = chain.client.within(|| TcpStream::connect_timeout(&back, Duration::from_millis(300)));
    assert!(direct.is_err(), "clients have no way to the backend");
    let mut command = Command::new("ip");
    command.args(["-o", "addr"]);
    chain.middle.place(&mut command);
    let said = String::from_utf8(command.output().expect("ip").stdout).expect("text");
    assert!(said.contains(&chain.middle_front().to_string()) && said.contains("10.9.2.1"), "{said}");
}

/// Namespaces and devices whose names contain this process number.
fn leftovers(pid: u32) -> Vec<String> {
    let tag = format!("fs{pid:x}_");
    let names = |dir: &str| -> Vec<String> {
        let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
        entries.map(|e| e.file_name().to_string_lossy().into_owned()).filter(|n| n.starts_with(&tag)).collect()
    };
    let threads = std::fs::read_dir("/proc").expect("/proc").flatten().filter_map(|entry| {
        let comm = std::fs::read_to_string(entry.path().join("comm")).ok()?;
        comm.starts_with(&format!("napi/{tag}")).then_some(comm)
    });
    names("/run/netns").into_iter().chain(names("/sys/class/net")).chain(threads).collect()
}

/// Makes hosts with a process in one of them, prints a line, and ends as the environment says.
#[test]
#[ignore = "not a test by itself: the next one runs it, in a process of its own"]
fn leave() {
    let how = std::env::var("FASTSOCKET_NETNS_LEAVE").expect("told how to end");
    let chain = Chain::new(2, &Receive::Threads(vec![0])).expect("hosts");
    let mut command = Command::new("sleep");
    command.arg("600");
    chain.middle.place(&mut command);
    println!("sleeper {} made", command.spawn().expect("sleep").id());
    match how.as_str() {
        "panic" => panic!("as told"),
        "return" => {}
        _ => std::thread::sleep(Duration::from_secs(60)),
    }
}

#[test]
fn nothing_is_left_behind_however_it_ends() {
    need_hosts!();
    let dir = tempfile::tempdir().expect("directory");
    let ends = [("return", 0), ("panic", 0), ("int", libc::SIGINT), ("term", libc::SIGTERM), ("kill", libc::SIGKILL)];
    for (how, signal) in ends {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.args(["--exact", "leave", "--ignored", "--nocapture"]).env("FASTSOCKET_NETNS_LEAVE", how);
        let mut child = Proc::spawn(dir.path(), how, command);
        child.wait_stdout(" made\n", Duration::from_secs(60));
        let said = child.stdout();
        let sleeper =
            said.split("sleeper ").nth(1).and_then(|rest| rest.split(' ').next()).expect("its number").to_owned();
        if signal != 0 {
            let made = leftovers(child.pid());
            assert_eq!(made.len(), 3 + 2 * 2 * 2, "{how}: three hosts, four devices of two threads: {made:?}");
            child.signal(signal);
        }
        assert!(net::wait_until(Duration::from_secs(60), || !child.running()).is_ok(), "{how}: it does not end");
        let gone = net::wait_until(Duration::from_secs(60), || {
            leftovers(child.pid()).is_empty() && !Path::new("/proc").join(&sleeper).exists()
        });
        assert!(gone.is_ok(), "{how}: left behind: {:?}, sleeper {sleeper}", leftovers(child.pid()));
    }
}
