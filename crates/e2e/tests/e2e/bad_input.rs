//! Missing, broken, undersized or misspelt input: programs must go on with stock sockets, and the
//! command line must say what is wrong.

use fsocket_abi::channel::FIRST_SLOTS;
use fsocket_e2e::{self as e2e, native};
use fsocket_testkit::host::{Accel, Stock};
use fsocket_testkit::{artifacts, helper, net, stock_mode, Delta, Finished, Host, Proc, Snapshot, PYTHON};
use std::process::Command;
use std::time::Duration;

/// Runs the built command line with this host's monitor in the environment, so that no private
/// monitor keeps running for the user.
#[track_caller]
fn fastsocket(host: &Host, args: &[&str], environment: &[(&str, &str)]) -> Option<Finished> {
    if stock_mode() {
        eprintln!("SKIPPED: stock mode has no command line");
        return None;
    }
    let mut command = Command::new(artifacts::cli());
    command.env_remove("LD_PRELOAD").env("FASTSOCKET_SOCKET", host.socket()).args(args);
    for (key, value) in environment {
        command.env(key, value);
    }
    Some(Proc::spawn(host.logs(), "fastsocket", command).finish(Duration::from_secs(60)))
}

/// A program that talks to an echo server on `port`, as arguments.
fn client(port: u16) -> Vec<String> {
    let path = helper("echo_client.py").display().to_string();
    ["/usr/bin/python3", &path, "seq", &port.to_string(), "--connections", "5", "--bytes", "50000"]
        .map(str::to_owned)
        .to_vec()
}

#[test]
fn missing_program_is_127_with_its_name() {
    let host = Host::new();
    let Some(done) = fastsocket(&host, &["run", "--", "/nowhere/no-such-program", "x"], &[]) else { return };
    assert_eq!(done.code, Some(127), "{done:?}");
    assert!(done.stderr.contains("/nowhere/no-such-program"), "{done:?}");
    let Some(done) = fastsocket(&host, &["run", "no-such-program-in-path"], &[]) else { return };
    assert_eq!(done.code, Some(127), "{done:?}");
    assert!(done.stderr.contains("no-such-program-in-path"), "{done:?}");
}

#[test]
fn not_executable_is_126() {
    let host = Host::new();
    let file = host.file("plain.txt", "not a program").display().to_string();
    let Some(done) = fastsocket(&host, &["run", "--", &file], &[]) else { return };
    assert_eq!(done.code, Some(126), "{done:?}");
    assert!(done.stderr.contains(&file), "{done:?}");
}

#[test]
fn the_programs_own_status_comes_through() {
    let host = Host::new();
    for status in [0, 1, 7, 125, 255] {
        let Some(done) = fastsocket(&host, &["run", "--", "/bin/sh", "-c", &format!("exit {status}")], &[]) else {
            return;
        };
        assert_eq!(done.code, Some(status), "{done:?}");
    }
    let Some(done) = fastsocket(&host, &["run", "--", "/bin/sh", "-c", "kill -TERM $$"], &[]) else { return };
    assert_eq!(done.signal, Some(libc::SIGTERM), "{done:?}");
}

#[test]
fn options_of_the_program_are_left_alone() {
    let host = Host::new();
    let Some(done) = fastsocket(&host, &["run", "--", "/bin/echo", "--no-shm", "-v", "--", "-x"], &[]) else { return };
    assert_eq!(done.success().stdout, "--no-shm -v -- -x\n");
}

#[test]
fn unknown_option_is_125() {
    let host = Host::new();
    for args in [&["run", "--no-such-option", "--", "true"][..], &["no-such-command"], &["run"], &["stat", "--jsno"]] {
        let Some(done) = fastsocket(&host, args, &[]) else { return };
        assert_eq!(done.code, Some(125), "{args:?}: {done:?}");
        assert!(!done.stderr.is_empty() && done.stdout.is_empty(), "{args:?}: {done:?}");
    }
}

#[test]
fn malformed_environment_is_125() {
    let host = Host::new();
    let Some(done) = fastsocket(&host, &["run", "--", "true"], &[("FASTSOCKET_DISABLE", "shmm")]) else { return };
    assert_eq!(done.code, Some(125), "{done:?}");
    assert!(done.stderr.contains("shmm"), "{done:?}");
}

