//! After ten thousand connections, no descriptor and no page of memory may be left.

use fsocket_abi::channel::{segment, segment_of};
use fsocket_e2e as e2e;
use fsocket_testkit::host::{Accel, Stock};
use fsocket_testkit::{helper, net, stock_mode, Host, PYTHON};
use std::time::Duration;

/// Number of descriptors that the library may keep for reuse.
const POOL: usize = 32;
/// Shared memory in bytes that may stay resident: as much as the simultaneous connections have
/// used.
const RESIDENT: u64 = 64 << 20;
/// Address space in kB that may stay reserved: 64 channels that have ended and a few open ones,
/// with one segment each.
const KEPT_SPACE: i64 = (64 + 4) * (segment(0).1 / 1024) as i64;

/// Address space of a process in kB.
fn address_space(pid: u32) -> i64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("status");
    let line = status.lines().find_map(|l| l.strip_prefix("VmSize:")).expect("VmSize");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}

#[track_caller]
fn churn(kind: &str, count: usize, concurrent: usize) {
    let host = Host::new();
    let (server, port) = e2e::echo_server(&host, Accel, kind, "127.0.0.1");
    let port = port.to_string();
    e2e::python(&host, Accel, 60, "leaks/churn.py", &[&port, "50", &concurrent.to_string()]);
    let warm = host.snapshot();
    let server_before = server.descriptors();
    let output =
        e2e::python(&host, Accel, 240, "leaks/churn.py", &[&port, &count.to_string(), &concurrent.to_string()]);
    let numbers: Vec<usize> = output
        .lines()
        .find(|line| line.starts_with("fds "))
        .expect("fds line")
        .split_whitespace()
        .skip(1)
        .map(|word| word.parse().expect("number"))
        .collect();
    assert!(numbers[1] <= numbers[0] + POOL, "client descriptors {} -> {}", numbers[0], numbers[1]);
    let settled = net::wait_until(Duration::from_secs(60), || server.descriptors() <= server_before + POOL);
    assert!(settled.is_ok(), "server descriptors {server_before} -> {}", server.descriptors());
    let after = host.snapshot();
    after.since(&warm).assert_shm(count as i128);
    assert!(after.resident() <= RESIDENT, "{} bytes of shared memory stay resident", after.resident());
}

#[test]
fn ten_thousand_connections_one_by_one() {
    churn("epoll", 10_000, 1);
}

#[test]
fn ten_thousand_connections_200_at_a_time() {
    churn("epoll-edge", 10_000, 200);
}

#[test]
fn two_thousand_connections_to_threads() {
    churn("threaded", 2_000, 20);
}

#[test]
fn a_hundred_client_processes_leave_nothing() {
    let host = Host::new();
    let (server, port) = e2e::echo_server(&host, Accel, "epoll", "127.0.0.1");
    let port = port.to_string();
    let args = ["seq", &port, "--connections", "2", "--bytes", "1000"];
    // Make a client run first. The monitor may not know the listener when it comes, and the first
    // channel of the server takes more address space than later ones.
    let start = host.snapshot();
    let served = || {
        e2e::python(&host, Accel, 60, "echo_client.py", &args);
        stock_mode() || host.snapshot().since(&start).get("accept_shm") > 0
    };
    assert!(net::wait_until(Duration::from_secs(60), served).is_ok(), "nothing comes over shared memory");
    let descriptors = server.descriptors();
    let space = address_space(server.pid());
    let before = host.snapshot();
    for _ in 0..100 {
        e2e::python(&host, Accel, 60, "echo_client.py", &args);
    }
    let after = host.snapshot();
    after.since(&before).assert_shm(200);
    let settled = net::wait_until(Duration::from_secs(60), || server.descriptors() <= descriptors + POOL);
    assert!(settled.is_ok(), "server descriptors {descriptors} -> {}", server.descriptors());
    // On a busy machine the server learns late of the last ends.
    let grown = || address_space(server.pid()).saturating_sub(space);
    let settled = net::wait_until(Duration::from_secs(60), || grown() <= KEPT_SPACE);
    assert!(settled.is_ok(), "address space grew by {} kB", grown());
    if let Some(report) = host.snapshot().report {
        assert!(report.channels.len() <= 4, "channels of ended clients remain: {:?}", report.channels);
    }
}

