//! Processes that are made, or confined, behind the library's back.

use fsocket_e2e as e2e;
use fsocket_testkit::host::{Accel, Side, Stock};
use fsocket_testkit::{net, script, stock_mode, Host, PYTHON};
use std::time::Duration;

/// As many connections as the script has ways, and of them those that must
/// become the kernel's: under a filter. (A channel of few connections fits under the limit.)
const WAYS: i128 = 6;
const SWITCHED: i128 = 1;

#[track_caller]
fn every_way(server: Side, client: Side) {
    let host = Host::new();
    let port = net::free_port();
    let path = script("apps/process_ways.py").display().to_string();
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

/// varnishd's manager binds, its child, under another user, listens; uvicorn gives what it has
/// bound to programs that it starts.
#[test]
fn bound_by_one_process_and_listened_on_by_another() {
    let host = Host::new();
    let path = script("apps/bound_first.py").display().to_string();
    for way in ["child", "exec", "unbound", "accept", "poll", "select", "epoll"] {
        let port = net::free_port();
        let mut served = host.server(Accel, way, port, PYTHON, &[&path, "serve", way, &port.to_string()]);
        let before = host.snapshot();
        e2e::python(&host, Accel, 60, "bound_first.py", &["ask", &port.to_string()]);
        served.wait_stdout("ok", Duration::from_secs(60));
        host.snapshot().since(&before).assert_shm(1);
    }
}

/// A child that was forked before there was anything to tell the monitor of, and that sleeps in
/// an instance which needs a waker before it listens.
#[test]
fn watched_by_a_child_before_it_listens() {
    let host = Host::new();
    let path = script("apps/watched_early.py").display().to_string();
    let port = net::free_port();
    let before = host.snapshot();
    let mut served = host.server(Accel, "early", port, PYTHON, &[&path, "serve", &port.to_string()]);
    e2e::python(&host, Accel, 60, "watched_early.py", &["ask", &port.to_string()]);
    served.wait_stdout("ok", Duration::from_secs(60));
    let delta = host.snapshot().since(&before);
    delta.assert_shm(1);
    assert_eq!(delta.get("fallback.disabled"), 0, "left to the kernel\n{delta}");
}

/// Workers that wait on an instance which their parent has made before the fork.
#[test]
fn an_epoll_instance_of_the_parents() {
    let host = Host::new();
    let path = script("apps/inherited_epoll.py").display().to_string();
    let run = |side| host.run(side, "inherited_epoll", 90, PYTHON, &[&path]).success().says("ok").stdout;
    let stock = run(Stock);
    let before = host.snapshot();
    assert_eq!(run(Accel), stock);
    host.snapshot().since(&before).assert_shm(4 * 60);
}

/// Client processes come and go while servers are busy or sleep: every instance that watches the listener, by edges or
/// not, says what it says of the kernel's.
#[test]
fn a_listener_whose_clients_come_and_go() {
    let path = script("apps/listener_edges.py").display().to_string();
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

/// More clients than the monitor may have messages under way for connect while the server looks at nothing: it finds all of
/// them without waiting.
#[test]
fn a_server_that_does_not_wait_finds_all_that_have_connected() {
    let path = script("apps/behind_back.py").display().to_string();
    for how in ["accept", "poll", "select", "epoll"] {
        let host = Host::new();
        let before = host.snapshot();
        host.run(Accel, "behind_back", 60, PYTHON, &[&path, how, "30"]).success().says("30 of 30");
        host.snapshot().since(&before).assert_shm(30);
    }
}

/// Runs `slow_monitor.py`; the longest call, milliseconds.
#[track_caller]
fn longest_call(host: &Host, args: &[&str]) -> u64 {
    let path = script("apps/slow_monitor.py").display().to_string();
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

/// A process begins to accept while the monitor does not answer: it gets the connections that come later.
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
    let path = script("apps/echo_server.py").display().to_string();
    let ports = [net::free_port(), net::free_port()];
    let _servers = ports
        .map(|port| host.server(Accel, "echo", port, PYTHON, &[&path, "threaded", &port.to_string(), "127.0.0.1"]));
    let monitor = host.monitor().expect("running").pid().to_string();
    let before = host.snapshot();
    let [known, new] = ports.map(|p| p.to_string());
    let longest = longest_call(&host, &["stopped", &monitor, &known, &new]);
    eprintln!("{longest} ms");
    // All but those that the stopped monitor was asked about.
    let shm = host.snapshot().since(&before).get("connect_shm");
    assert!(shm >= 4, "{shm}");
}

/// A program begins while the monitor takes no connection, or answers nothing: it is the kernel's at once, counts why, and
/// is over shared memory when the monitor goes on. Others may have filled the monitor's queue.
#[test]
fn a_program_that_begins_does_not_wait_for_the_monitor() {
    if stock_mode() {
        return eprintln!("SKIPPED: there is no monitor");
    }
    for is_full in [true, false] {
        let mut host = Host::new();
        let [echo, slow] = ["apps/echo_server.py", "apps/slow_monitor.py"].map(|s| script(s).display().to_string());
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

/// `bind` and `connect` are refused what a connection over shared memory has, as in the kernel.
#[test]
fn addresses_of_live_connections_are_in_use() {
    let host = Host::new();
    let Some(delta) = e2e::same_transcripts(&host, 60, "address_in_use.py", &[]) else { return };
    // One for each case, that of the client's port, and those of one port for two.
    assert!(delta.get("connect_shm") > 3 * 2 * 3 && delta.get("path_switch") == 0, "{delta}");
}

/// Its `close` is not one of the other threads' descriptors: the process uses the kernel before.
#[test]
fn a_thread_with_descriptors_of_its_own() {
    let host = Host::new();
    let unshared = fsocket_e2e::native::build(&host, "unshared", &["unshared.c"], &[]);
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

/// The private monitor is no child that a program sees that waits for all of them, as process 1 or as the parent of all
/// orphans. It ends with that program.
#[test]
fn a_program_that_waits_for_all_its_children() {
    if stock_mode() {
        return eprintln!("SKIPPED: there is no monitor");
    }
    let script = script("apps/waits_for_all.py").display().to_string();
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