#[test]
fn run_uses_shared_memory_and_no_shm_does_not() {
    let host = Host::new();
    let (_server, port) = e2e::echo_server(&host, Accel, "epoll", "127.0.0.1");
    let client = client(port);
    let client: Vec<&str> = client.iter().map(String::as_str).collect();
    let before = host.snapshot();
    let Some(done) = fastsocket(&host, &[&["run", "--"], &client[..]].concat(), &[]) else { return };
    done.success().says("ok 5");
    host.snapshot().since(&before).assert_shm(5);
    let before = host.snapshot();
    fastsocket(&host, &[&["run", "--no-shm", "--"], &client[..]].concat(), &[])
        .expect("not stock")
        .success()
        .says("ok 5");
    host.snapshot().since(&before).assert_kernel_only();
}

/// The program must run on stock sockets, with exactly one line of warning.
#[track_caller]
fn runs_with_one_warning(options: &[&str], environment: &[(&str, &str)]) {
    let host = Host::new();
    let (_server, port) = e2e::echo_server(&host, Stock, "threaded", "127.0.0.1");
    let client = client(port);
    let client: Vec<&str> = client.iter().map(String::as_str).collect();
    let args = [&["run"], options, &["--"], &client[..]].concat();
    let Some(done) = fastsocket(&host, &args, environment) else { return };
    let done = done.success().says("ok 5");
    let warnings: Vec<&str> = done.stderr.lines().collect();
    assert!(warnings.len() == 1 && warnings[0].contains("fastsocket"), "{:?}", warnings);
}

#[test]
fn library_that_is_not_there() {
    runs_with_one_warning(&["--library", "/nowhere/libfsocket.so"], &[]);
}

#[test]
fn library_that_is_not_a_library() {
    runs_with_one_warning(&["--library", "/etc/passwd"], &[]);
    runs_with_one_warning(&["--library", "/proc/self"], &[]);
}

#[test]
fn monitor_socket_that_is_not_a_socket() {
    runs_with_one_warning(&[], &[("FASTSOCKET_SOCKET", "/etc/passwd")]);
    runs_with_one_warning(&[], &[("FASTSOCKET_SOCKET", "/nowhere/monitor.sock")]);
}

#[test]
fn library_with_a_monitor_socket_that_nobody_answers() {
    if stock_mode() {
        eprintln!("SKIPPED: stock mode has no library");
        return;
    }
    // A listener that neither accepts nor answers must not make the program hang.
    let host = Host::new();
    let (_server, port) = e2e::echo_server(&host, Stock, "threaded", "127.0.0.1");
    let silent = host.path().join("silent.sock").display().to_string();
    let program = format!(
        "import socket, time; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.bind({silent:?}); s.listen(8); \
         print('silent', flush=True); time.sleep(60)"
    );
    let mut listener = host.start(Stock, "silent", PYTHON, &["-c", &program]);
    listener.wait_stdout("silent", Duration::from_secs(60));
    let client = client(port);
    let mut command = host.command(Accel, PYTHON);
    command.env("FASTSOCKET_SOCKET", &silent).args(&client[1..]);
    Proc::spawn(host.logs(), "client", command).finish(Duration::from_secs(60)).success().says("ok 5");
}

#[track_caller]
/// The changes of the counters since `before`; `None` in stock mode.
fn shown(host: &Host, before: &Snapshot) -> Option<Delta> {
    if stock_mode() {
        eprintln!("PATH NOT ASSERTED: stock mode");
        return None;
    }
    Some(host.snapshot().since(before))
}

fn limited(what: &str, value: &str) {
    let host = Host::new();
    let (_server, port) = e2e::echo_server(&host, Accel, "threaded", "127.0.0.1");
    e2e::python(&host, Accel, 60, "bad_input/limited.py", &[&port.to_string(), what, value]);
}

#[test]
fn few_descriptors() {
    for value in ["12", "24", "64", "256"] {
        limited("nofile", value);
    }
}

#[test]
fn little_address_space() {
    // Channels may take a quarter of the address space: that is enough for the rings of some
    // connections, or of all.
    for (value, fewest, most) in [("240000000", FIRST_SLOTS, 19), ("600000000", 20, 20)] {
        let host = Host::new();
        let (_server, port) = e2e::echo_server(&host, Accel, "threaded", "127.0.0.1");
        let before = host.snapshot();
        e2e::python(&host, Accel, 60, "bad_input/limited.py", &[&port.to_string(), "as", value]);
        let Some(delta) = shown(&host, &before) else { return };
        let shm = delta.get("connect_shm");
        assert!((fewest as i128..=most).contains(&shm), "{value}\n{delta}");
        assert_eq!(shm + delta.get("fallback.resource"), 20, "{value}\n{delta}");
    }
}

