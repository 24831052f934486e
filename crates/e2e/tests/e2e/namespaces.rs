//! Threads and children in another network namespace than their program: what they reach is what
//! the kernel would let them reach.

use fsocket_testkit::host::{Accel, Side, Stock};
use fsocket_testkit::{need_hosts, net, script, stock_mode, Delta, Host, PYTHON};

/// What `tests/apps/namespaces.py` says of a case, against a server of that side.
#[track_caller]
fn lines(server: Side, client: Side, case: &str, off: &str) -> (String, Delta) {
    let host = Host::new();
    let path = script("apps/namespaces.py").display().to_string();
    let port = net::free_port();
    let text = port.to_string();
    let _server = host.server(server, "serve", port, PYTHON, &[&path, "serve", &text]);
    let before = host.snapshot();
    let mut command = host.command(client, PYTHON);
    command.args([&path, case, &text]).env("FASTSOCKET_DISABLE", off);
    let done = fsocket_testkit::Proc::spawn(host.logs(), case, command);
    let done = done.finish(std::time::Duration::from_secs(60)).success().says("ok");
    let delta = host.snapshot().since(&before);
    assert_eq!(delta.get("hostile_peer") + delta.get("reset_shm"), 0, "{delta}");
    (done.stdout, delta)
}

/// The lines of ours, of mixed pairs and without shared memory are those of stock; the connections
/// of the namespace that both know are over shared memory.
#[track_caller]
fn as_in_the_kernel(case: &str, shm: i128) {
    let (stock, _) = lines(Stock, Stock, case, "");
    let (ours, delta) = lines(Accel, Accel, case, "");
    assert_eq!(ours, stock, "{case}\n{delta}");
    if !stock_mode() {
        assert_eq!(delta.get("connect_shm"), shm, "{case}\n{delta}");
    }
    for (server, client, off) in [(Accel, Stock, ""), (Stock, Accel, ""), (Accel, Accel, "shm")] {
        let (mixed, delta) = lines(server, client, case, off);
        assert_eq!(mixed, stock, "{case}: {server:?}, {client:?} {off}\n{delta}");
    }
}

#[test]
fn a_child_that_leaves() {
    need_hosts!();
    as_in_the_kernel("unshare", 1);
    as_in_the_kernel("unshare-number", 1);
}

#[test]
fn a_child_that_is_born_elsewhere() {
    need_hosts!();
    for case in ["clone-number", "clone3", "clone-libc"] {
        as_in_the_kernel(case, 1);
    }
}

/// Two connections and the one that is kept; from the first setns on the process has the kernel's.
#[test]
fn a_thread_elsewhere() {
    need_hosts!();
    as_in_the_kernel("threads", 3);
    as_in_the_kernel("back-and-forth", 2);
}

/// The listener belongs where it was made: its connections come from there, and local listen
/// sockets are made there (by the monitor), not where the workers are.
#[test]
fn workers_elsewhere_on_a_listener_from_here() {
    need_hosts!();
    as_in_the_kernel("inherited", 40);
    let (_, delta) = lines(Accel, Accel, "inherited", "shm");
    // The other worker may come too late for any.
    assert!(stock_mode() || delta.get("zone_joins") >= 1, "{delta}");
    assert!(stock_mode() || delta.get("accept_local") > 0, "{delta}");
    assert!(stock_mode() || delta.get("accept_local") + delta.get("accept_global") == 40, "{delta}");
}
