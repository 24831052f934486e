//! `fastsocket off` and `on`: under load, with sleeping programs, with programs that make no
//! calls, and with bad arguments.

use fsocket_e2e::zones::Start;
use fsocket_e2e::{self as e2e, need_two_cpus};
use fsocket_testkit::host::Accel;
use fsocket_testkit::{artifacts, helper, need, net, stock_mode, Finished, Host, Proc, PYTHON};
use serde_json::Value;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);

fn cli(host: &Host, args: &[&str]) -> Finished {
    let mut command = Command::new(artifacts::cli());
    command.env("FASTSOCKET_SOCKET", host.socket()).args(args);
    Proc::spawn(host.logs(), args[0], command).finish(LIMIT)
}

#[track_caller]
fn json(host: &Host, args: &[&str]) -> (Option<i32>, Value) {
    let done = cli(host, &[args, &["--json"]].concat());
    (done.code, serde_json::from_str(&done.stdout).unwrap_or_else(|e| panic!("{e}: {done:?}")))
}

/// Number of connection ends over shared memory that this process has.
fn over_shm(host: &Host, pid: u32) -> usize {
    let report = host.snapshot().report.expect("a report");
    report.connections.iter().filter(|c| c.pids.contains(&pid)).count()
}

macro_rules! not_in_stock_mode {
    () => {
        if stock_mode() {
            return eprintln!("SKIPPED: stock mode has no command line");
        }
    };
}

/// Switches either end off and on again while the load compares every byte.
#[test]
fn redis_under_load_loses_nothing() {
    not_in_stock_mode!();
    need!("redis-server");
    const CONNECTIONS: usize = 6;
    let host = Host::new();
    let (redis, port) = e2e::redis(&host, Accel);
    let path = helper("off/off_load.py").display().to_string();
    let load = [path.as_str(), &port.to_string(), &CONNECTIONS.to_string()];
    let mut client = host.start(Accel, "load", PYTHON, &load);
    client.wait_stdout("started", LIMIT);
    net::wait_until(LIMIT, || over_shm(&host, redis.pid()) == CONNECTIONS).expect("they begin in shared memory");
    let before = host.snapshot();
    for (turn, end) in [&redis, &client].into_iter().enumerate() {
        let pid = end.pid().to_string();
        // On a busy machine six connections may need more than the second that `off` waits.
        let (mut code, said) = json(&host, &["off", &pid]);
        let known = said["moved"].as_u64().zip(said["left"].as_u64()).map(|(moved, left)| moved + left);
        assert_eq!(known, Some(CONNECTIONS as u64), "{said:#}");
        while code == Some(1) {
            code = json(&host, &["off", &pid]).0;
        }
        assert_eq!(code, Some(0));
        // The other end follows at its next call.
        let all = || over_shm(&host, redis.pid()) + over_shm(&host, client.pid());
        net::wait_until(LIMIT, || all() == 0).expect("all are the kernel's");
        // Make a new connection, once from each side.
        let ping = host.snapshot();
        e2e::python(&host, Accel, 60, "redis_mixed.py", &[&port.to_string()]);
        let ping = host.snapshot().since(&ping);
        if std::ptr::eq(end, &redis) {
            assert!(ping.get("connect_shm") == 0 && ping.get("fallback.policy") > 0, "{ping}");
        } else {
            assert!(ping.get("connect_shm") > 0, "{ping}");
        }
        let (code, said) = json(&host, &["explain", &pid]);
        assert_eq!((code, &said[0]["reasons"][0]["reason"]), (Some(1), &"off".into()), "{said:#}");
        assert_eq!(json(&host, &["ss"]).1["off"], serde_json::json!([end.pid()]));
        assert!(cli(&host, &["stat"]).success().stdout.contains("(off)"));
        let (code, said) = json(&host, &["on", &pid]);
        assert_eq!((code, &said["off"]), (Some(0), &false.into()), "{said:#}");
        // A connection returns only once, because its addresses are in use from then on.
        let expected = if turn == 0 { CONNECTIONS } else { 0 };
        let back = net::wait_until(LIMIT, || over_shm(&host, redis.pid()) == expected);
        assert!(back.is_ok(), "{}", host.snapshot().since(&before));
        let ping = host.snapshot();
        e2e::python(&host, Accel, 60, "redis_mixed.py", &[&port.to_string()]);
        host.snapshot().since(&ping).assert_shm(1);
        assert_eq!(json(&host, &["ss"]).1["off"], serde_json::json!([]));
    }
    client.signal(libc::SIGTERM);
    let done = client.finish(LIMIT).success();
    eprintln!("{}", done.stdout.trim());
    let delta = host.snapshot().since(&before);
    assert!(delta.get("path_switch") >= 4 * CONNECTIONS as i128, "{delta}");
    assert!(delta.get("path_upgrade") == 2 * CONNECTIONS as i128, "{delta}");
    assert!(delta.get("fallback.switch") == 0 && delta.get("hostile_peer") == 0, "{delta}");
}