/// The client has rings for more connections than the server. Connections for which the server has
/// none move to the kernel.
#[test]
fn a_server_with_little_address_space() {
    let host = Host::new();
    let port = net::free_port();
    let script = helper("echo_server.py");
    let line = format!("ulimit -v 200000; exec {PYTHON} {} epoll {port} 127.0.0.1", script.display());
    let _server = host.server(Accel, "echo-limited", port, "/bin/bash", &["-c", &line]);
    let before = host.snapshot();
    e2e::python(&host, Accel, 60, "bad_input/limited.py", &[&port.to_string(), "as", "1000000000000"]);
    let Some(delta) = shown(&host, &before) else { return };
    let (shm, queued) = (delta.get("accept_shm"), delta.get("connect_shm") - delta.get("accept_shm"));
    assert!((FIRST_SLOTS as i128..20).contains(&shm) && queued > 0, "{delta}");
    // When the server gave its listener up, some connections still waited there. The monitor has
    // moved the server's end of those.
    let moved = delta.get("path_switch") + delta.get("fallback.untaken");
    assert!(moved == 2 * queued, "both ends of each that waited\n{delta}");
    assert!(delta.get("fallback.resource") > 0 && delta.get("hostile_peer") == 0, "{delta}");
}

/// The limit is set while connections exist. They must move to the kernel with all bytes in
/// flight.
#[test]
fn address_space_is_limited_later() {
    let Some(delta) = e2e::same_transcripts(&Host::new(), 60, "bad_input/limited_later.py", &[]) else { return };
    assert_eq!((delta.get("connect_shm"), delta.get("accept_shm")), (20, 20), "{delta}");
    assert!(delta.get("path_switch") >= 40 && delta.get("fallback.switch") == 0, "both ends of each\n{delta}");
}

/// A process that connects to itself has room for the client's mapping of a channel, but not for
/// the listener's. From then on the kernel serves the listener, and the waiting connection moves
/// there.
#[test]
fn address_space_for_one_of_two_mappings() {
    let Some(delta) = e2e::same_transcripts(&Host::new(), 240, "bad_input/limited_self.py", &[]) else { return };
    assert!(delta.get("connect_shm") > 0 && delta.get("fallback.resource") > 0, "{delta}");
    assert_eq!(delta.get("hostile_peer"), 0, "{delta}");
}

#[test]
fn watched_in_little_address_space() {
    let host = Host::new();
    let (_server, port) = e2e::echo_server(&host, Accel, "threaded", "127.0.0.1");
    e2e::python(&host, Accel, 240, "bad_input/limited_epoll.py", &[&port.to_string()]);
}

#[test]
fn limits_from_the_start() {
    let host = Host::new();
    let (_server, port) = e2e::echo_server(&host, Accel, "epoll", "127.0.0.1");
    let client = client(port).join(" ");
    for limit in ["ulimit -n 16", "ulimit -n 64", "ulimit -v 400000", "ulimit -l 0", "ulimit -f 0"] {
        // The output goes through a pipe, because `ulimit -f 0` forbids to write to a file.
        let line = format!("{{ {limit}; exec {client}; }} | cat; exit ${{PIPESTATUS[0]}}");
        let mut command = host.command(Accel, "/bin/bash");
        command.args(["-c", &line]);
        let done = Proc::spawn(host.logs(), "limited", command).finish(Duration::from_secs(60));
        assert!(done.code == Some(0), "{limit}: {done:?}");
    }
}

#[test]
fn server_under_limits() {
    for limit in ["ulimit -n 64", "ulimit -v 500000"] {
        let host = Host::new();
        let port = fsocket_testkit::net::free_port();
        let path = helper("echo_server.py").display().to_string();
        let line = format!("{limit}; exec {PYTHON} {path} epoll {port}");
        let mut command = host.command(Accel, "/bin/bash");
        command.args(["-c", &line]);
        let _server = Proc::spawn(host.logs(), "server", command);
        fsocket_testkit::net::wait_for_port(port, Duration::from_secs(10)).expect("server");
        e2e::python(
            &host,
            Accel,
            60,
            "echo_client.py",
            &["asyncio", &port.to_string(), "--connections", "20", "--bytes", "20000"],
        );
    }
}

