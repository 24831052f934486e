//! Servers that fork for each connection: if the connections are short, the listener uses the
//! kernel (ADR 76).

use fsocket_e2e as e2e;
use fsocket_testkit::counters::Delta;
use fsocket_testkit::host::{Accel, Stock};
use fsocket_testkit::{artifacts, helper, net, stock_mode, Host, Proc, PYTHON};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

/// Runs the client of `forking.py` with so many connections and requests. Returns the changes of
/// the counters.
fn asked(host: &Host, port: u16, how: &str, connections: u32, requests: u32) -> Delta {
    let before = host.snapshot();
    let (port, n, m) = (port.to_string(), connections.to_string(), requests.to_string());
    e2e::python(host, Accel, 60, "short_lived/forking.py", &[how, &port, &n, &m]);
    let count = |delta: &Delta| delta.get("connect_shm") + delta.get("connect_kernel");
    let mut delta = host.snapshot().since(&before);
    // A process that has only used the kernel reports its counters when it ends, which may be
    // after the first report.
    for _ in 0..100 {
        if stock_mode() || count(&delta) >= i128::from(connections) {
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
        delta = host.snapshot().since(&before);
    }
    let all = count(&delta);
    assert!(stock_mode() || all == i128::from(connections), "{all} connections\n{delta}");
    assert_eq!(delta.get("connect_kernel"), delta.get("fallback.no_listener"), "another reason\n{delta}");
    delta
}

#[test]
fn the_listener_is_the_kernels_after_short_ones_for_good() {
    let host = Host::new();
    let path = helper("short_lived/forking.py").display().to_string();
    let port = net::free_port();
    let _server = host.server(Accel, "forking", port, PYTHON, &[&path, "serve", &port.to_string()]);
    if stock_mode() {
        asked(&host, port, "ask", 20, 1);
        return;
    }
    // The next connection may be opened before the last child has noted how long its connection
    // was.
    let delta = asked(&host, port, "ask", 60, 1);
    let learned = delta.get("connect_shm");
    assert!((16..30).contains(&learned), "learned after {learned}\n{delta}");
    assert!(delta.get("fallback.short_lived") > 0, "{delta}");
    for (connections, requests) in [(20, 1), (10, 60)] {
        let delta = asked(&host, port, "ask", connections, requests);
        let counted = ["connect_shm", "path_upgrade", "accept_kernel"].map(|name| delta.get(name));
        assert_eq!(counted, [0, 0, i128::from(connections)], "{requests} requests\n{delta}");
    }
}

#[test]
fn connections_that_last_stay_over_shared_memory() {
    let host = Host::new();
    let path = helper("short_lived/forking.py").display().to_string();
    let port = net::free_port();
    let _server = host.server(Accel, "forking", port, PYTHON, &[&path, "serve", &port.to_string()]);
    let delta = asked(&host, port, "ask", 60, 30);
    assert_eq!((delta.get("connect_kernel"), delta.get("fallback.short_lived")), (0, 0), "{delta}");
}

#[test]
fn many_at_once_that_go_on_stay_over_shared_memory() {
    let host = Host::new();
    let path = helper("short_lived/forking.py").display().to_string();
    let port = net::free_port();
    let _server = host.server(Accel, "forking", port, PYTHON, &[&path, "serve", &port.to_string()]);
    let delta = asked(&host, port, "together", 40, 3);
    assert_eq!(delta.get("connect_kernel"), 0, "{delta}");
}

/// A listener costs as much as ten connections. Where each has one, the kernel serves most of them (ADR 45).
#[test]
fn listeners_for_one_connection_each_become_the_kernels() {
    let host = Host::new();
    let counted = |n: i128| {
        let before = host.snapshot();
        e2e::python(&host, Accel, 60, "short_lived/listeners.py", &[&n.to_string()]);
        let delta = host.snapshot().since(&before);
        let both = delta.get("listen") + delta.get("fallback.resource");
        assert!(stock_mode() || both == n, "{n} listeners\n{delta}");
        delta.get("listen")
    };
    assert!(stock_mode() || counted(100) == 100, "a few are registered");
    let registered = counted(2000);
    assert!(stock_mode() || (128..1000).contains(&registered), "of 2000 {registered} were registered");
}

/// Page faults of a process so far, without those of its children.
fn faults(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let behind_name = stat.rsplit_once(')').unwrap().1;
    behind_name.split_whitespace().nth(7).unwrap().parse().unwrap()
}

/// Number of pages that the process's only child shares with no other process: pages written by
/// the child, and pages that the parent has written since the fork.
fn pages_of_child(pid: u32) -> u64 {
    let children = || std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    let one = || children().trim().parse::<u32>().ok();
    assert!(net::wait_until(Duration::from_secs(60), || one().is_some()).is_ok(), "children: {}", children());
    let maps = std::fs::read_to_string(format!("/proc/{}/smaps_rollup", one().unwrap())).unwrap();
    let private = maps.lines().find_map(|line| line.strip_prefix("Private_Dirty:")).unwrap();
    private.trim().trim_end_matches(" kB").parse::<u64>().unwrap() / 4
}

/// Each page that the server writes between two forks is copied, and so is each page that the
/// child writes. For a connection in the kernel, the server may write three pages more than on
/// stock sockets: notes about descriptors, about the connection, and for the fork. The child may
/// write the same, and some pages of its own. (Pages of code are mapped, not copied. Their number
/// depends on the compiler, so they are not counted.)
#[test]
fn a_fork_for_a_connection_writes_few_pages() {
    let host = Host::new();
    const N: u64 = 100;
    let [stock, ours] = [Stock, Accel].map(|side| {
        let mut command = host.command(side, artifacts::bench());
        command.args(["end", "--server", "process", "--request", "64", "--answer", "64"]);
        let server = Proc::spawn(host.logs(), "forking", command);
        let said = || server.stdout().trim().parse::<u16>().ok();
        assert!(net::wait_until(Duration::from_secs(60), || said().is_some()).is_ok(), "{}", server.stderr());
        let ask = |children: &mut u64| {
            let mut conn = TcpStream::connect(("127.0.0.1", said().unwrap())).unwrap();
            conn.write_all(&[1; 64]).unwrap();
            conn.read_exact(&mut [0; 64]).unwrap();
            *children += pages_of_child(server.pid());
            conn.shutdown(Shutdown::Write).unwrap();
            assert_eq!(conn.read(&mut [0]).unwrap(), 0, "until the child is through");
        };
        // The library also learns from a client that has no library.
        (0..60).for_each(|_| ask(&mut 0));
        let (before, counted, mut children) = (faults(server.pid()), host.snapshot(), 0);
        (0..N).for_each(|_| ask(&mut children));
        let (faults, counted) = (faults(server.pid()) - before, host.snapshot().since(&counted));
        assert_eq!(counted.get("accept_shm"), 0, "{counted}");
        (faults, children)
    });
    let what =
        format!("pages of {N} connections, faults of the server and written by children: {ours:?}; stock: {stock:?}");
    assert!(ours.0 < stock.0 + 5 * N && ours.1 < stock.1 + 8 * N, "{what}");
    eprintln!("{what}");
}

/// A connection on standard input and output must use the kernel. After the first such connection,
/// so must the listener of the inetd.
#[test]
fn the_listener_of_an_inetd_is_the_kernels() {
    let host = Host::new();
    let path = helper("short_lived/forking.py").display().to_string();
    let port = net::free_port();
    let _server = host.server(Accel, "forking", port, PYTHON, &[&path, "inetd", &port.to_string()]);
    let delta = asked(&host, port, "ask", 20, 1);
    let learned = delta.get("connect_shm");
    assert!(stock_mode() || (1..10).contains(&learned), "learned after {learned}\n{delta}");
    let delta = asked(&host, port, "ask", 20, 40);
    assert_eq!((delta.get("connect_shm"), delta.get("path_switch")), (0, 0), "{delta}");
}

/// The library also learns from clients without the library how long connections are.
#[test]
fn strangers_are_learned_from() {
    let host = Host::new();
    let path = helper("short_lived/forking.py").display().to_string();
    let port = net::free_port();
    let _server = host.server(Accel, "forking", port, PYTHON, &[&path, "serve", &port.to_string()]);
    e2e::python(&host, Stock, 60, "short_lived/forking.py", &["ask", &port.to_string(), "40", "1"]);
    let delta = asked(&host, port, "ask", 10, 1);
    assert!(stock_mode() || delta.get("connect_kernel") == 10, "{delta}");
}

/// A child may use its connection in any way, also in an epoll instance.
#[test]
fn a_child_with_an_epoll_instance() {
    let host = Host::new();
    let path = helper("short_lived/forking.py").display().to_string();
    for how in ["epoll", "edge", "oneshot", "dup", "nested", "threads", "fork"] {
        let port = net::free_port();
        let args = [&path, "serve", &port.to_string(), how];
        let _server = host.server(Accel, "forking", port, PYTHON, &args);
        asked(&host, port, "ask", 60, 1);
        for (connections, requests) in [(5, 2), (1, 300)] {
            let delta = asked(&host, port, "ask", connections, requests);
            assert!(stock_mode() || delta.get("connect_shm") == 0, "{how}\n{delta}");
        }
    }
}