/// Ends that sleep on a futex, in `epoll_wait` and in `accept` must be woken. A client that makes
/// no call must be counted as left.
#[test]
fn sleepers_are_woken_and_who_does_not_look_is_counted() {
    not_in_stock_mode!();
    let host = Host::new();
    for kind in ["threaded", "epoll"] {
        let (server, port) = e2e::echo_server(&host, Accel, kind, "127.0.0.1");
        // Before the first connection, the monitor reads the host's policy. On a busy machine that
        // connection uses the kernel, so make one here.
        let args = ["seq", &port.to_string(), "--connections", "1", "--bytes", "9"];
        e2e::python(&host, Accel, 60, "echo_client.py", &args);
        let path = helper("held.py").display().to_string();
        let mut client = host.start(Accel, "held", PYTHON, &[&path, "127.0.0.1", &port.to_string()]);
        client.wait_stdout("ok", LIMIT);
        let before = host.snapshot();
        assert_eq!(over_shm(&host, server.pid()), 1, "{:#?}", before.report);
        let (code, said) = json(&host, &["off", &server.pid().to_string()]);
        assert_eq!((code, &said["moved"]), (Some(0), &1.into()), "{kind}: {said:#}");
        let args = ["seq", &port.to_string(), "--connections", "3", "--bytes", "100"];
        e2e::python(&host, Accel, 60, "echo_client.py", &args);
        let delta = host.snapshot().since(&before);
        assert!(delta.get("connect_shm") == 0 && delta.get("fallback.policy") == 3, "{kind}: {delta}");
        assert_eq!(json(&host, &["on", &server.pid().to_string()]).0, Some(0));
        // The client sleeps in the kernel, outside of all calls of the library.
        let mut client = host.start(Accel, "held", PYTHON, &[&path, "127.0.0.1", &port.to_string()]);
        client.wait_stdout("ok", LIMIT);
        let done = cli(&host, &["off", &client.pid().to_string()]);
        assert_eq!(done.code, Some(1), "{done:?}");
        assert!(done.stdout.contains("0 of 1 connections moved to the kernel, 1 will"), "{done:?}");
        assert_eq!(json(&host, &["on", &client.pid().to_string()]).0, Some(0));
    }
}

/// The command must print a clear message and end with status 2, and nothing may change.
#[test]
fn bad_targets() {
    not_in_stock_mode!();
    let host = Host::new();
    let (_server, port) = e2e::echo_server(&host, Accel, "threaded", "127.0.0.1");
    for (target, why) in [("1", "process 1: no such process runs with the library"), ("nowhere", "nowhere.service: no")]
    {
        for command in ["off", "on"] {
            let done = cli(&host, &[command, target]);
            assert!(done.code == Some(2) && done.stderr.contains(why), "{done:?}");
        }
    }
    assert_eq!(cli(&host, &["off", "0"]).code, Some(125));
    let before = host.snapshot();
    e2e::python(&host, Accel, 60, "echo_client.py", &["seq", &port.to_string(), "--connections", "3", "--bytes", "9"]);
    host.snapshot().since(&before).assert_shm(3);
}

