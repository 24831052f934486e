//! `fastsocket explain` and `fastsocket stat` must name the reason why a program is not
//! accelerated.

use fsocket_e2e::{self as e2e, native};
use fsocket_testkit::host::{Accel, Side, Stock};
use fsocket_testkit::netns::{Chain, Receive};
use fsocket_testkit::{artifacts, find_program, helper, need_hosts, net, stock_mode, Host, Proc, PYTHON};
use serde_json::Value;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;

/// A user that has no name on this machine.
const ALICE: u32 = 54321;

/// Runs `explain`. Returns its exit status, and its answer about the first process.
#[track_caller]
fn explain(host: &Host, target: impl ToString) -> (Option<i32>, Value) {
    let mut command = Command::new(artifacts::cli());
    // `explain` must find the monitor of the process, not the one of its own environment.
    command.env_remove("FASTSOCKET_SOCKET").args(["explain", "--json", &target.to_string()]);
    let done = Proc::spawn(host.logs(), "explain", command).finish(Duration::from_secs(60));
    let said: Value = serde_json::from_str(&done.stdout).unwrap_or_else(|e| panic!("{e}: {done:?}"));
    (done.code, said[0].clone())
}

/// The part of `stat` about processes that use the kernel. Asks the monitor that the process was
/// started to use.
#[track_caller]
fn stat(host: &Host, process: &Proc) -> Vec<Value> {
    let environ = std::fs::read(format!("/proc/{}/environ", process.pid())).unwrap_or_default();
    let named = environ.split(|b| *b == 0).find_map(|v| v.strip_prefix(b"FASTSOCKET_SOCKET="));
    let socket = named.map_or(host.socket(), |path| String::from_utf8_lossy(path).into_owned().into());
    let mut command = Command::new(artifacts::cli());
    command.env("FASTSOCKET_SOCKET", socket).args(["stat", "--json", "--kernel"]);
    let done = Proc::spawn(host.logs(), "stat", command).finish(Duration::from_secs(60));
    let said: Value = serde_json::from_str(&done.stdout).unwrap_or_else(|e| panic!("{e}: {done:?}"));
    said["kernel"].as_array().unwrap_or_else(|| panic!("{said:#}")).clone()
}

/// Asserts that the process is not accelerated, and that `reason` comes first.
#[track_caller]
fn because(host: &Host, process: &Proc, reason: &str, text: &str) {
    explained(host, process, reason, text);
    let rows = stat(host, process);
    let its = |row: &&Value| row["pid"] == process.pid();
    assert!(rows.iter().filter(its).any(|row| row["reason"] == reason), "{reason} of {}: {rows:#?}", process.pid());
}

/// The same for a process that was not started to be accelerated; `stat` must name it as the other
/// end of `other`.
#[track_caller]
fn because_peer(host: &Host, process: &Proc, other: &Proc, reason: &str, text: &str) {
    explained(host, process, reason, text);
    let rows = stat(host, other);
    let named = |row: &&Value| {
        let text = row["text"].as_str().unwrap_or_default();
        row["pid"] == other.pid() && row["reason"] == "peer" && text.contains(&format!("process {} ", process.pid()))
    };
    assert!(rows.iter().any(|row| named(&row)), "{rows:#?}");
}

#[track_caller]
fn explained(host: &Host, process: &Proc, reason: &str, text: &str) {
    let (code, said) = explain(host, process.pid());
    assert_eq!((code, &said["accelerated"]), (Some(1), &Value::Bool(false)), "{said:#}");
    assert_eq!(said["reasons"][0]["reason"], reason, "{said:#}");
    assert!(said["reasons"][0]["text"].as_str().is_some_and(|t| t.contains(text)), "{text}: {said:#}");
}

#[track_caller]
fn state(host: &Host, target: impl ToString, state: &str) -> Value {
    let (code, said) = explain(host, target);
    assert_eq!((code, said["state"].as_str()), (Some(i32::from(state == "kernel")), Some(state)), "{said:#}");
    said
}

/// A client whose connection stays open.
#[track_caller]
fn held(host: &Host, mut command: Command, address: &str, port: u16) -> Proc {
    let path = helper("held.py");
    command.arg(path).args([address, &port.to_string()]);
    let mut client = Proc::spawn(host.logs(), "held", command);
    client.wait_stdout("ok", Duration::from_secs(60));
    client
}

