//! Processes that use only the kernel must be counted and named. Counters must outlive their
//! process and their monitor.

use fsocket_e2e as e2e;
use fsocket_proto::report::Report;
use fsocket_testkit::host::{Accel, Stock};
use fsocket_testkit::{artifacts, helper, net, stock_mode, Host, Proc, PYTHON};
use serde_json::Value;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::time::Duration;

macro_rules! not_in_stock_mode {
    () => {
        if stock_mode() {
            return eprintln!("SKIPPED: stock mode has no command line");
        }
    };
}

fn report(host: &Host) -> Report {
    host.snapshot().report.expect("a monitor")
}

/// A process that makes connections to a port, one after the other.
const CONNECT: &str = "import socket, sys\n\
    for _ in range(int(sys.argv[2])):\n    \
        with socket.create_connection(('127.0.0.1', int(sys.argv[1])), timeout=30) as s:\n        \
            s.sendall(b'x'); assert s.recv(1) == b'x'\n";

#[test]
fn a_process_that_only_uses_the_kernel() {
    not_in_stock_mode!();
    let host = Host::new();
    let (_server, port) = e2e::echo_server(&host, Stock, "threaded", "127.0.0.1");
    let mut command = host.command(Accel, PYTHON);
    command.arg(helper("held.py")).args(["127.0.0.1", &port.to_string()]);
    let mut client = Proc::spawn(host.logs(), "held", command);
    client.wait_stdout("ok", Duration::from_secs(60));
    let now = report(&host);
    let process = now.processes.iter().find(|p| i64::from(p.pid) == i64::from(client.pid())).expect("it is named");
    assert!(process.comm.starts_with("python3"), "{process:?}");
    assert_eq!((process.counters["connect_kernel"], process.counters["fallback.no_listener"]), (1, 1), "{process:?}");
    assert_eq!((now.totals["connect_kernel"], now.totals["connect_shm"]), (1, 0));
    drop(client);
    // The process must report its last connections when it ends.
    let mut command = host.command(Accel, PYTHON);
    command.args(["-c", CONNECT, &port.to_string(), "7"]);
    Proc::spawn(host.logs(), "connect", command).finish(Duration::from_secs(60)).success();
    net::wait_until(Duration::from_secs(60), || report(&host).processes.is_empty()).expect("they have ended");
    let ended = report(&host).totals;
    assert_eq!((ended["connect_kernel"], ended["fallback.no_listener"], ended["connect_shm"]), (8, 8, 0));
}

/// A client whose connections stay open. It opens more whenever a file appears.
const MORE: &str = "import os, socket, sys, time\n\
    kept = []\n\
    for turn, n in enumerate(map(int, sys.argv[3].split(','))):\n    \
        while not os.path.exists(f'{sys.argv[2]}/{turn}'): time.sleep(0.002)\n    \
        kept += [socket.create_connection(('127.0.0.1', int(sys.argv[1])), timeout=60) for _ in range(n)]\n    \
        open(f'{sys.argv[2]}/done{turn}', 'w')\n\
    time.sleep(600)";

/// At any moment, all connections of a live process must be counted, whether the process reports
/// them or the monitor sees them.
#[test]
fn all_connections_of_a_live_process_are_counted() {
    not_in_stock_mode!();
    let host = Host::new();
    let turns = [1, 1, 1, 2, 1, 4, 1, 9, 30];
    let (_server, port) = e2e::echo_server(&host, Stock, "threaded", "127.0.0.1");
    let flags = host.path().join("flags");
    std::fs::create_dir(&flags).expect("directory");
    let list = turns.map(|n| n.to_string()).join(",");
    let args = [port.to_string(), flags.display().to_string(), list];
    let client = host.start(Accel, "more", PYTHON, &["-c", MORE, &args[0], &args[1], &args[2]]);
    let mut so_far = 0;
    for (turn, n) in turns.into_iter().enumerate() {
        std::fs::write(flags.join(turn.to_string()), "").expect("file");
        let done = flags.join(format!("done{turn}"));
        net::wait_until(Duration::from_secs(60), || done.exists()).expect("connected");
        so_far += n;
        // `top` and the metrics read the same totals.
        let now = report(&host);
        let process = now.processes.iter().find(|p| i64::from(p.pid) == i64::from(client.pid())).expect("it is named");
        assert_eq!((process.counters["connect_kernel"], now.totals["connect_kernel"]), (so_far, so_far), "turn {turn}");
        assert_eq!(process.counters["fallback.no_listener"], so_far, "turn {turn}");
    }
}

