//! Unix stream sockets: the same calls, over the kernel and over shared memory.

use fsocket_e2e as e2e;
use fsocket_testkit::host::{Accel, Stock};
use fsocket_testkit::{need, net, Host, Proc};
use std::time::Duration;

/// Random programs of two processes.
#[test]
fn random_programs() {
    let host = Host::new();
    for seed in ["1", "5000"] {
        let Some(delta) = e2e::same_transcripts(&host, 300, "unix/programs.py", &[seed, "150"]) else { return };
        // (All but those that end before their first try.)
        assert!(delta.get("path_upgrade") >= 2 * 140, "{delta}");
        assert!(delta.get("path_switch") > 0 && delta.get("hostile_peer") == 0, "{delta}");
    }
}

/// Calls that wait, and processes that fork, are replaced, pass the connection on, or are killed.
#[test]
fn calls_that_wait_and_processes_that_change() {
    let host = Host::new();
    let Some(delta) = e2e::same_transcripts(&host, 300, "unix/cases.py", &[]) else { return };
    assert!(delta.get("path_upgrade") >= 2 * 25, "{delta}");
    assert!(delta.get("path_switch") >= 8 && delta.get("hostile_peer") == 0, "{delta}");
}

/// A server that forks for each connection: the child has it alone as soon as the parent has closed it.
#[test]
fn a_server_that_forks() {
    let host = Host::new();
    let Some(delta) = e2e::same_transcripts(&host, 120, "unix/forks.py", &["20"]) else { return };
    assert!(delta.get("path_upgrade") >= 2 * 18, "{delta}");
}

#[test]
fn redis_over_its_unix_socket() {
    let (server, benchmark, cli) = (need!("redis-server"), need!("redis-benchmark"), need!("redis-cli"));
    let host = Host::new();
    let path = host.path().join("redis.sock").display().to_string();
    for side in [Stock, Accel] {
        let before = host.snapshot();
        let args = ["--port", "0", "--unixsocket", &path, "--save", "", "--appendonly", "no"];
        let redis = host.start(side, "redis", &server, &args);
        net::wait_until(Duration::from_secs(60), || std::path::Path::new(&path).exists()).expect("it listens");
        let load = ["-s", &path, "-n", "20000", "-c", "10", "-t", "set,get", "-r", "100", "-q"];
        let done = host.run(side, "benchmark", 120, &benchmark, &load).success();
        assert!(done.stdout.contains("GET:"), "{}", done.stdout);
        let asked = host.run(side, "cli", 60, &cli, &["-s", &path, "dbsize"]).success();
        assert_eq!(asked.stdout.trim(), "100");
        stop(redis);
        let delta = host.snapshot().since(&before);
        if side == Accel && !fsocket_testkit::stock_mode() {
            assert!(delta.get("path_upgrade") >= 2 * 10, "{delta}");
            assert_eq!(delta.get("hostile_peer"), 0, "{delta}");
        }
    }
}

/// The monitor is killed and comes again: nothing is lost, and connections go over again.
#[test]
fn the_monitor_is_killed_and_comes_again() {
    let server = need!("redis-server");
    if fsocket_testkit::stock_mode() {
        return eprintln!("SKIPPED: stock mode has no monitor");
    }
    let mut host = Host::new();
    let path = host.path().join("redis.sock").display().to_string();
    let args = ["--port", "0", "--unixsocket", &path, "--save", "", "--appendonly", "no"];
    let redis = host.start(Accel, "redis", &server, &args);
    net::wait_until(Duration::from_secs(60), || std::path::Path::new(&path).exists()).expect("it listens");
    let script = fsocket_testkit::script("apps/unix/lasts.py").display().to_string();
    let mut client = host.start(Accel, "client", fsocket_testkit::PYTHON, &[&script, &path]);
    client.wait_stdout("started", Duration::from_secs(60));
    for _ in 0..3 {
        go_over(&host);
        host.kill_monitor();
        std::thread::sleep(Duration::from_millis(100));
        host.start_monitor();
        assert!(client.running(), "{}", client.stderr());
    }
    go_over(&host);
    client.signal(libc::SIGTERM);
    client.finish(Duration::from_secs(60)).success().says("ok True");
    stop(redis);
}

/// Until two more connections have gone over.
#[track_caller]
fn go_over(host: &Host) {
    let before = host.snapshot();
    let since = || host.snapshot().since(&before);
    net::wait_until(Duration::from_secs(60), || since().get("path_upgrade") >= 4).expect("they go over");
    assert_eq!(since().get("hostile_peer"), 0);
}

fn stop(mut process: Proc) {
    process.signal(libc::SIGTERM);
    net::wait_until(Duration::from_secs(60), || !process.running()).expect("it ends");
}

#[test]
fn switched_off() {
    let host = Host::new();
    if fsocket_testkit::stock_mode() {
        return eprintln!("SKIPPED: stock mode has nothing to switch off");
    }
    let script = fsocket_testkit::script("apps/unix/forks.py").display().to_string();
    let mut command = host.command(Accel, fsocket_testkit::PYTHON);
    command.args([&script, "3"]).env("FASTSOCKET_DISABLE", "unix");
    let before = host.snapshot();
    Proc::spawn(host.logs(), "off", command).finish(Duration::from_secs(60)).success();
    assert_eq!(host.snapshot().since(&before).get("path_upgrade"), 0);
}