#[test]
fn program_that_closes_every_descriptor() {
    let host = Host::new();
    let (_server, port) = e2e::echo_server(&host, Accel, "epoll", "127.0.0.1");
    let before = host.snapshot();
    e2e::python(&host, Accel, 60, "bad_input/close_all.py", &[&port.to_string()]);
    // The library's own descriptors have high numbers, so shared memory must still work.
    host.snapshot().since(&before).assert_shm(5);
}

/// The program must run on stock sockets, with one line that says why. With `--require` it must
/// not run.
#[track_caller]
fn stock_because(host: &Host, program: &str, why: &str, preload: &str) {
    let ours = artifacts::library().display().to_string();
    // Try it also from a shell that runs under the library.
    for environment in [&[][..], &[("LD_PRELOAD", ours.as_str())]] {
        let Some(done) = fastsocket(host, &["run", "--", program, "x"], environment) else { return };
        let done = done.success();
        assert_eq!(done.stdout, format!("ok {preload}\n"), "{done:?}");
        let lines: Vec<&str> = done.stderr.lines().collect();
        assert!(lines.len() == 1 && lines[0].contains(why) && lines[0].contains(program), "{lines:?}");
    }
    let Some(done) = fastsocket(host, &["run", "--require", "--", program, "x"], &[]) else { return };
    assert_eq!((done.code, done.stdout.as_str()), (Some(125), ""), "{done:?}");
    assert!(done.stderr.lines().count() == 1 && done.stderr.contains(why), "{done:?}");
}

#[test]
fn programs_that_cannot_load_the_library_run_without_it() {
    if stock_mode() {
        return eprintln!("SKIPPED: stock mode has no command line");
    }
    let host = Host::new();
    let is_static = native::build(&host, "static", &["sleeper.c"], &["-static"]).display().to_string();
    // The static program may start others that load the library, so it is started all the same.
    stock_because(&host, &is_static, "statically linked", "preloaded");
    let done = fastsocket(&host, &["doctor", "--program", &is_static], &[]).expect("not stock");
    assert!(done.code == Some(1) && done.stdout.contains("FAIL  program"), "{done:?}");
    let done = fastsocket(&host, &["doctor", "--program", "cat"], &[]).expect("not stock");
    assert!(done.stdout.contains("/cat (dynamic)"), "{done:?}");
    // A copy of this machine's loader, under a name that the command does not know.
    let loader = host.path().join("ld-other.so.1");
    std::fs::copy(native::loader(), &loader).expect("a loader");
    let flag = format!("-Wl,--dynamic-linker={}", loader.display());
    let program = native::build(&host, "other", &["sleeper.c"], &[&flag]).display().to_string();
    stock_because(&host, &program, "another loader", "stock");
    let script = host.file("script", format!("#!{program}\n"));
    std::fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755)).expect("mode");
    stock_because(&host, &script.display().to_string(), "another loader", "stock");
}

#[test]
fn require_wants_library_and_monitor() {
    let host = Host::new();
    for options in [&["--library", "/nowhere/libfsocket.so"][..], &["--monitor", "/nowhere"]] {
        let args = [&["run", "--require"], options, &["--", "/bin/echo", "ran"]].concat();
        let socket: &[(&str, &str)] =
            if options[0] == "--monitor" { &[("FASTSOCKET_SOCKET", "/nowhere/x")] } else { &[] };
        let Some(done) = fastsocket(&host, &args, socket) else { return };
        assert_eq!((done.code, done.stdout.as_str()), (Some(125), ""), "{done:?}");
        assert!(done.stderr.contains("/nowhere"), "{done:?}");
    }
    let Some(done) = fastsocket(&host, &["run", "--require", "--", "/bin/echo", "ran"], &[]) else { return };
    assert_eq!(done.success().stdout, "ran\n");
}

/// Warnings about programs that lose the library, or that start other programs without it.
#[test]
fn what_drops_the_library_is_said() {
    if stock_mode() {
        return eprintln!("SKIPPED: stock mode has no command line");
    }
    let host = Host::new();
    for (program, says) in [(&["env", "-i", "/bin/true"][..], "env -i"), (&["env", "A=b", "/bin/true"], "")] {
        let mut command = Command::new(artifacts::cli());
        command.env("FASTSOCKET_SOCKET", host.socket()).args(["run", "--"]).args(program);
        let done = Proc::spawn(host.logs(), "run", command).finish(Duration::from_secs(60)).success();
        let warned = done.stderr.lines().count() == 1 && done.stderr.contains(says);
        assert!(if says.is_empty() { done.stderr.is_empty() } else { warned }, "{program:?}: {}", done.stderr);
    }
}