/// Opens ten connections to each server, and keeps all of them open.
const HELD: &str = "import socket, sys, time\n\
    kept = []\n\
    for port in sys.argv[1:]:\n    \
        for _ in range(10):\n        \
            s = socket.create_connection(('127.0.0.1', int(port)), timeout=60)\n        \
            s.sendall(b'x'); assert s.recv(1) == b'x'\n        \
            kept.append(s)\n\
    print('ok', flush=True)\n\
    time.sleep(600)";

/// The commands must show at once which connections are open, and on which path.
#[test]
fn open_connections_by_path() {
    not_in_stock_mode!();
    let host = Host::new();
    let (_stock, kernel) = e2e::echo_server(&host, Stock, "threaded", "127.0.0.1");
    let (server, shm) = e2e::echo_server(&host, Accel, "threaded", "127.0.0.1");
    let mut client = host.start(Accel, "held", PYTHON, &["-c", HELD, &kernel.to_string(), &shm.to_string()]);
    client.wait_stdout("ok", Duration::from_secs(60));
    let cli = |args: &[&str]| {
        let mut command = host.command(Stock, artifacts::cli());
        command.env("FASTSOCKET_SOCKET", host.socket()).args(args);
        Proc::spawn(host.logs(), "cli", command).finish(Duration::from_secs(60)).success().stdout
    };
    let stat: Value = serde_json::from_str(&cli(&["stat", "--json", "--kernel"])).expect("JSON");
    let top = cli(&["top", "--plain", "--count", "1", "--delay", "0.1"]);
    let metrics = cli(&["metrics"]);

    let counted = |of: &Value| ["connect_kernel", "connect_shm"].map(|name| of[name].as_u64());
    let process = stat["processes"].as_array().and_then(|all| all.iter().find(|p| p["pid"] == client.pid()));
    let process = process.unwrap_or_else(|| panic!("{stat:#}"));
    assert_eq!(counted(&stat["totals"]), [Some(10); 2], "{stat:#}");
    assert_eq!((counted(&process["counters"]), process["open"]["shm"].as_u64()), ([Some(10); 2], Some(10)), "{stat:#}");
    assert_eq!(stat["totals"]["accept_shm"], 10, "{stat:#}");
    let rows = stat["kernel"].as_array().into_iter().flatten().filter(|row| row["pid"] == client.pid());
    assert_eq!(rows.filter_map(|row| row["connections"].as_u64()).sum::<u64>(), 10, "{stat:#}");

    assert!(top.contains("open: 10 shared memory (50.0%), 10 kernel TCP (50.0%);"), "{top}");
    for (pid, open) in [(client.pid(), ["10", "10", "50.0%"]), (server.pid(), ["10", "0", "100.0%"])] {
        let pid = pid.to_string();
        let rows = top.lines().map(|l| l.split_whitespace().collect::<Vec<_>>());
        let row = rows.into_iter().find(|words| words.first().is_some_and(|word| *word == pid));
        assert_eq!(row.as_deref().and_then(|words| words.get(2..5)), Some(&open[..]), "{top}");
    }
    for line in [
        "fastsocket_connections_total{path=\"kernel\",role=\"client\"} 10",
        "fastsocket_connections_total{path=\"shm\",role=\"client\"} 10",
        "fastsocket_open_connections 10",
    ] {
        assert!(metrics.lines().any(|l| l == line), "{line}: {metrics}");
    }
}

/// Counters that were reported before the process had an arena must count only once.
#[test]
fn first_the_kernel_and_then_shared_memory() {
    not_in_stock_mode!();
    let host = Host::new();
    let (_stock, kernel) = e2e::echo_server(&host, Stock, "threaded", "127.0.0.1");
    let (_ours, shm) = e2e::echo_server(&host, Accel, "threaded", "127.0.0.1");
    let both = format!("{CONNECT}sys.argv[1] = sys.argv[3]\n{CONNECT}");
    let mut command = host.command(Accel, PYTHON);
    command.args(["-c", &both, &kernel.to_string(), "3", &shm.to_string()]);
    let before = report(&host).totals;
    Proc::spawn(host.logs(), "both", command).finish(Duration::from_secs(60)).success();
    net::wait_until(Duration::from_secs(60), || report(&host).processes.len() == 1).expect("it has ended");
    let after = report(&host).totals;
    let counted = |name: &str| after[name] - before[name];
    assert_eq!((counted("connect_kernel"), counted("connect_shm"), counted("accept_shm")), (3, 3, 3));
}

