//! The means by which threads of two processes wake each other. A process must not be able to
//! block, drain or change them for the other one.

use fsocket_e2e as e2e;
use fsocket_testkit::host::{Accel, Stock};
use fsocket_testkit::{helper, net, stock_mode, Host, Proc, PYTHON};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);

#[track_caller]
fn app(host: &Host, name: &str, args: &[&str]) -> Proc {
    let path = helper("wakers/wakers.py").display().to_string();
    let mut all = vec![path.as_str()];
    all.extend_from_slice(args);
    host.start(Accel, name, PYTHON, &all)
}

/// The files behind the open descriptors of `pid`, except for the standard streams.
fn files(pid: u32) -> Vec<String> {
    let dir = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("descriptors");
    dir.filter_map(|e| Some(std::fs::read_link(e.ok()?.path()).ok()?.display().to_string())).collect()
}

/// No other process may have a descriptor in which a process sleeps or to which it writes. The
/// reason: all holders of an open file share its status flags, and can read its bytes.
#[test]
fn peers_share_no_descriptor() {
    if stock_mode() {
        return eprintln!("SKIPPED: there is nothing of ours to look at in stock mode");
    }
    for place in ["epoll", "poll"] {
        let host = Host::new();
        let port = net::free_port();
        let path = helper("wakers/wakers.py").display().to_string();
        let server = host.server(Accel, "serve", port, PYTHON, &[&path, "serve", &port.to_string()]);
        let before = host.snapshot();
        let mut client = app(&host, "talk", &["talk", &port.to_string(), "200", place]);
        client.wait_stdout("ok", LIMIT);
        let delta = host.snapshot().since(&before);
        delta.assert_shm(1);
        // Both slept, and each woke the other, in most cases without the monitor.
        assert!(delta.get("wakes") >= 100, "{delta}");
        let pids = [server.pid(), client.pid()].map(|pid| pid.to_string());
        let said =
            e2e::python(&host, fsocket_testkit::Side::Stock, 30, "wakers/wakers.py", &["shared", &pids[0], &pids[1]]);
        let shared: Vec<_> = said.lines().filter(|l| l.starts_with("shared")).collect();
        // Shared descriptors that do no harm. The registry is read-only. Both sides map the
        // channel, and keep its descriptor for the next monitor (ADR 48); no process reads it,
        // writes it, or sleeps in it.
        let harmless =
            |line: &&&str| ["/dev/null", "registry", "memfd:fastsocket-channel"].iter().any(|f| line.contains(f));
        assert!(shared.iter().all(|l| harmless(&l)), "{place}: {said}");
        // The processes must really have used pipes.
        for pid in [server.pid(), client.pid()] {
            assert!(files(pid).iter().any(|f| f.starts_with("pipe:")), "{place}: {:?}", files(pid));
        }
    }
}

/// If a process misuses the pipes that it shares with a server (ADR 38), no other process may be
/// delayed. The two cases: the server takes each ring as an edge, or it has many channels and
/// reads which one rang (ADR 64).
#[test]
fn a_third_process_is_not_harmed_by_misuse_of_a_pipe() {
    if stock_mode() {
        return eprintln!("SKIPPED: there is nothing of ours to misuse in stock mode");
    }
    for more in [0, 40] {
        for how in ["full", "drained", "random"] {
            misused(more, how);
        }
    }
}

