//! Programs that share their address by SO_REUSEPORT themselves: each worker's own socket is its
//! local one. A program without the library at the same address must get its share.

use fsocket_e2e::need_two_cpus;
use fsocket_e2e::zones::{accepted, connect, counter, selected, wait_for_places, Server, Start};
use fsocket_testkit::host::{Accel, Stock};
use fsocket_testkit::workers::children;
use fsocket_testkit::{net, stock_mode, Host, Side};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

/// Connections from each of two CPUs must all reach the worker that is pinned there.
#[track_caller]
fn assert_local(server: &Server, what: &str) {
    for cpu in 0..2 {
        for t in server.ask("127.0.0.1", cpu, 50) {
            assert!(stock_mode() || t.cpu == cpu as i32, "{what}: from CPU {cpu}: {t:?}");
        }
    }
}

#[test]
fn each_workers_own_socket_is_its_local_one() {
    need_two_cpus!();
    for (mode, hows) in [
        ("fork-epoll", &["sockets", "each"][..]),
        ("fork-edge", &["sockets"]),
        ("fork-block", &["sockets"]),
        ("fork-poll", &["sockets"]),
        ("fork-oneshot", &["sockets"]),
    ] {
        for how in hows {
            for env in [&[("FASTSOCKET_DISABLE", "shm,balance")][..], &[("FASTSOCKET_DISABLE", "balance")]] {
                let host = Host::new();
                let server = Start { mode, options: &["pin", how], env, ..Start::default() }.run(&host);
                let what = format!("{mode} {how} {env:?}");
                if !stock_mode() {
                    wait_for_places(&host, 2);
                }
                assert_local(&server, &what);
                // The library must make no further sockets.
                server.wait_for_sockets(2);
                if !stock_mode() {
                    // The monitor reads the counters of the BPF programs only now and then.
                    let all = |zones: &_| [selected(zones, "lookups"), selected(zones, "self")] == [100, 100];
                    let counted = net::wait_until(Duration::from_secs(60), || all(&host.zones()));
                    let zones = host.zones();
                    assert!(counted.is_ok(), "{what}: {zones:#}");
                    let local = accepted(&zones, 0, "local") + accepted(&zones, 1, "local");
                    assert_eq!(local, 100, "{what}: {zones:#}");
                }
            }
        }
    }
}

#[test]
fn threads_with_a_socket_each() {
    need_two_cpus!();
    for how in ["sockets", "each"] {
        let host = Host::new();
        let server = Start { mode: "thread-epoll", options: &["pin", how], ..Start::default() }.run(&host);
        if !stock_mode() {
            wait_for_places(&host, 2);
        }
        assert_local(&server, how);
        server.wait_for_sockets(2);
    }
}

/// All workers start at once. The first worker is told of a foreign socket, which is the second
/// worker's. It then sleeps, perhaps in a call in which it cannot be told that the socket was not
/// foreign.
#[test]
fn a_sibling_that_was_not_announced_yet_is_no_stranger() {
    need_two_cpus!();
    for mode in ["fork-epoll", "thread-epoll", "fork-block", "thread-block", "fork-poll", "thread-select"] {
        let host = Host::new();
        let server = Start { mode, options: &["pin", "each", "early"], ..Start::default() }.run(&host);
        if !stock_mode() {
            wait_for_places(&host, 2);
            let zones = host.zones();
            assert!(counter(&zones, "fallback.zone_shared") > 0, "{mode}: nobody was taken for a stranger: {zones:#}");
        }
        server.wait_for_sockets(2);
        assert_local(&server, mode);
    }
}

#[test]
fn one_socket_for_several_workers_gets_local_ones() {
    need_two_cpus!();
    for mode in ["fork-epoll", "thread-epoll"] {
        let host = Host::new();
        let server = Start { mode, options: &["pin", "reuseport"], ..Start::default() }.run(&host);
        server.wait_for_sockets(3);
        if !stock_mode() {
            wait_for_places(&host, 2);
        }
        assert_local(&server, mode);
    }
}

#[test]
fn unpinned_workers_are_left_to_the_hash() {
    need_two_cpus!();
    let host = Host::new();
    let server = Start { options: &["sockets"], ..Start::default() }.run(&host);
    let mut by_worker = BTreeMap::new();
    for cpu in 0..2 {
        for t in server.ask("127.0.0.1", cpu, 200) {
            *by_worker.entry(t.pid).or_insert(0) += 1;
        }
    }
    assert_eq!(by_worker.len(), 2);
    // The number is binomial (400 connections, probability 1/2); 140 is six standard deviations
    // below the mean.
    assert!(by_worker.values().all(|n| *n > 140), "{by_worker:?}");
    if !stock_mode() {
        let zones = host.zones();
        assert!(counter(&zones, "fallback.zone_unpinned") >= 2, "{zones:#}");
        // The first connections may have come before the BPF program was attached.
        let by_hash = selected(&zones, "to_kernel");
        assert!(by_hash >= 390 && by_hash == selected(&zones, "lookups"), "{zones:#}");
    }
    // With permission to pin workers, zones are used.
    let env = &[("FASTSOCKET_DISABLE", "shm,balance"), ("FASTSOCKET_PIN", "auto")];
    let server = Start { options: &["sockets"], env, ..Start::default() }.run(&host);
    if !stock_mode() {
        wait_for_places(&host, 2);
        assert_local(&server, "pinned by us");
    }
}