#[test]
fn one_line_at_the_end() {
    not_in_stock_mode!();
    let host = Host::new();
    let (_stock, port) = e2e::echo_server(&host, Stock, "threaded", "127.0.0.1");
    let run = |program: &[&str]| {
        let mut command = host.command(Stock, artifacts::cli());
        command.env("FASTSOCKET_SOCKET", host.socket()).args(["run", "--summary", "--"]).args(program);
        let process = Proc::spawn(host.logs(), "summary", command);
        let pid = process.pid();
        (pid, process.finish(Duration::from_secs(60)).success().stderr)
    };
    let (pid, said) = run(&[PYTHON, "-c", CONNECT, &port.to_string(), "2"]);
    let line = format!("({pid}): 0 connections over shared memory, 2 over kernel TCP; no_listener 2\n");
    assert!(said.starts_with("fastsocket: python3") && said.ends_with(&line), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    let (pid, said) = run(&["/bin/true"]);
    assert_eq!(said, format!("fastsocket: true ({pid}): 0 connections over shared memory, 0 over kernel TCP\n"));
    // The process ends by `_exit`, and so does its child. Each has had one connection.
    let ends = format!(
        "import os, socket\npid = os.fork()\ns = socket.create_connection(('127.0.0.1', {port}))\n\
         pid and os.waitpid(pid, 0)\nos._exit(0)\n"
    );
    let (pid, said) = run(&[PYTHON, "-c", &ends]);
    assert_eq!(
        said.matches("0 connections over shared memory, 1 over kernel TCP; no_listener 1\n").count(),
        2,
        "{said}"
    );
    assert!(said.lines().count() == 2 && said.contains(&format!("({pid})")), "{said}");
    // Standard error is another file when the process ends.
    let taken = format!(
        "import os, socket\ns = socket.create_connection(('127.0.0.1', {port}))\nos.dup2(s.fileno(), 2)\n\
         f = open(os.devnull)\n"
    );
    assert_eq!(run(&[PYTHON, "-c", &taken]).1, "");
}

/// If library and monitor have different versions, the kernel must serve, and the reason must be
/// counted.
#[test]
fn a_monitor_of_another_version() {
    not_in_stock_mode!();
    let host = Host::new();
    let (_ours, port) = e2e::echo_server(&host, Accel, "threaded", "127.0.0.1");
    let socket = host.path().join("other.sock").display().to_string();
    let other = fsocket_testkit::helper("other_version.py").display().to_string();
    let mut other = host.start(Stock, "other", PYTHON, &[&other, &socket]);
    other.wait_stdout("ok", Duration::from_secs(60));
    let mut command = host.command(Stock, artifacts::cli());
    command.env("FASTSOCKET_SOCKET", &socket).args(["run", "--summary", "--", PYTHON, "-c", CONNECT]);
    command.args([port.to_string().as_str(), "1"]);
    let said = Proc::spawn(host.logs(), "version", command).finish(Duration::from_secs(60)).success().stderr;
    assert!(said.ends_with("0 connections over shared memory, 1 over kernel TCP; version 1\n"), "{said}");
}

#[test]
fn what_a_private_monitor_said_last() {
    not_in_stock_mode!();
    let host = Host::new();
    let (_stock, port) = e2e::echo_server(&host, Stock, "threaded", "127.0.0.1");
    let runtime = host.path().join("runtime");
    std::fs::create_dir(&runtime).expect("directory");
    std::fs::set_permissions(&runtime, std::fs::Permissions::from_mode(0o700)).expect("mode");
    let cli = |args: &[&str]| {
        let mut command = Command::new(artifacts::cli());
        command.env("XDG_RUNTIME_DIR", &runtime).env_remove("FASTSOCKET_SOCKET").env_remove("LD_PRELOAD");
        command.env("FASTSOCKET_LIBRARY", artifacts::library()).env("FASTSOCKET_MONITOR", artifacts::monitor());
        command.args(args);
        Proc::spawn(host.logs(), "cli", command).finish(Duration::from_secs(60))
    };
    cli(&["run", "--", PYTHON, "-c", CONNECT, &port.to_string(), "5"]).success();
    let last = runtime.join("fastsocket/monitor.sock.last");
    net::wait_until(Duration::from_secs(60), || last.exists()).expect("the monitor ends");
    assert_eq!(last.metadata().expect("file").permissions().mode() & 0o777, 0o600);
    let said = cli(&["stat", "--json"]).success().stdout;
    let said: Value = serde_json::from_str(&said).expect("JSON");
    assert_eq!(said["totals"]["connect_kernel"], 5, "{said:#}");
    assert!(said["ended_seconds_ago"].as_u64().is_some_and(|s| s < 60), "{said:#}");
    assert!(cli(&["stat"]).success().stdout.contains("No monitor runs now"));
}
