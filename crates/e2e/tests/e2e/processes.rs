//! Processes that are created or confined without the library's knowledge.

use fsocket_e2e as e2e;
use fsocket_testkit::host::{Accel, Side, Stock};
use fsocket_testkit::{helper, net, stock_mode, Host, PYTHON};
use std::time::Duration;

/// Each of the script's ways makes one connection. Those under a filter must move to the kernel.
/// (A channel of few connections fits under the limit.)
const WAYS: i128 = 6;
const SWITCHED: i128 = 1;

#[track_caller]
fn every_way(server: Side, client: Side) {
    let host = Host::new();
    let port = net::free_port();
    let path = helper("process_ways.py").display().to_string();
    let mut served = host.server(server, "ways", port, PYTHON, &[&path, "serve", &port.to_string()]);
    let before = host.snapshot();
    e2e::python(&host, client, 60, "process_ways.py", &["ask", &port.to_string()]);
    served.wait_stdout("ok", Duration::from_secs(60));
    let delta = host.snapshot().since(&before);
    if (server, client) == (Accel, Accel) {
        delta.assert_shm(WAYS);
        assert!(stock_mode() || delta.get("path_switch") >= SWITCHED, "not switched\n{delta}");
        assert_eq!(delta.get("fallback.switch"), 0, "could not be switched\n{delta}");
    } else {
        delta.assert_kernel_only();
    }
}

#[test]
fn forked_by_number_limited_or_filtered() {
    every_way(Accel, Accel);
}

#[test]
fn mixed_pairs_of_those() {
    every_way(Stock, Accel);
    every_way(Accel, Stock);
}

/// As varnish does: the manager binds, and its child, under another user, listens. As uvicorn
/// does: the parent binds, and the programs that it starts inherit the socket.
#[test]
fn bound_by_one_process_and_listened_on_by_another() {
    let host = Host::new();
    let path = helper("processes/bound_first.py").display().to_string();
    for way in ["child", "exec", "unbound", "accept", "poll", "select", "epoll"] {
        let port = net::free_port();
        let mut served = host.server(Accel, way, port, PYTHON, &[&path, "serve", way, &port.to_string()]);
        let before = host.snapshot();
        e2e::python(&host, Accel, 60, "processes/bound_first.py", &["ask", &port.to_string()]);
        served.wait_stdout("ok", Duration::from_secs(60));
        host.snapshot().since(&before).assert_shm(1);
    }
}

/// The child was forked before the library had anything to tell the monitor. It sleeps in an epoll
/// instance, and the instance needs a waker before the child listens.
#[test]
fn watched_by_a_child_before_it_listens() {
    let host = Host::new();
    let path = helper("processes/watched_early.py").display().to_string();
    let port = net::free_port();
    let before = host.snapshot();
    let mut served = host.server(Accel, "early", port, PYTHON, &[&path, "serve", &port.to_string()]);
    e2e::python(&host, Accel, 60, "processes/watched_early.py", &["ask", &port.to_string()]);
    served.wait_stdout("ok", Duration::from_secs(60));
    let delta = host.snapshot().since(&before);
    delta.assert_shm(1);
    assert_eq!(delta.get("fallback.disabled"), 0, "left to the kernel\n{delta}");
}

/// Workers wait on an epoll instance that their parent made before the fork.
#[test]
fn an_epoll_instance_of_the_parents() {
    let host = Host::new();
    let path = helper("processes/inherited_epoll.py").display().to_string();
    let run = |side| host.run(side, "inherited_epoll", 90, PYTHON, &[&path]).success().says("ok").stdout;
    let stock = run(Stock);
    let before = host.snapshot();
    assert_eq!(run(Accel), stock);
    host.snapshot().since(&before).assert_shm(4 * 60);
}

/// Client processes come and go while servers are busy or asleep. Every epoll instance that
/// watches the listener, with or without edges, must report what it reports for the kernel's
/// connections.
#[test]
fn a_listener_whose_clients_come_and_go() {
    let path = helper("processes/listener_edges.py").display().to_string();
    for (seed, workers) in [("1", "1"), ("2", "1"), ("6", "1"), ("1", "3")] {
        let host = Host::new();
        let run = |side| host.run(side, "listener_edges", 120, PYTHON, &[&path, seed, workers, "150"]).success().stdout;
        let stock = run(Stock);
        let before = host.snapshot();
        let ours = run(Accel);
        let delta = host.snapshot().since(&before);
        assert_eq!(ours, stock, "seed {seed}, {workers} workers\n{delta}");
        assert!(stock_mode() || delta.get("accept_shm") >= 20 && delta.get("connect_kernel") == 0, "{delta}");
    }
}