#[track_caller]
fn pair(host: &Host, server: Side, client: Side) -> (Proc, u16, Proc) {
    let (server, port) = e2e::echo_server(host, server, "threaded", "127.0.0.1");
    let client = held(host, host.command(client, PYTHON), "127.0.0.1", port);
    (server, port, client)
}

/// A program that sleeps, built in a special way.
#[track_caller]
fn sleeper(host: &Host, name: &str, flags: &[&str]) -> std::path::PathBuf {
    native::build(host, name, &["sleeper.c"], flags)
}

/// Waits until the process has executed its program.
#[track_caller]
fn started(host: &Host, name: &str, mut command: Command) -> Proc {
    command.env_remove("PYTHONUNBUFFERED");
    let mut process = Proc::spawn(host.logs(), name, command);
    process.wait_stdout("ok", Duration::from_secs(60));
    process
}

macro_rules! not_in_stock_mode {
    () => {
        if stock_mode() {
            return eprintln!("SKIPPED: stock mode has no command line");
        }
    };
}

#[test]
fn accelerated_and_ready() {
    not_in_stock_mode!();
    let host = Host::new();
    let (server, port) = e2e::echo_server(&host, Accel, "threaded", "127.0.0.1");
    state(&host, server.pid(), "ready");
    let said = state(&host, format!("127.0.0.1:{port}"), "ready");
    assert_eq!((&said["pid"], &said["registered"]), (&server.pid().into(), &true.into()), "{said:#}");
    assert_eq!(said["listeners"][0]["registered"], true, "{said:#}");
    let client = held(&host, host.command(Accel, PYTHON), "127.0.0.1", port);
    for target in [server.pid().to_string(), client.pid().to_string(), format!("localhost:{port}"), format!(":{port}")]
    {
        let said = state(&host, target, "accelerated");
        assert_eq!((&said["shm_connections"], &said["kernel_connections"]), (&1.into(), &Value::Array(vec![])));
    }
}

/// As nginx and redis do for their titles. `explain` must find the private monitor by its
/// knowledge of the process.
#[test]
fn a_program_that_has_written_over_its_environment() {
    not_in_stock_mode!();
    let host = Host::new();
    let (_server, port) = e2e::echo_server(&host, Accel, "threaded", "127.0.0.1");
    let path = helper("held.py").display().to_string();
    let mut client = host.start(Accel, "held", PYTHON, &[&path, "127.0.0.1", &port.to_string(), "titled"]);
    client.wait_stdout("ok", Duration::from_secs(60));
    let environ = std::fs::read(format!("/proc/{}/environ", client.pid())).expect("its environment");
    assert!(!environ.windows(9).any(|w| w == b"FASTSOCKE"), "it is there");
    let said = state(&host, client.pid(), "accelerated");
    assert_eq!((&said["registered"], &said["monitor"]["kind"]), (&true.into(), &"private".into()), "{said:#}");
}

/// The connections of this program began over shared memory, but all of them left it.
#[test]
fn what_leaves_at_once_is_not_accelerated() {
    not_in_stock_mode!();
    let host = Host::new();
    let (_server, port) = e2e::echo_server(&host, Accel, "threaded", "127.0.0.1");
    let path = helper("held.py").display().to_string();
    let mut client = host.start(Accel, "held", PYTHON, &[&path, "127.0.0.1", &port.to_string(), "save_syn"]);
    client.wait_stdout("ok", Duration::from_secs(60));
    let said = state(&host, client.pid(), "kernel");
    assert_eq!((&said["accelerated"], &said["reasons"][0]["reason"]), (&false.into(), &"left".into()), "{said:#}");
    assert_eq!(said["counters"]["connect_shm"], 1, "{said:#}");
}

