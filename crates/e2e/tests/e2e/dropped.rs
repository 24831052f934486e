//! Processes that give up rights must no longer share memory with their fork group.

use fsocket_e2e::{self as e2e, native};
use fsocket_testkit::host::Accel;
use fsocket_testkit::{helper, net, stock_mode, Delta, Host, Proc, PYTHON};
use std::time::Duration;

/// Calls by which a child gives up rights.
const WAYS: [&str; 9] =
    ["setuid", "setreuid", "setresuid", "number", "thread", "failed", "capset", "landlock", "seccomp"];

/// After a child has given up its rights, it must neither find nor change the bytes of its parent,
/// and must hold no descriptor of the memory with these bytes.
#[track_caller]
fn attacks(moment: &str, over_shm: i128, switched: i128) {
    let host = Host::new();
    let program = native::build(&host, "dropped", &["dropped/dropped.c"], &[]);
    let program = program.display().to_string();
    for how in WAYS {
        let port = net::free_port().to_string();
        let number = port.parse().expect("a port");
        let before = host.snapshot();
        let served = host.server(Accel, how, number, &program, &["serve", &port, how, moment]);
        let asked = host.start(Accel, "ask", &program, &["ask", &port, moment]);
        let finish = |p: Proc| p.finish(Duration::from_secs(60)).success().says("ok");
        finish(asked);
        finish(served);
        let delta = host.snapshot().since(&before);
        if !stock_mode() {
            delta.assert_shm(over_shm);
            assert_eq!(delta.get("fallback.switch"), 0, "{how}: could not be switched\n{delta}");
            assert!(delta.get("path_switch") >= switched, "{how}: not switched\n{delta}");
        }
    }
}

#[test]
fn a_connection_that_the_child_had_closed() {
    attacks("closed", 2, 0);
}

#[test]
fn a_connection_in_the_hands_of_the_child() {
    attacks("hand", 2, 1);
}

#[test]
fn a_connection_that_came_after_the_fork() {
    attacks("early", 2, 0);
}

/// A relative with the same rights shares the memory of its parent's sockets, and writes garbage
/// into it. The parent's connections may break, but the parent and the client must live.
#[test]
fn memory_of_sockets_that_a_relative_writes_into() {
    let host = Host::new();
    let program = native::build(&host, "dropped", &["dropped/dropped.c"], &[]);
    let program = program.display().to_string();
    for _ in 0..3 {
        let port = net::free_port().to_string();
        let before = host.snapshot();
        let served = host.server(Accel, "suffer", port.parse().expect("a port"), &program, &["suffer", &port]);
        let poke = host.start(Accel, "poke", &program, &["poke", &port]);
        let finish = |p: Proc| p.finish(Duration::from_secs(60)).success().says("ok");
        finish(poke);
        finish(served);
        let delta = host.snapshot().since(&before);
        assert!(stock_mode() || delta.get("connect_shm") == 6, "{delta}");
    }
}

/// A server gives up root's rights, and clients ask it one after the other. Returns the changes of
/// the counters.
#[track_caller]
fn serves(how: &str, connections: i128) -> Delta {
    let host = Host::new();
    let port = net::free_port();
    let path = helper("dropped/dropping.py").display().to_string();
    let before = host.snapshot();
    let _server = host.server(Accel, how, port, PYTHON, &[&path, "serve", how, &port.to_string()]);
    e2e::python(&host, Accel, 60, "dropped/dropping.py", &["ask", &port.to_string(), &connections.to_string()]);
    // Start more clients, because each gets a channel of its own.
    for _ in 0..3 {
        e2e::python(&host, Accel, 60, "dropped/dropping.py", &["ask", &port.to_string(), "1"]);
    }
    host.snapshot().since(&before)
}

#[test]
fn servers_without_rights_serve_over_shared_memory() {
    for how in ["workers", "alone", "chroot"] {
        let delta = serves(how, 20);
        delta.assert_shm(23);
        assert_eq!(delta.get("path_switch"), 0, "{how}: switched\n{delta}");
    }
}

#[test]
fn sessions_that_are_handed_over_go_on_in_the_kernel() {
    let delta = serves("session", 5);
    delta.assert_shm(8);
    assert_eq!(delta.get("fallback.switch"), 0, "{delta}");
    assert!(stock_mode() || delta.get("path_switch") >= 8, "{delta}");
}

/// A process that can become root again has given up nothing, so it stays in its group.
#[test]
fn acting_as_another_user_for_a_moment_costs_nothing() {
    let delta = serves("toggle", 10);
    delta.assert_shm(13);
    assert_eq!(delta.get("path_switch"), 0, "{delta}");
}

/// The kernel gives each connection to one of the workers. No connection may wait for a worker
/// that does not accept it.
#[test]
fn workers_with_different_rights_share_no_memory() {
    for how in ["served", "mixed"] {
        let delta = serves(how, 20);
        assert_eq!(delta.get("fallback.switch"), 0, "{how}\n{delta}");
        assert!(stock_mode() || delta.get("accept_kernel") > 0, "{how}: all over shared memory\n{delta}");
    }
}