/// More clients connect than the monitor may have connect messages in flight, while the server
/// makes no call. Then the server must find all of them without a wait.
#[test]
fn a_server_that_does_not_wait_finds_all_that_have_connected() {
    let path = helper("processes/behind_back.py").display().to_string();
    for how in ["accept", "poll", "select", "epoll"] {
        let host = Host::new();
        // If the clients need more than a second, the watchdog moves the first connections to the
        // kernel.
        let in_time = || {
            let before = host.snapshot();
            host.run(Accel, "behind_back", 60, PYTHON, &[&path, how, "30"]).success().says("30 of 30");
            let delta = host.snapshot().since(&before);
            let is_late = delta.get("fallback.untaken") > 0;
            if !is_late {
                delta.assert_shm(30);
            }
            !is_late
        };
        assert!((0..20).any(|_| in_time()), "{how}: the clients need more than a second in each of 20 runs");
    }
}

/// Runs `slow_monitor.py`. Returns the time of the longest call in milliseconds.
#[track_caller]
fn longest_call(host: &Host, args: &[&str]) -> u64 {
    let path = helper("processes/slow_monitor.py").display().to_string();
    let args: Vec<&str> = [path.as_str()].into_iter().chain(args.iter().copied()).collect();
    let done = host.run(Accel, "slow_monitor", 120, PYTHON, &args).success().says("end");
    done.stdout.lines().next().and_then(|l| l.parse().ok()).expect("a number")
}

#[test]
fn children_of_a_parent_that_reads_nothing_do_not_wait() {
    let host = Host::new();
    let before = host.snapshot();
    let longest = longest_call(&host, &["children", "450"]);
    if !stock_mode() {
        host.snapshot().since(&before).assert_shm(451);
        assert!(longest < 100, "{longest} ms"); // bound: of the fastest of the last hundred children
    }
}

/// A process begins to accept while the monitor does not answer. It must get the connections that
/// come later.
#[test]
fn who_accepts_while_the_monitor_is_stopped_is_told_of_connections() {
    if stock_mode() {
        return eprintln!("SKIPPED: there is no monitor");
    }
    let mut host = Host::new();
    let monitor = host.monitor().expect("running").pid().to_string();
    longest_call(&host, &["joins", &monitor]);
}

#[test]
fn nobody_waits_long_for_a_monitor_that_does_not_answer() {
    if stock_mode() {
        return eprintln!("SKIPPED: there is no monitor");
    }
    let mut host = Host::new();
    let path = helper("echo_server.py").display().to_string();
    let ports = [net::free_port(), net::free_port()];
    let _servers = ports
        .map(|port| host.server(Accel, "echo", port, PYTHON, &[&path, "threaded", &port.to_string(), "127.0.0.1"]));
    let monitor = host.monitor().expect("running").pid().to_string();
    let before = host.snapshot();
    let [known, new] = ports.map(|p| p.to_string());
    let longest = longest_call(&host, &["stopped", &monitor, &known, &new]);
    eprintln!("{longest} ms");
    // All connections except those that the stopped monitor was asked about.
    let shm = host.snapshot().since(&before).get("connect_shm");
    assert!(shm >= 4, "{shm}");
}

