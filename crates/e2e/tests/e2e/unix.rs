//! Unix stream sockets: the same calls over the kernel and over shared memory.

use fsocket_e2e as e2e;
use fsocket_testkit::host::{Accel, Stock};
use fsocket_testkit::{need, net, Host, Proc};
use std::time::Duration;

/// Two processes make random calls.
#[test]
fn random_programs() {
    let host = Host::new();
    let (mut upgrades, mut switches) = (0, 0);
    // On a busy machine an end may be late, and then both ends wait longer before they move the
    // next connections.
    for seed in ["1", "5000", "10000", "15000", "20000"] {
        if upgrades >= 2 * 200 && switches > 0 {
            break;
        }
        let Some(delta) = e2e::same_transcripts(&host, 300, "unix/programs.py", &[seed, "150"]) else { return };
        assert_eq!(delta.get("hostile_peer"), 0, "{delta}");
        upgrades += delta.get("path_upgrade");
        switches += delta.get("path_switch");
    }
    assert!(upgrades >= 2 * 100 && switches > 0, "{upgrades} ends went over, {switches} back");
}

/// Waiting calls, while processes fork, execute programs, pass the connection on, or are killed.
#[test]
fn calls_that_wait_and_processes_that_change() {
    let host = Host::new();
    let Some(delta) = e2e::same_transcripts(&host, 300, "unix/cases.py", &[]) else { return };
    assert!(delta.get("path_upgrade") >= 2 * 16, "{delta}");
    assert!(delta.get("path_switch") >= 6 && delta.get("hostile_peer") == 0, "{delta}");
}

/// Sockets that are watched or duplicated before they are connected, as nginx does with its
/// upstream sockets.
#[test]
fn used_before_they_are_connected() {
    let host = Host::new();
    let Some(delta) = e2e::same_transcripts(&host, 120, "unix/early.py", &[]) else { return };
    assert!(delta.get("path_upgrade") >= 2 * 5, "{delta}");
    assert_eq!(delta.get("hostile_peer"), 0, "{delta}");
}

/// A receive with SO_RCVTIMEO does not keep its connection in the kernel.
#[test]
fn receives_with_a_time_limit() {
    let host = Host::new();
    let Some(delta) = e2e::same_transcripts(&host, 120, "unix/timed.py", &[]) else { return };
    assert_eq!(delta.get("path_upgrade"), 2 * 2, "{delta}");
}

/// A server that forks for each connection. The child has the connection alone as soon as the
/// parent has closed it.
#[test]
fn a_server_that_forks() {
    let host = Host::new();
    let Some(delta) = e2e::same_transcripts(&host, 120, "unix/forks.py", &["20"]) else { return };
    assert!(delta.get("path_upgrade") >= 2 * 12, "{delta}");
}

/// Waits until the server listens. The path exists a little earlier.
#[track_caller]
fn listens(path: &str) {
    let connects = || std::os::unix::net::UnixStream::connect(path).is_ok();
    net::wait_until(Duration::from_secs(60), connects).expect("it listens");
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
        listens(&path);
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

/// The monitor is killed and started again. No byte may be lost, and connections must move to
/// shared memory again.
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
    listens(&path);
    let script = fsocket_testkit::helper("unix/lasts.py").display().to_string();
    let mut client = host.start(Accel, "client", fsocket_testkit::PYTHON, &[&script, &path]);
    client.wait_stdout("started", Duration::from_secs(60));
    let start = host.snapshot();
    assert!(go_over(&host), "they stay in the kernel: {}", host.snapshot().since(&start));
    let mut again = 0;
    for _ in 0..3 {
        host.kill_monitor();
        std::thread::sleep(Duration::from_millis(100));
        host.start_monitor();
        again += u32::from(go_over(&host));
        assert!(client.running(), "{}", client.stderr());
    }
    // On a busy machine, a process whose requests were answered late asks nothing for up to half a
    // minute.
    assert!(again > 0, "they stay in the kernel: {}", host.snapshot().since(&start));
    client.signal(libc::SIGTERM);
    client.finish(Duration::from_secs(60)).success().says("ok True");
    stop(redis);
}

/// Whether two more connections move to shared memory.
#[track_caller]
fn go_over(host: &Host) -> bool {
    let before = host.snapshot();
    let since = || host.snapshot().since(&before);
    let over = net::wait_until(Duration::from_secs(40), || since().get("path_upgrade") >= 4);
    assert_eq!(since().get("hostile_peer"), 0);
    over.is_ok()
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
    let script = fsocket_testkit::helper("unix/forks.py").display().to_string();
    let mut command = host.command(Accel, fsocket_testkit::PYTHON);
    command.args([&script, "3"]).env("FASTSOCKET_DISABLE", "unix");
    let before = host.snapshot();
    Proc::spawn(host.logs(), "off", command).finish(Duration::from_secs(60)).success();
    assert_eq!(host.snapshot().since(&before).get("path_upgrade"), 0);
}

/// Reports must name Unix sockets as ss(8) does, and rules must find them by their names.
#[test]
fn names_in_reports_and_rules() {
    if fsocket_testkit::stock_mode() {
        return eprintln!("SKIPPED: stock mode has no reports");
    }
    // The monitor reads the rules before the directory of this host exists, so the path is a fixed
    // one.
    let place = std::env::temp_dir().join(format!("fastsocket-test-names-{}", std::process::id()));
    let path = |name: &str| place.join(name).display().to_string();
    std::fs::create_dir_all(path("kept")).expect("a directory");
    let (shared, kept, name) = (path("shared"), path("kept/s"), format!("@fastsocket-{}", std::process::id()));
    let denied = format!("{name}0");
    let rules = format!(
        "[[rule]]\naction = \"deny\"\npath = {:?}\n[[rule]]\naction = \"deny\"\naddress = \"::/0\"\n\
         [[rule]]\naction = \"deny\"\npath = \"{denied}\"\n",
        path("kept")
    );
    let host = Host::for_all_users(&rules);
    let script = fsocket_testkit::helper("unix/names.py").display().to_string();
    let cli = fsocket_testkit::artifacts::cli().display().to_string();
    let mut command = host.command(Accel, fsocket_testkit::PYTHON);
    command.args([&script, &cli, "2", &shared, &kept, &name, &denied]).env("FASTSOCKET_SOCKET", host.socket());
    let done = Proc::spawn(host.logs(), "names", command).finish(Duration::from_secs(120));
    std::fs::remove_dir_all(&place).expect("a directory");
    let said = done.success().stdout;
    let seen: Vec<(String, String)> = serde_json::from_str(&said).expect("pairs");
    let ends = |name: &str| [("*".to_owned(), name.to_owned()), (name.to_owned(), "*".to_owned())];
    let mut wanted = [ends(&shared), ends(&name)].concat();
    wanted.sort();
    assert_eq!(seen, wanted);
}
