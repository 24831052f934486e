//! The monitor is killed and started again. Zones must go on, and the next monitor must take them
//! over.

use fsocket_e2e::need_two_cpus;
use fsocket_e2e::zones::{connect, counter, pin, selected, told, Server, Start};
use fsocket_testkit::{net, stock_mode, Host};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

fn is_root() -> bool {
    // SAFETY: `geteuid` takes no arguments.
    unsafe { libc::geteuid() == 0 }
}

fn signal(pid: i32, signal: i32) {
    // SAFETY: `kill` takes no pointers, and the process belongs to this test.
    unsafe { libc::kill(pid, signal) };
}

/// Opens `n` connections from CPU 0, which no worker accepts yet.
fn wait_in_queue(server: &Server, n: usize) -> Vec<TcpStream> {
    let address: SocketAddr = ([127, 0, 0, 1], server.port).into();
    std::thread::scope(|s| {
        s.spawn(|| {
            pin(0);
            (0..n).map(|_| connect(address)).collect()
        })
        .join()
        .expect("nobody is refused")
    })
}

/// Kills the worker of CPU 0 while connections wait for it. All of them must be answered.
#[track_caller]
fn kill_the_worker(server: &Server, what: &str) {
    let victim = server.ask("127.0.0.1", 0, 1)[0].pid;
    signal(victim, libc::SIGSTOP);
    let waiting = wait_in_queue(server, 100);
    signal(victim, libc::SIGKILL);
    for (i, c) in waiting.iter().enumerate() {
        assert_ne!(told(c, i).pid, victim, "{what}");
    }
}

/// Number of workers that have a place in the only group.
fn places(host: &Host) -> usize {
    let zones = host.zones();
    zones["groups"].as_array().map_or(0, |g| g.iter().map(|g| g["workers"].as_array().map_or(0, Vec::len)).sum())
}

#[track_caller]
fn assert_local(server: &Server, cpu: usize, what: &str) {
    for t in server.ask("127.0.0.1", cpu, 50) {
        assert_eq!(t.cpu, cpu as i32, "{what}: {t:?}");
    }
}

#[track_caller]
fn run(options: &[&str]) {
    need_two_cpus!();
    if stock_mode() {
        return eprintln!("SKIPPED: there is no monitor");
    }
    if !is_root() {
        return eprintln!("SKIPPED: needs root for BPF");
    }
    let mut host = Host::keeping();
    let server = Start { options, ..Start::default() }.run(&host);
    net::wait_until(Duration::from_secs(60), || places(&host) == 2).expect("both workers");
    assert_local(&server, 0, "at first");
    host.kill_monitor();
    // Without a monitor, the BPF program still selects sockets, and moves connections of closed
    // ones.
    assert_local(&server, 0, "no monitor");
    assert_local(&server, 1, "no monitor");
    kill_the_worker(&server, "no monitor");
    // The new worker gets no zone, but must serve.
    server.ask("127.0.0.1", 0, 50);
    assert_local(&server, 1, "a worker without the monitor");
    host.start_monitor();
    // The other worker started before this monitor.
    net::wait_until(Duration::from_secs(60), || places(&host) >= 1).expect("the old worker is known");
    // The new worker asks for a zone again when it accepts.
    let joined = || {
        server.ask("127.0.0.1", 0, 20);
        places(&host) == 2
    };
    let done = net::wait_until(Duration::from_secs(60), joined);
    assert!(done.is_ok(), "the new worker is not taken in: {:#}", host.zones());
    for cpu in 0..2 {
        assert_local(&server, cpu, "taken over");
    }
    for round in 0..2 {
        kill_the_worker(&server, &format!("taken over, round {round}"));
        net::wait_until(Duration::from_secs(60), || places(&host) == 2).expect("a new worker");
        assert_local(&server, 0, "a worker of the new monitor");
    }
    let zones = host.zones();
    assert!(selected(&zones, "migrated") >= 300, "{zones:#}");
    assert_eq!(counter(&zones, "fallback.zone_classic"), 0, "{zones:#}");
}

#[test]
fn a_restarted_monitor_takes_the_zones_over() {
    run(&["pin", "respawn"]);
}

#[test]
fn also_those_of_a_program_that_shares_its_address_itself() {
    run(&["pin", "respawn", "each"]);
}

#[test]
fn nothing_is_left() {
    if stock_mode() {
        return eprintln!("SKIPPED: there is no monitor");
    }
    let pins = || std::fs::read_dir("/sys/fs/bpf/fastsocket").map_or(0, |d| d.count());
    let before = pins();
    let host = Host::keeping();
    let server = Start::default().run(&host);
    if is_root() {
        net::wait_until(Duration::from_secs(60), || pins() == before + 1).expect("a folder of pins");
    }
    drop(server);
    net::wait_until(Duration::from_secs(60), || pins() == before).expect("gone with the listener's last process");
    drop(host);
    assert_eq!(pins(), before);
}