/// A program starts while the monitor does not accept (its queue may be full) or does not answer.
/// The program must use the kernel at once and count why. When the monitor continues, the program
/// must use shared memory.
#[test]
fn a_program_that_begins_does_not_wait_for_the_monitor() {
    if stock_mode() {
        return eprintln!("SKIPPED: there is no monitor");
    }
    for is_full in [true, false] {
        let mut host = Host::new();
        let [echo, slow] = ["echo_server.py", "processes/slow_monitor.py"].map(|s| helper(s).display().to_string());
        let port = net::free_port();
        let number = port.to_string();
        let _server = host.server(Accel, "echo", port, PYTHON, &[&echo, "threaded", &number, "127.0.0.1"]);
        let before = host.snapshot();
        let monitor = |host: &mut Host, signal| host.monitor().expect("running").signal(signal);
        monitor(&mut host, libc::SIGSTOP);
        let socket = host.socket().display().to_string();
        let flood = is_full.then(|| {
            let mut flood = host.start(Stock, "fill", PYTHON, &[&slow, "fill", &socket]);
            flood.wait_stdout("full after", Duration::from_secs(60));
            flood
        });
        let mut begins = host.start(Accel, "begins", PYTHON, &[&slow, "begins", &number]);
        begins.wait_stdout("began", Duration::from_secs(60));
        monitor(&mut host, libc::SIGCONT);
        drop(flood);
        begins.signal(libc::SIGUSR1);
        begins.finish(Duration::from_secs(60)).success().says("end");
        let delta = host.snapshot().since(&before);
        assert!(delta.get("fallback.monitor_busy") >= 1, "full: {is_full}\n{delta}");
        assert!(delta.get("connect_shm") >= 1, "full: {is_full}\n{delta}");
    }
}

/// As in the kernel, `bind` and `connect` must fail for an address that a connection over shared
/// memory has.
#[test]
fn addresses_of_live_connections_are_in_use() {
    let host = Host::new();
    let Some(delta) = e2e::same_transcripts(&host, 60, "processes/address_in_use.py", &[]) else { return };
    // One connection for each case, one for each port of a client, and those of one port with two
    // peers.
    assert!(delta.get("connect_shm") > 3 * 2 * 3 && delta.get("path_switch") == 0, "{delta}");
}

/// A thread unshares its descriptor table, so its `close` does not close the other threads'
/// descriptors. The process must use the kernel before that.
#[test]
fn a_thread_with_descriptors_of_its_own() {
    let host = Host::new();
    let unshared = fsocket_e2e::native::build(&host, "unshared", &["processes/unshared.c"], &[]);
    for way in ["unshare", "close_range", "number", "cloexec"] {
        let run = |side| {
            let mut command = host.command(side, &unshared);
            command.arg(way);
            fsocket_testkit::Proc::spawn(host.logs(), way, command).finish(Duration::from_secs(60)).success().stdout
        };
        let Some(delta) = e2e::same_output(&host, run) else { return };
        assert_eq!(delta.get("connect_shm"), 1, "before\n{delta}");
        assert!(delta.get("path_switch") >= 1, "and after\n{delta}");
    }
}

/// A program that is process 1 or the parent of all orphans, and waits for all its children, must
/// not see the private monitor as a child. The monitor must end with the program.
#[test]
fn a_program_that_waits_for_all_its_children() {
    if stock_mode() {
        return eprintln!("SKIPPED: there is no monitor");
    }
    let script = helper("processes/waits_for_all.py").display().to_string();
    let cli = fsocket_testkit::artifacts::cli().display().to_string();
    let run = [cli.as_str(), "run", "--summary", "--", PYTHON, &script];
    let ways = [
        ("as 1", [&["unshare", "-p", "-f", "--mount-proc", "--"][..], &run].concat()),
        ("as another", [&[PYTHON, &script, "subreaper"][..], &run].concat()),
    ];
    for (who, words) in ways {
        let host = Host::stopped();
        let runtime = host.path().join("runtime");
        std::os::unix::fs::DirBuilderExt::mode(&mut std::fs::DirBuilder::new(), 0o700).create(&runtime).expect("made");
        let mut command = host.command(Stock, words[0]);
        command.args(&words[1..]).env("XDG_RUNTIME_DIR", &runtime).env_remove("FASTSOCKET_SOCKET");
        let done =
            fsocket_testkit::Proc::spawn(host.logs(), "waits", command).finish(Duration::from_secs(60)).success();
        assert_eq!(done.stdout, format!("reaped 3 {who}\n"), "{}", done.stderr);
        assert!(done.stderr.contains("2 connections over shared memory"), "not accelerated: {}", done.stderr);
        let socket = runtime.join("fastsocket/monitor.sock");
        let answers = || std::os::unix::net::UnixStream::connect(&socket).is_ok();
        assert!(!answers(), "its monitor goes on");
    }
}