/// The configuration switches off one program; others must not change.
#[test]
fn programs_are_configured() {
    not_in_stock_mode!();
    need_two_cpus!();
    let redis = need!("redis-server");
    let real = |path: &std::path::Path| path.canonicalize().expect("a program").display().to_string();
    let settings = format!(
        "[[program]]\nexe = \"{}\"\noff = true\n\n[[program]]\nexe = \"{}\"\nzones = false\nspin = false\n",
        real(&redis),
        real(PYTHON.as_ref())
    );
    let host = Host::configured(None, &settings);
    let place = |line: u32| Value::from(format!("{}:{line}", host.path().join("fastsocketd.toml").display()));
    let rule = |pid: u32| json(&host, &["explain", &pid.to_string()]).1[0].clone();

    let (redis, port) = e2e::redis(&host, Accel);
    let ask = || e2e::python(&host, Accel, 60, "redis_mixed.py", &[&port.to_string()]);
    let before = host.snapshot();
    ask();
    let delta = host.snapshot().since(&before);
    assert!(delta.get("connect_shm") == 0 && delta.get("fallback.policy") > 0, "{delta}");
    let said = rule(redis.pid());
    assert_eq!((&said["rule"], &said["reasons"][0]["reason"]), (&place(1), &"off".into()), "{said:#}");
    // A command of the operator has precedence over the configuration.
    assert_eq!(json(&host, &["on", &redis.pid().to_string()]).0, Some(0));
    let before = host.snapshot();
    ask();
    host.snapshot().since(&before).assert_shm(1);

    let start = Start::default();
    let usual = Host::new();
    start.run(&usual).wait_for_sockets(1 + start.workers);
    let zoned = start.run(&host);
    zoned.ask("127.0.0.1", 0, 5);
    assert_eq!(net::kernel_sockets(zoned.port, "0A"), 1, "it has zones");
    assert_eq!(rule(zoned.process.pid())["rule"], place(5));

    let (_server, port) = e2e::echo_server(&host, Accel, "epoll", "127.0.0.1");
    let before = host.snapshot();
    e2e::python(&host, Accel, 60, "echo_client.py", &["seq", &port.to_string(), "--connections", "3", "--bytes", "99"]);
    let delta = host.snapshot().since(&before);
    delta.assert_shm(3);
    assert!(delta.get("spin_hits") == 0 && delta.get("spin_misses") == 0, "{delta}");
}

/// The payloads of the packets in a file of `fastsocket capture`, concatenated.
#[track_caller]
fn captured(file: &std::path::Path) -> Vec<u8> {
    let bytes = std::fs::read(file).expect("the file");
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes")) as usize;
    let (mut at, mut all) = (0, Vec::new());
    while at < bytes.len() {
        if word(at) == 6 {
            all.extend_from_slice(&bytes[at + 28..at + 28 + word(at + 20)]);
        }
        at += word(at + 4);
    }
    assert_eq!(at, bytes.len(), "half a block");
    all
}

/// The file must have the program's bytes, and its connections must return to shared memory.
#[test]
fn a_program_is_captured() {
    not_in_stock_mode!();
    // SAFETY: `geteuid` takes no arguments.
    if unsafe { libc::geteuid() } != 0 {
        return eprintln!("SKIPPED: a packet socket needs root");
    }
    need!("redis-server");
    let host = Host::new();
    let (redis, port) = e2e::redis(&host, Accel);
    let path = helper("off/off_load.py").display().to_string();
    let mut client = host.start(Accel, "load", PYTHON, &[&path, &port.to_string(), "2"]);
    client.wait_stdout("started", LIMIT);
    net::wait_until(LIMIT, || over_shm(&host, redis.pid()) == 2).expect("they begin in shared memory");
    let before = host.snapshot();
    let (pid, file) = (redis.pid().to_string(), host.path().join("captured.pcapng"));
    let name = file.display().to_string();
    let done = cli(&host, &["capture", &pid, "-w", &name, "--port", &port.to_string(), "--seconds", "1"]).success();
    assert!(done.stderr.contains(" packets in "), "{done:?}");
    let bytes = captured(&file);
    for word in [&b"$3\r\nSET\r\n$4\r\nkey0"[..], b"key1", b"+OK\r\n$"] {
        assert!(bytes.windows(word.len()).any(|w| w == word), "{}", String::from_utf8_lossy(word));
    }
    net::wait_until(LIMIT, || over_shm(&host, redis.pid()) == 2).expect("they are back");
    client.signal(libc::SIGTERM);
    client.finish(LIMIT).success();
    let delta = host.snapshot().since(&before);
    assert!(delta.get("path_switch") >= 4 && delta.get("path_upgrade") == 4, "{delta}");
    // If the capture is impossible, nothing may be written or changed.
    for (args, code, why) in [
        (["capture", "1", "-w", name.as_str()], 2, "process 1: no such process"),
        (["capture", &pid, "-w", "/nowhere/x"], 1, "/nowhere/x"),
    ] {
        let done = cli(&host, &args);
        assert!(done.code == Some(code) && done.stderr.contains(why), "{done:?}");
    }
    assert_eq!(captured(&file).len(), bytes.len());
    assert_eq!(json(&host, &["ss"]).1["off"], serde_json::json!([]));
}

/// A control group of version 2, as a service manager makes one for a unit.
struct Unit {
    root: std::path::PathBuf,
    name: &'static str,
}