/// Waiting connections must be counted in both queues of a listener: that of the library and that
/// of the kernel.
#[test]
fn what_waits_at_a_listener_is_said() {
    not_in_stock_mode!();
    let host = Host::new();
    let listens =
        "import socket, sys, time; l = socket.create_server(('127.0.0.1', int(sys.argv[1]))); time.sleep(600)";
    let port = net::free_port();
    let server = host.server(Accel, "listens", port, PYTHON, &["-c", listens, &port.to_string()]);
    let connects = "import socket, sys, time; s = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); print('ok', flush=True); time.sleep(600)";
    let mut client = host.start(Accel, "connects", PYTHON, &["-c", connects, &port.to_string()]);
    client.wait_stdout("ok", Duration::from_secs(60));
    // The connection waits first in the library's queue, and after a second in the kernel's.
    let before = host.snapshot();
    for moved in [false, true] {
        if moved {
            let untaken = || host.snapshot().since(&before).get("fallback.untaken") == 1;
            net::wait_until(Duration::from_secs(60), untaken).expect("moved");
        }
        let said = state(&host, server.pid(), "ready");
        assert_eq!(said["listeners"][0]["waiting"], 1, "{said:#}");
    }
}

#[test]
fn what_is_not_there_is_2() {
    not_in_stock_mode!();
    let host = Host::new();
    let pid_max = std::fs::read_to_string("/proc/sys/kernel/pid_max").expect("pid_max");
    for target in [pid_max.trim().to_owned(), format!("127.0.0.1:{}", net::free_port())] {
        let mut command = Command::new(artifacts::cli());
        command.args(["explain", &target]);
        let done = Proc::spawn(host.logs(), "explain", command).finish(Duration::from_secs(60));
        assert_eq!((done.code, done.stdout.as_str()), (Some(2), ""), "{done:?}");
        assert_eq!(done.stderr.lines().count(), 1, "{done:?}");
    }
}

#[test]
fn only_the_client_has_the_library() {
    not_in_stock_mode!();
    let host = Host::new();
    let (server, _, client) = pair(&host, Stock, Accel);
    because_peer(&host, &server, &client, "no_library", "without the library");
    because(&host, &client, "peer", "the server, process");
}

#[test]
fn only_the_server_has_the_library() {
    not_in_stock_mode!();
    let host = Host::new();
    let (server, port, client) = pair(&host, Accel, Stock);
    because_peer(&host, &client, &server, "no_library", "without the library");
    because(&host, &server, "peer", "the client, process");
    state(&host, format!("127.0.0.1:{port}"), "kernel");
}

#[test]
fn programs_that_load_no_library() {
    not_in_stock_mode!();
    let host = Host::new();
    let is_static = sleeper(&host, "static", &["-static"]);
    because(&host, &started(&host, "static", host.command(Accel, is_static)), "static", "statically linked");

    // A copy of this machine's loader, under a name that the command does not know.
    let loader = host.path().join("ld-other.so.1");
    std::fs::copy(native::loader(), &loader).expect("a loader");
    let other = sleeper(&host, "other", &[&format!("-Wl,--dynamic-linker={}", loader.display())]);
    let mut command = host.command(Stock, artifacts::cli());
    command.env("FASTSOCKET_SOCKET", host.socket()).args(["run", "--"]).arg(other);
    because(&host, &started(&host, "other", command), "other_loader", "another loader");

    let set_user_id = sleeper(&host, "suid", &[]);
    std::fs::set_permissions(&set_user_id, std::fs::Permissions::from_mode(0o4755)).expect("mode");
    let mut command = host.command(Accel, set_user_id);
    command.uid(ALICE).gid(ALICE);
    because(&host, &started(&host, "suid", command), "set_user_id", "ignores LD_PRELOAD");
}

/// The library that would be loaded needs a glibc that nobody has.
#[test]
fn an_older_glibc() {
    not_in_stock_mode!();
    let host = Host::new();
    let mut library = std::fs::read(artifacts::library()).expect("the library");
    let old = b"GLIBC_2.16\0";
    let at = library.windows(old.len()).position(|w| w == old).expect("getauxval has that version");
    library[at..at + old.len()].copy_from_slice(b"GLIBC_2.99\0");
    let library = host.file("newer/libfsocket.so", library);
    let mut command = host.command(Stock, sleeper(&host, "old", &[]));
    command.env("FASTSOCKET_SOCKET", host.socket());
    let process = started(&host, "old", command);
    let ask = |args: &[&str]| {
        let mut command = Command::new(artifacts::cli());
        command.env("FASTSOCKET_LIBRARY", &library).env("FASTSOCKET_SOCKET", host.socket()).args(args);
        let done = Proc::spawn(host.logs(), "ask", command).finish(Duration::from_secs(60));
        serde_json::from_str::<Value>(&done.stdout).unwrap_or_else(|e| panic!("{e}: {done:?}"))
    };
    let said = ask(&["explain", "--json", &process.pid().to_string()]);
    assert_eq!(said[0]["reasons"][0]["reason"], "old_glibc", "{said:#}");
    assert!(said[0]["reasons"][0]["text"].as_str().is_some_and(|t| t.ends_with("needs 2.99")), "{said:#}");
    let said = ask(&["stat", "--json", "--kernel"]);
    let rows = said["kernel"].as_array().expect("rows");
    assert!(rows.iter().any(|r| r["pid"] == process.pid() && r["reason"] == "old_glibc"), "{said:#}");
}

