//! Threads and children in another network namespace than their program must reach exactly what
//! the kernel lets them reach.

use fsocket_testkit::host::{Accel, Side, Stock};
use fsocket_testkit::{helper, need_hosts, net, stock_mode, Delta, Host, PYTHON};

/// Output and counters of `crates/e2e/tests/e2e/namespaces/namespaces.py` for a case, against a
/// server of that side.
#[track_caller]
fn lines(server: Side, client: Side, case: &str, off: &str) -> (String, Delta) {
    let host = Host::new();
    let path = helper("namespaces/namespaces.py").display().to_string();
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

/// The output must be that of stock sockets: with the library, in mixed pairs, and without shared
/// memory. Connections within a namespace that both sides know must use shared memory.
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

/// Two connections and the one that stays open. From the first setns on, the process uses kernel
/// connections.
#[test]
fn a_thread_elsewhere() {
    need_hosts!();
    as_in_the_kernel("threads", 3);
    as_in_the_kernel("back-and-forth", 2);
}

/// The listener belongs to the namespace where it was made. Its connections come from there. The
/// monitor makes local listen sockets there, too, not in the namespace of the workers.
#[test]
fn workers_elsewhere_on_a_listener_from_here() {
    need_hosts!();
    as_in_the_kernel("inherited", 40);
    let (_, delta) = lines(Accel, Accel, "inherited", "shm");
    // The second worker may start too late to accept any.
    assert!(stock_mode() || delta.get("zone_joins") >= 1, "{delta}");
    assert!(stock_mode() || delta.get("accept_local") > 0, "{delta}");
    // (A worker that waits steals from one that is late.)
    let accepted: i128 = ["accept_local", "accept_stolen", "accept_global"].map(|name| delta.get(name)).iter().sum();
    assert!(stock_mode() || accepted == 40, "{delta}");
}
