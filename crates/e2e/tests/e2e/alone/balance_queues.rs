//! The order in which a worker takes connections from its own queue and from other queues: those
//! of busy workers, and those whose worker has ended.

use fsocket_e2e::busy::{patient, signal, Server, Stopped};
use fsocket_e2e::need_two_cpus;
use fsocket_e2e::zones::{counter, selected};
use fsocket_testkit::{net, stock_mode, Host};
use std::net::TcpStream;
use std::time::Duration;

/// Returns how many of the others' connections were accepted before the last of its own
/// connections. Also returns all connections in the order of acceptance; `true` marks one of
/// another worker.
#[track_caller]
fn beside(server: &Server, own: &[TcpStream], others: &[TcpStream]) -> (usize, Vec<(i32, bool)>) {
    let mut order: Vec<(i32, bool)> = own.iter().map(|c| (server.all_told(c)[2], false)).collect();
    order.extend(others.iter().map(|c| (server.all_told(c)[2], true)));
    order.sort_unstable();
    let last_own = order.iter().rposition(|(_, others)| !others).expect("its own");
    (order[..last_own].iter().filter(|(_, others)| *others).count(), order)
}

#[test]
fn a_full_queue_is_busy_and_its_killed_workers_connections_are_served() {
    need_two_cpus!();
    // Each zone has a limit of 32 connections, and is busy above 24.
    let host = patient();
    let server = Server::start(&host, "epoll", 64, &[]);
    let Stopped { workers: [victim, other], waiting: [waiting, _] } = server.stopped([40, 0]);
    if !stock_mode() {
        let zones = host.zones();
        let queue = zones["groups"][0]["balance"]["queues"]
            .as_array()
            .and_then(|q| q.iter().find(|q| q["cpu"] == 0).cloned())
            .expect("a queue for CPU 0");
        assert_eq!(queue["length"], 40, "{zones:#}");
        assert_eq!(queue["busy"], true, "{zones:#}");
    }
    signal(victim, libc::SIGKILL);
    signal(other, libc::SIGCONT);
    for (n, c) in waiting.iter().enumerate() {
        let by = server.told(c).0;
        assert!(by == other, "connection {n} was served by {by}");
    }
    if stock_mode() {
        return;
    }
    // The remaining worker has accepted all of them, so its queue is no longer busy.
    for cpu in 0..2 {
        assert_eq!(server.worker(cpu).0, other);
    }
    net::wait_until(Duration::from_secs(60), || net::kernel_sockets(server.port, "0A") == 2)
        .expect("the dead one's socket is closed");
    let zones = host.zones();
    assert!(counter(&zones, "accept_stolen") + selected(&zones, "migrated") >= 40, "{zones:#}");
}

#[test]
fn five_local_ones_for_one_of_a_busy_zone() {
    need_two_cpus!();
    if stock_mode() {
        return eprintln!("PATH NOT ASSERTED: stock mode");
    }
    // Each zone has a limit of 64 connections, and is busy above 48.
    let host = patient();
    let server = Server::start(&host, "epoll", 128, &[]);
    let Stopped { workers: [victim, thief], waiting: [busy, own] } = server.stopped([60, 40]);
    signal(thief, libc::SIGCONT);
    let (stolen, order) = beside(&server, &own, &busy);
    signal(victim, libc::SIGCONT);
    assert!((7..=9).contains(&stolen), "{stolen} stolen beside 40 of its own: {order:?}");
}

#[test]
fn who_waits_at_a_dead_worker_takes_turns_with_who_waits_at_a_living_one() {
    need_two_cpus!();
    if stock_mode() {
        return eprintln!("PATH NOT ASSERTED: stock mode");
    }
    // Each zone has a limit of 128 connections, so no zone is busy.
    let host = patient();
    let server = Server::start(&host, "epoll", 256, &[]);
    let Stopped { workers: [victim, other], waiting: [orphans, own] } = server.stopped([15, 60]);
    signal(victim, libc::SIGKILL);
    let queues = || host.zones()["groups"][0]["balance"]["queues"].as_array().map_or(0, Vec::len);
    net::wait_until(Duration::from_secs(60), || queues() == 1).expect("the monitor knows");
    signal(other, libc::SIGCONT);
    let (between, order) = beside(&server, &own, &orphans);
    assert!(between >= 14, "{between} of 15 in between: {order:?}");
    let zones = host.zones();
    assert!(counter(&zones, "accept_stolen") >= 15, "{zones:#}");
}

#[test]
fn busy_is_over_when_the_queue_has_been_short_for_a_while() {
    need_two_cpus!();
    if stock_mode() {
        return eprintln!("PATH NOT ASSERTED: stock mode");
    }
    let host = Host::new();
    let server = Server::start(&host, "epoll", 64, &[]);
    let busy = |host: &Host| {
        let zones = host.zones();
        let queues = zones["groups"][0]["balance"]["queues"].as_array().expect("queues").clone();
        queues.iter().any(|q| q["busy"] == true)
    };
    assert!(!busy(&host));
    let Stopped { workers, waiting: [waiting, _] } = server.stopped([30, 0]);
    assert!(busy(&host));
    workers.iter().for_each(|pid| signal(*pid, libc::SIGCONT));
    waiting.iter().for_each(|c| _ = server.told(c));
    net::wait_until(Duration::from_secs(60), || !busy(&host)).expect("not busy any more");
}