#[test]
fn go() {
    not_in_stock_mode!();
    let Some(gofmt) = find_program("gofmt") else {
        assert!(std::env::var_os("FASTSOCKET_TEST_STRICT").is_none(), "gofmt is not installed");
        return eprintln!("SKIPPED: gofmt is not installed (make programs)");
    };
    let host = Host::new();
    // The program waits for input, so it keeps running.
    let mut command = host.command(Accel, "/bin/sh");
    command.args(["-ec", "mkfifo wait; echo ok; exec \"$0\" 0<>wait"]).arg(gofmt);
    let process = started(&host, "gofmt", command);
    net::wait_until(Duration::from_secs(60), || {
        std::fs::read_to_string(format!("/proc/{}/comm", process.pid())).is_ok_and(|c| c == "gofmt\n")
    })
    .expect("it runs");
    because(&host, &process, "go", "Go program");
}

/// The filter was installed before the program started, so the library cannot know of it.
#[test]
fn a_filter_of_system_calls() {
    not_in_stock_mode!();
    let host = Host::new();
    let (_server, port) = e2e::echo_server(&host, Accel, "threaded", "127.0.0.1");
    let mut command = host.command(Stock, PYTHON);
    command.arg(helper("explain/no_unix.py")).arg("env");
    command.arg(format!("LD_PRELOAD={}", artifacts::library().display()));
    command.arg(format!("FASTSOCKET_SOCKET={}", host.socket().display())).arg(PYTHON);
    because(&host, &held(&host, command, "127.0.0.1", port), "seccomp", "filter of system calls");
}

#[test]
fn no_monitor_another_version_and_switched_off() {
    not_in_stock_mode!();
    let host = Host::new();
    let (_server, port) = e2e::echo_server(&host, Stock, "threaded", "127.0.0.1");
    let with = |key: &str, value: &str| {
        let mut command = host.command(Accel, PYTHON);
        command.env(key, value);
        held(&host, command, "127.0.0.1", port)
    };
    because(&host, &with("FASTSOCKET_SOCKET", "/nowhere/monitor.sock"), "no_monitor", "/nowhere/monitor.sock");
    because(&host, &with("FASTSOCKET_DISABLE", "shm"), "disabled", "switched off");

    let socket = host.path().join("other.sock").display().to_string();
    let other = helper("other_version.py").display().to_string();
    let mut other = host.start(Stock, "other", PYTHON, &[&other, &socket]);
    other.wait_stdout("ok", Duration::from_secs(60));
    because(&host, &with("FASTSOCKET_SOCKET", &socket), "mismatch", "another version");
}

#[test]
fn another_users_server() {
    not_in_stock_mode!();
    let host = Host::for_all_users("");
    let (server, port) = e2e::echo_server(&host, Accel, "threaded", "127.0.0.1");
    let mut command = host.command(Accel, PYTHON);
    command.uid(ALICE).gid(ALICE);
    let client = held(&host, command, "127.0.0.1", port);
    because(&host, &client, "other_user", "users 54321 and 0 must be named");
    because(&host, &server, "other_user", "users 0 and 54321 must be named");
}

#[test]
fn in_another_network_namespace() {
    need_hosts!();
    not_in_stock_mode!();
    let chain = Chain::new(1, &Receive::Inline).expect("hosts");
    let host = Host::on(&chain.middle);
    let (server, port) = e2e::echo_server(&host, Accel, "threaded", "0.0.0.0");
    let mut command = host.command(Accel, PYTHON);
    chain.client.place(&mut command);
    let client = held(&host, command, &chain.middle_front().to_string(), port);
    because(&host, &client, "other_netns", "the server, process");
    because(&host, &server, "other_netns", "the client, process");
}