/// The server has the library and its clients have not, so all connections use the kernel.
fn of_the_kernel(kind: &str, count: usize) {
    let host = Host::new();
    let (server, port) = e2e::echo_server(&host, Accel, kind, "127.0.0.1");
    let churn = |n: usize| e2e::python(&host, Stock, 240, "leaks/churn.py", &[&port.to_string(), &n.to_string()]);
    churn(1000);
    let (before, was) = (host.snapshot(), anonymous(server.pid()));
    churn(count);
    let grown = anonymous(server.pid()).saturating_sub(was);
    // This many bytes for each connection are a leak. (Threads that run at the same time keep stacks.)
    const LEAK: i64 = 40;
    assert!(grown < count as i64 * LEAK / 1024, "{kind}: {grown} kB for {count} connections");
    let delta = host.snapshot().since(&before);
    assert!(stock_mode() || delta.get("accept_kernel") >= count as i128, "{delta}");
    assert_eq!(delta.get("accept_shm"), 0, "{delta}");
}

/// Anonymous memory of a process in kB.
fn anonymous(pid: u32) -> i64 {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).expect("smaps_rollup");
    let line = maps.lines().find_map(|l| l.strip_prefix("Anonymous:")).expect("Anonymous");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}

#[test]
fn connections_in_the_kernel_leave_nothing() {
    of_the_kernel("epoll", 20_000);
}

#[test]
fn connections_in_the_kernel_watched_by_edges_leave_nothing() {
    of_the_kernel("epoll-edge", 20_000);
}

#[test]
fn connections_in_the_kernel_with_threads_leave_nothing() {
    of_the_kernel("threaded", 20_000);
}

/// A channel may take address space for its connections, and for as many again at most.
#[test]
fn address_space_is_in_proportion_to_use() {
    let host = Host::new();
    let before = host.snapshot();
    let counts = [1, 10, 100];
    let output =
        e2e::python(&host, Accel, 60, "leaks/space.py", &counts.map(|n| n.to_string()).each_ref().map(|s| &**s));
    host.snapshot().since(&before).assert_shm(111);
    for n in counts {
        let line = output.lines().find_map(|l| l.strip_prefix(&format!("space {n} "))).expect("a line");
        let grown: usize = line.parse().expect("a number");
        // This process has both ends, so two mappings. The constant allows for the growth of the
        // interpreter.
        let most = 2 * segment(segment_of(n - 1)).1 / 1024 + 4096;
        assert!(grown <= most, "{grown} kB for {n} connections, {most} at most");
    }
}

/// More listeners than a process may have leases of ports, or channels, at one time.
#[test]
fn a_thousand_listeners_one_after_the_other() {
    let host = Host::new();
    let before = host.snapshot();
    e2e::python(&host, Accel, 60, "leaks/listeners.py", &["1000"]);
    host.snapshot().since(&before).assert_shm(1000);
}

/// The other side keeps its descriptors of closed connections. The closing side must free the
/// memory that it has used. Bytes that are unread at the close must remain until they are read.
#[test]
fn a_side_that_closes_keeps_no_memory() {
    // Memory that a process may keep for its next connections, on each side, and for one open
    // connection.
    const KEPT: u64 = 24 << 20;
    const N: &str = "40";
    for way in ["down", "up", "both", "half"] {
        let host = Host::new();
        let (path, port) = (helper("rings.py").display().to_string(), net::free_port());
        let number = port.to_string();
        let before = host.snapshot();
        let mut server = host.server(Accel, "serve", port, PYTHON, &[&path, "serve", &number, N, way]);
        let mut client = host.start(Accel, "hold", PYTHON, &[&path, "hold", &number, N, way]);
        client.wait_stdout("holds", Duration::from_secs(60));
        server.wait_stdout("served", Duration::from_secs(60));
        let freed = net::wait_until(Duration::from_secs(60), || stock_mode() || host.snapshot().resident() <= KEPT);
        let resident = host.snapshot().resident() >> 20;
        assert!(freed.is_ok(), "{way}: {resident} MiB of connections that one side has closed");
        host.snapshot().since(&before).assert_shm(40);
    }
}

/// Slots are reused while the other side frees their old memory. The next connection must not lose
/// a byte.
#[test]
fn memory_that_is_freed_is_not_the_next_connections() {
    let host = Host::new();
    let (path, port) = (helper("rings.py").display().to_string(), net::free_port());
    let number = port.to_string();
    let before = host.snapshot();
    let _server = host.server(Accel, "serve", port, PYTHON, &[&path, "serve", &number, "1000", "down"]);
    for _ in 0..2 {
        host.run(Accel, "short", 60, PYTHON, &[&path, "short", &number, "100"]).success().says("ok");
    }
    host.snapshot().since(&before).assert_shm(200);
}