/// Starts a second server on the same port. Returns it, and how many connections from CPU 0 it
/// gets although the first server has a worker there.
fn shares(host: &Host, first: &Server, side: Side, port: u16) -> (Server, usize) {
    let port_text = port.to_string();
    let script = fsocket_testkit::helper("zone_server.py").display().to_string();
    let mut command = host.command(side, fsocket_testkit::PYTHON);
    command.args([&script, "fork-epoll", "127.0.0.1", &port_text, "2", "pin", "sockets"]);
    command.env("FASTSOCKET_DISABLE", "shm");
    let before = net::kernel_sockets(port, "0A");
    let process = fsocket_testkit::Proc::spawn(host.logs(), "second", command);
    net::wait_until(Duration::from_secs(60), || net::kernel_sockets(port, "0A") == before + 2).expect("it listens");
    let pids = children(first.process.pid());
    let second = Server { process, port };
    // The monitor looks for foreign sockets once a second while connections come.
    let by_second = || second.ask("127.0.0.1", 0, 200).iter().filter(|t| !pids.contains(&t.pid)).count();
    let mut n = 0;
    for _ in 0..12 {
        n = by_second();
        if n > 50 {
            break;
        }
        std::thread::sleep(Duration::from_millis(250));
    }
    (second, n)
}

#[test]
fn a_stranger_on_the_address_gets_its_share() {
    need_two_cpus!();
    let host = Host::new();
    let server = Start { options: &["pin", "sockets"], ..Start::default() }.run(&host);
    if !stock_mode() {
        wait_for_places(&host, 2);
    }
    let port = server.port;
    let (stranger, n) = shares(&host, &server, Stock, port);
    assert!((50..150).contains(&n), "a stranger's sockets got {n} of 200");
    drop(stranger);
    if stock_mode() {
        return;
    }
    // When the foreign server has ended, zones must work again.
    let all_local = || server.ask("127.0.0.1", 1, 50).iter().all(|t| t.cpu == 1);
    net::wait_until(Duration::from_secs(60), all_local).expect("zones again");
    // Another server with the library shares the address. Both servers must select by CPU.
    let (second, n) = shares(&host, &server, Accel, port);
    assert!((50..150).contains(&n), "the other one got {n} of 200");
    assert_local(&server, "two servers");
    // When the first server ends, the second one must serve all connections without a loss.
    drop(server);
    assert_eq!(second.ask("127.0.0.1", 0, 50).len(), 50);
    wait_for_places(&host, 2);
    assert_local(&second, "the second one");
}

#[test]
fn a_selector_of_the_programs_own_is_left_alone() {
    need_two_cpus!();
    let host = Host::new();
    // A classic BPF program that the application has attached; it selects the second socket for
    // everything.
    let code = "import socket, struct, ctypes, os, select, sys\n\
        def make():\n    s = socket.socket(); s.setsockopt(1, 15, 1); s.bind(('127.0.0.1', int(sys.argv[1]))); s.listen(64); return s\n\
        a, b = make(), make()\n\
        code = ctypes.create_string_buffer(struct.pack('HBBI', 6, 0, 0, 1))\n\
        b.setsockopt(1, 51, struct.pack('HxxxxxxP', 1, ctypes.addressof(code)))\n\
        os.sched_setaffinity(0, {0})\n\
        e = select.epoll(); e.register(a, 1); e.register(b, 1)\n\
        while True:\n    for fd, _ in e.poll():\n        s = a if fd == a.fileno() else b\n        c, _ = s.accept(); c.sendall(b'a' if s is a else b'b'); c.close()\n";
    let port = net::free_port();
    let mut command = host.command(Accel, fsocket_testkit::PYTHON);
    command.args(["-c", code, &port.to_string()]).env("FASTSOCKET_DISABLE", "shm");
    let process = fsocket_testkit::Proc::spawn(host.logs(), "selector", command);
    net::wait_until(Duration::from_secs(60), || net::kernel_sockets(port, "0A") == 2).expect("it listens");
    std::thread::sleep(Duration::from_millis(200));
    let address: SocketAddr = ([127, 0, 0, 1], port).into();
    for _ in 0..40 {
        let mut text = String::new();
        std::io::Read::read_to_string(&mut connect(address), &mut text).expect("an answer");
        assert_eq!(text, "b", "{}", process.stderr());
    }
}

#[test]
fn a_killed_process_loses_nothing_that_waited() {
    need_two_cpus!();
    if stock_mode() {
        return eprintln!("SKIPPED: stock resets what waits in a socket that is closed");
    }
    let host = Host::new();
    let server = Start { options: &["pin", "each", "respawn"], ..Start::default() }.run(&host);
    for round in 0..5 {
        wait_for_places(&host, 2);
        server.kill_while_hundred_wait(round);
    }
    let zones = host.zones();
    assert!(selected(&zones, "migrated") >= 500, "{zones:#}");
}