impl Unit {
    /// `None`: the file system of control groups cannot be mounted here.
    fn make(host: &Host, name: &'static str) -> Option<Unit> {
        let unit = Unit { root: host.path().join("cgroup"), name };
        std::fs::create_dir(&unit.root).expect("a directory");
        let mounted = Command::new("mount").args(["-t", "cgroup2", "none"]).arg(&unit.root).status();
        let made = mounted.is_ok_and(|s| s.success()) && std::fs::create_dir_all(unit.path()).is_ok();
        made.then_some(unit)
    }

    fn path(&self) -> std::path::PathBuf {
        self.root.join("fastsocket_off.slice").join(self.name)
    }

    #[track_caller]
    fn add(&self, pid: u32) {
        std::fs::write(self.path().join("cgroup.procs"), pid.to_string()).expect("it is moved");
    }
}

impl Drop for Unit {
    fn drop(&mut self) {
        // The last process may need a moment to leave the group.
        let _ = net::wait_until(LIMIT, || std::fs::remove_dir(self.path()).is_ok());
        let _ = std::fs::remove_dir(self.root.join("fastsocket_off.slice"));
        let _ = Command::new("umount").arg("-l").arg(&self.root).status();
    }
}

/// `off` for a unit must cover its running processes, and those that start there later.
#[test]
fn a_unit_is_switched_off() {
    not_in_stock_mode!();
    let host = Host::new();
    let Some(unit) = Unit::make(&host, "fastsocket_off.service") else {
        return eprintln!("SKIPPED: no control groups of the second version here");
    };
    let (server, port) = e2e::echo_server(&host, Accel, "threaded", "127.0.0.1");
    unit.add(server.pid());
    let shm = || {
        let before = host.snapshot();
        let args = ["seq", &port.to_string(), "--connections", "2", "--bytes", "9"];
        e2e::python(&host, Accel, 60, "echo_client.py", &args);
        let delta = host.snapshot().since(&before);
        delta.get("connect_shm")
    };
    // Before the first connection, the monitor reads the host's policy. On a busy machine that
    // connection uses the kernel, so make one here.
    shm();
    assert_eq!(shm(), 2);
    let (code, said) = json(&host, &["off", "fastsocket_off"]);
    assert_eq!((code, said["processes"].as_object().map(|p| p.len())), (Some(0), Some(1)), "{said:#}");
    assert_eq!(shm(), 0);
    // The shell joins the group before it executes the program.
    let script = format!(
        "echo $$ >{}/cgroup.procs; exec env LD_PRELOAD=\"$L\" {PYTHON} {} \"$@\"",
        unit.path().display(),
        helper("held.py").display()
    );
    let mut command = Command::new("/bin/sh");
    command.env("L", artifacts::library()).env("FASTSOCKET_SOCKET", host.socket());
    command.args(["-c", &script, "sh", "127.0.0.1", &port.to_string()]);
    let mut late = Proc::spawn(host.logs(), "late", command);
    late.wait_stdout("ok", LIMIT);
    let mut off: Vec<u32> = serde_json::from_value(json(&host, &["ss"]).1["off"].clone()).expect("numbers");
    off.sort_unstable();
    let mut both = [server.pid(), late.pid()];
    both.sort_unstable();
    assert_eq!(off, both);
    assert_eq!(json(&host, &["on", "fastsocket_off.service"]).0, Some(0));
    assert_eq!(shm(), 2);
}

/// Users may switch only their own programs, and only root may switch units.
#[test]
fn another_users_program_is_not_switched() {
    not_in_stock_mode!();
    // SAFETY: `geteuid` takes no arguments.
    if unsafe { libc::geteuid() } != 0 {
        return eprintln!("SKIPPED: needs root for a monitor of all users");
    }
    const ALICE: u32 = 54321;
    let host = Host::for_all_users("");
    let (server, port) = e2e::echo_server(&host, Accel, "threaded", "127.0.0.1");
    for target in [server.pid().to_string(), "echo".into()] {
        let mut command = Command::new(artifacts::cli());
        command.env("FASTSOCKET_SOCKET", host.socket()).args(["off", &target]).uid(ALICE).gid(ALICE);
        let done = Proc::spawn(host.logs(), "off", command).finish(LIMIT);
        assert!(done.code == Some(2) && done.stderr.contains("belongs to another user"), "{done:?}");
    }
    assert_eq!(json(&host, &["ss"]).1["off"], serde_json::json!([]));
    let args = ["seq", &port.to_string(), "--connections", "3", "--bytes", "9"];
    e2e::python(&host, Accel, 60, "echo_client.py", &args);
    let before = host.snapshot();
    e2e::python(&host, Accel, 60, "echo_client.py", &args);
    host.snapshot().since(&before).assert_shm(3);
}
