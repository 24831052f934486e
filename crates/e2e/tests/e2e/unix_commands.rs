//! Commands about Unix connections: their output, and what they change.

use fsocket_testkit::host::{Accel, Side, Stock};
use fsocket_testkit::{artifacts, helper, need, net, stock_mode, Finished, Host, Proc, PYTHON};
use serde_json::Value;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);

/// A redis server at a Unix socket, and a client that asks over one connection that lasts and over new ones.
struct Pair {
    redis: Proc,
    client: Proc,
    path: String,
    host: Host,
}

impl Pair {
    /// `None`: there is no redis, or no library.
    fn new(server: Side) -> Option<Pair> {
        if stock_mode() {
            eprintln!("SKIPPED: stock mode has no command line");
            return None;
        }
        let Some(program) = fsocket_testkit::find_program("redis-server") else {
            assert!(std::env::var_os("FASTSOCKET_TEST_STRICT").is_none(), "redis is not installed");
            eprintln!("SKIPPED: redis is not installed (make deps)");
            return None;
        };
        let host = Host::new();
        let path = host.path().join("redis.sock").display().to_string();
        let redis = host.start(server, "redis", program, &["--port", "0", "--unixsocket", &path, "--save", ""]);
        net::wait_until(LIMIT, || net::unix_listens(Path::new(&path))).expect("it listens");
        let lasts = helper("unix/lasts.py").display().to_string();
        let mut client = host.start(Accel, "client", PYTHON, &[&lasts, &path]);
        client.wait_stdout("started", LIMIT);
        Some(Pair { redis, client, path, host })
    }

    fn cli(&self, args: &[&str]) -> Finished {
        let mut command = Command::new(artifacts::cli());
        command.env("FASTSOCKET_SOCKET", self.host.socket()).args(args);
        Proc::spawn(self.host.logs(), args[0], command).finish(LIMIT)
    }

    #[track_caller]
    fn json(&self, args: &[&str]) -> Value {
        let done = self.cli(&[args, &["--json"]].concat());
        serde_json::from_str(&done.stdout).unwrap_or_else(|e| panic!("{e}: {done:?}"))
    }

    /// Ends in shared memory that `ss` shows of a process.
    fn ends(&self, of: &Proc) -> Vec<Value> {
        let ss = self.json(&["ss", "--pid", &of.pid().to_string()]);
        ss["connections"].as_array().expect("connections").clone()
    }

    #[track_caller]
    fn wait_over(&self) {
        net::wait_until(LIMIT, || !self.ends(&self.redis).is_empty()).expect("it goes over");
    }

    /// Every answer was right.
    #[track_caller]
    fn end(self) {
        self.client.signal(libc::SIGTERM);
        self.client.finish(LIMIT).success().says("ok True");
        self.redis.signal(libc::SIGTERM);
        assert_eq!(self.host.snapshot().total("hostile_peer"), 0);
    }
}

#[test]
fn ss_stat_explain_top_and_metrics() {
    let Some(pair) = Pair::new(Accel) else { return };
    pair.wait_over();
    let (server, client) = (pair.redis.pid(), pair.client.pid());
    let names = |e: &Value, [local, peer]: [&str; 2]| e["local"] == local && e["peer"] == peer && e["path"] == "shm";
    let own = pair.ends(&pair.redis);
    assert!(own.iter().all(|e| names(e, [&pair.path, "*"]) && e["pids"][0] == server), "{own:#?}");
    assert!(pair.cli(&["ss"]).success().stdout.contains(&pair.path));

    let stat = pair.json(&["stat"]);
    let upgrades = |pid: u32| {
        let all = stat["processes"].as_array().expect("processes");
        all.iter().find(|p| p["pid"] == pid).map(|p| p["counters"]["path_upgrade"].as_u64())
    };
    assert!([server, client].map(upgrades).iter().all(|n| n.flatten() > Some(0)), "{stat:#}");

    for pid in [server, client] {
        let said = &pair.json(&["explain", &pid.to_string()])[0];
        assert_eq!((&said["state"], &said["accelerated"]), (&"accelerated".into(), &true.into()), "{said:#}");
    }
    // (Each look is at another moment: a connection ends after some requests, and the next one begins in the kernel.)
    let shown = || {
        let done = pair.cli(&["top", "--plain", "--count", "1", "--delay", "0.1", "--filter", &server.to_string()]);
        let row = |line: &str| line.contains("redis") && line.split_whitespace().any(|w| w == server.to_string());
        done.stdout.lines().any(row) && done.stdout.contains("shared memory")
    };
    net::wait_until(LIMIT, shown).expect("top shows the server");
    let metrics = pair.cli(&["metrics"]).success().stdout;
    let to_shm = |l: &&str| l.starts_with("fastsocket_path_switches_total{to=\"shm\"}");
    let line = metrics.lines().find(to_shm).unwrap_or_else(|| panic!("{metrics}"));
    assert!(line.rsplit(' ').next().and_then(|n| n.parse::<u64>().ok()) >= Some(2), "{line}");
    pair.end();
}

/// A connection stays in the kernel if the server has no library, and `explain` says so.
#[test]
fn explain_names_the_server_without_the_library() {
    let Some(pair) = Pair::new(Stock) else { return };
    let said = &pair.json(&["explain", &pair.client.pid().to_string()])[0];
    let all = said["kernel_connections"].as_array().expect("connections");
    let its = all.iter().find(|c| c["remote"] == pair.path.as_str()).unwrap_or_else(|| panic!("{said:#}"));
    assert_eq!((&its["peer"], &its["why"]["reason"]), (&pair.redis.pid().into(), &"peer".into()), "{said:#}");
    assert_eq!(said["state"], "kernel", "{said:#}");
    pair.end();
}

#[test]
fn off_and_on() {
    let Some(pair) = Pair::new(Accel) else { return };
    for end in [&pair.redis, &pair.client] {
        pair.wait_over();
        let pid = end.pid().to_string();
        let off = || pair.cli(&["off", &pid]).code == Some(0);
        net::wait_until(LIMIT, off).expect("all are the kernel's");
        let all = || pair.ends(&pair.redis).len() + pair.ends(&pair.client).len();
        net::wait_until(LIMIT, || all() == 0).expect("the other side follows");
        // New ones stay there.
        let before = pair.host.snapshot();
        let load = ["-s", &pair.path, "-n", "2000", "-c", "2", "-t", "get", "-q"];
        pair.host.run(Accel, "more", 60, need!("redis-benchmark"), &load).success();
        if std::ptr::eq(end, &pair.redis) {
            let delta = pair.host.snapshot().since(&before);
            assert_eq!(delta.get("path_upgrade"), 0, "{delta}");
        }
        let said = &pair.json(&["explain", &pid])[0];
        assert_eq!(said["reasons"][0]["reason"], "off", "{said:#}");
        assert_eq!(pair.cli(&["on", &pid]).code, Some(0));
    }
    pair.wait_over();
    pair.end();
}

/// There are no packets of a Unix connection, so the command says that they are missing.
#[test]
fn capture_says_what_is_missing() {
    let Some(pair) = Pair::new(Accel) else { return };
    // SAFETY: no argument.
    if unsafe { libc::geteuid() } != 0 {
        return eprintln!("SKIPPED: a packet socket needs root");
    }
    pair.wait_over();
    let file = pair.host.path().join("captured.pcapng").display().to_string();
    let done = pair.cli(&["capture", &pair.redis.pid().to_string(), "-w", &file, "--seconds", "1"]).success();
    assert!(done.stderr.contains("Unix connections are not in the file"), "{done:?}");
    pair.wait_over();
    pair.end();
}