/// A server with `more` idle connections, a process whose pipes are misused (`how`), and an honest one.
fn misused(more: i128, how: &str) {
    let host = Host::new();
    let port = net::free_port();
    let (path, number) = (helper("wakers/wakers.py").display().to_string(), port.to_string());
    let before = host.snapshot();
    let _server = host.server(Accel, "serve", port, PYTHON, &[&path, "serve", &number, &more.to_string()]);
    // On a busy machine some of the connections may use the kernel.
    let idle = || host.snapshot().since(&before).get("accept_shm") >= more * 3 / 4;
    net::wait_until(LIMIT, idle).unwrap_or_else(|e| panic!("{more} idle connections: {e}"));
    // The misusing process continues meanwhile, and may itself wait for answers in vain.
    let hostile = app(&host, "hostile", &["talk", &number, "100000", "epoll"]);
    let pid = hostile.pid().to_string();
    let mut misuse = host.start(Stock, "misuse", PYTHON, &[&path, "misuse", &pid, how]);
    misuse.wait_stdout("misuses", LIMIT);
    for place in ["epoll", "poll"] {
        let before = host.snapshot();
        let mut honest = app(&host, "talk", &["talk", &number, "300", place]);
        honest.wait_stdout("ok", LIMIT);
        let said = honest.stdout();
        let worst: f64 = said.trim().trim_start_matches("ok ").parse().expect("seconds");
        // A lost wake-up would be repaired only after 2 s.
        assert!(worst < 1.5, "{more}, {how}, {place}: an answer took {worst} s");
        host.snapshot().since(&before).assert_shm(1);
    }
    assert!(misuse.running(), "{}", misuse.stderr());
}

/// If both sides run on one CPU, each wake-up is a switch to the peer and back. So a long message
/// must need few wake-ups: the sender announces 512 KiB at a time, and the receiver a third of the
/// ring.
#[test]
fn a_long_message_on_one_cpu_wakes_the_peer_seldom() {
    const TIMES: i128 = 60;
    for how in ["blocking", "poll"] {
        for mib in [1, 4] {
            let host = Host::new();
            let before = host.snapshot();
            let size = (mib << 20).to_string();
            e2e::python(&host, Accel, 60, "wakers/one_cpu.py", &[&size, &(TIMES / mib).to_string(), how]);
            let delta = host.snapshot().since(&before);
            delta.assert_shm(1);
            if !stock_mode() {
                // Two directions count.
                assert!(delta.get("wakes") <= 2 * 6 * TIMES, "{how}, {mib} MiB: {delta}");
            }
        }
    }
}

/// A peer can write the word on which a thread sleeps, and can move the thread to another word. If
/// the peer then dies, the thread must be woken nevertheless, whatever call it sleeps in.
#[test]
fn a_sleeper_that_its_peer_has_moved_learns_of_the_peers_end() {
    if stock_mode() {
        return eprintln!("SKIPPED: there is nothing of ours to write to in stock mode");
    }
    for how in ["recv", "send", "poll"] {
        let host = Host::new();
        let port = net::free_port();
        let (path, number) = (helper("second_word.py").display().to_string(), port.to_string());
        let before = host.snapshot();
        let mut server = host.server(Accel, "serve", port, PYTHON, &[&path, "serve", &number, how]);
        let pid = server.pid().to_string();
        let hostile = host.start(Accel, "move", PYTHON, &[&path, "move", &number, &pid]);
        let said = hostile.finish(LIMIT).stdout;
        let moved: u32 = said.trim().trim_start_matches("moved ").parse().expect("a number");
        assert!(moved > 0, "{how}: nobody slept there");
        server.wait_stdout("ended", LIMIT);
        host.snapshot().since(&before).assert_shm(1);
    }
}

/// A peer may change the words and wake sleepers without sending anything. That must not keep a
/// server busy.
#[test]
fn a_peer_that_only_wakes_keeps_nobody_busy() {
    if stock_mode() {
        return eprintln!("SKIPPED: there is nothing of ours to write to in stock mode");
    }
    for how in ["recv", "send", "poll"] {
        let host = Host::new();
        let port = net::free_port();
        let (path, number) = (helper("second_word.py").display().to_string(), port.to_string());
        let before = host.snapshot();
        let server = host.server(Accel, "serve", port, PYTHON, &[&path, "serve", &number, how]);
        let pid = server.pid().to_string();
        let said = host.run(Accel, "tease", 60, PYTHON, &[&path, "tease", &number, &pid]).success().stdout;
        let seconds: f64 = said.trim().trim_start_matches("seconds ").parse().expect("a number");
        let delta = host.snapshot().since(&before);
        delta.assert_shm(1);
        // The limit is 2,000 looks a second.
        let sleeps = delta.get("sleeps") as f64;
        assert!(sleeps < 3000.0 * seconds + 1000.0, "{how}: {sleeps} sleeps in {seconds} s");
    }
}
