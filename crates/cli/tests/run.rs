//! Tests of `fastsocket run` as a wrapper: what it hands over to the program, and how it fails.

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output};

/// Runs `fastsocket ARGS` in a place where it finds no other part of Fastsocket.
fn bare(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fastsocket"));
    command.args(args).env("FASTSOCKET_LIBRARY", "/nonexistent/libfsocket.so");
    command.env_remove("FASTSOCKET_SOCKET").env_remove("FASTSOCKET_DISABLE").env_remove("LD_PRELOAD");
    command
}

fn output(args: &[&str]) -> Output {
    bare(args).output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn status_is_the_programs() {
    assert_eq!(output(&["run", "sh", "-c", "exit 3"]).status.code(), Some(3));
    assert_eq!(output(&["run", "--", "sh", "-c", "kill -9 $$"]).status.signal(), Some(9));
}

#[test]
fn own_failures_are_125() {
    for args in [&["run", "--bogus", "true"][..], &["run"], &["bogus"], &["bench", "--bogus"], &["stat", "--bogus"]] {
        let result = output(args);
        assert_eq!(result.status.code(), Some(125), "{args:?}");
        assert!(!result.stderr.is_empty());
    }
    let malformed = bare(&["run", "true"]).env("FASTSOCKET_DISABLE", "everything").output().unwrap();
    assert_eq!(malformed.status.code(), Some(125));
    assert!(stderr(&malformed).contains("everything"));
    assert_eq!(output(&["--help"]).status.code(), Some(0));
    assert_eq!(output(&["--version"]).status.code(), Some(0));
}

/// `fastsocket bench` executes `fastsocket-bench`: the one beside it, else where the library is
/// installed, else in PATH.
#[test]
fn the_benchmark_is_a_program_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let place = |name: &str, what: &str| {
        let path = dir.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, format!("#!/bin/sh\necho {what} \"$@\"; exit 7\n")).unwrap();
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    };
    let own = dir.path().join("bin/fastsocket");
    std::fs::create_dir(own.parent().unwrap()).unwrap();
    std::fs::copy(env!("CARGO_BIN_EXE_fastsocket"), &own).unwrap();
    let ask = |args: &[&str]| {
        let asked = Command::new(&own).arg("bench").args(args).env("PATH", dir.path().join("path")).output().unwrap();
        (asked.status.code(), String::from_utf8_lossy(&asked.stdout).into_owned(), stderr(&asked))
    };
    let (status, _, said) = ask(&["--list"]);
    assert!(status == Some(125) && said.contains("fastsocket-bench not found"), "{said}");
    for (path, what) in [
        ("path/fastsocket-bench", "path"),
        ("lib/fastsocket/fastsocket-bench", "library"),
        ("bin/fastsocket-bench", "own"),
    ] {
        place(path, what);
        let (status, said, _) = ask(&["shapes", "--only", "a b"]);
        assert_eq!((status, said), (Some(7), format!("{what} shapes --only a b\n")));
    }
    // `--help` is answered by the command line itself, so it does not need the program.
    let (status, said, _) = ask(&["shapes", "--help"]);
    assert!(status == Some(0) && said.contains("--before"), "{said}");
}

#[test]
fn not_executable_is_126_and_not_found_127() {
    assert_eq!(output(&["run", "/etc/passwd"]).status.code(), Some(126));
    let missing = output(&["run", "no-such-program"]);
    assert_eq!(missing.status.code(), Some(127));
    assert!(stderr(&missing).contains("no-such-program: not found"));
}

#[test]
fn without_the_library_one_warning_and_stock_sockets() {
    let result = output(&["run", "sh", "-c", "echo \"[$LD_PRELOAD$FASTSOCKET_SOCKET]\""]);
    assert!(result.status.success());
    assert_eq!(String::from_utf8_lossy(&result.stdout), "[]\n");
    assert_eq!(stderr(&result).lines().count(), 1, "{}", stderr(&result));
    assert!(stderr(&result).contains("/nonexistent/libfsocket.so"));
}

#[test]
fn arguments_pass_through() {
    let result = output(&["run", "--no-shm", "echo", "-v", "--no-shm", "--", "a b"]);
    assert_eq!(String::from_utf8_lossy(&result.stdout), "-v --no-shm -- a b\n");
}

/// The start-up code of std would ignore SIGPIPE and open closed descriptors. `fastsocket run`
/// must avoid both.
#[test]
fn signals_and_closed_descriptors_pass_through() {
    let wrapper = env!("CARGO_BIN_EXE_fastsocket");
    let show = "grep SigIgn /proc/self/status; ls /proc/self/fd | tr '\\n' ' '";
    let shell = |setup: &str, prefix: &str| {
        let script = format!("{setup} exec {prefix} sh -c \"$0\" <&-");
        let mut command = Command::new("sh");
        command.args(["-c", &script, show]).env("FASTSOCKET_LIBRARY", "/nonexistent/libfsocket.so");
        String::from_utf8_lossy(&command.output().unwrap().stdout).into_owned()
    };
    for setup in ["", "trap '' PIPE;", "trap '' TERM HUP;"] {
        let with = shell(setup, &format!("{wrapper} run"));
        assert_eq!(with, shell(setup, ""), "{setup}");
        assert!(with.contains("SigIgn"));
    }
}

/// A false monitor that binds its name at once but answers late, as a monitor does that has just
/// started on a busy machine.
const LATE: &str = r#"#!/usr/bin/python3
import os, socket, sys, time
path = sys.argv[sys.argv.index("--socket") + 1].replace(".sock", "-ABI.sock")
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.bind(path)
s.listen()
s.settimeout(10)
time.sleep(1)
try:
    while True:
        c, _ = s.accept()
        if asked := c.recv(1000):
            open(os.path.dirname(path) + "/answered", "w")
            c.send(asked)
            break
finally:
    os.remove(path)
"#;

#[test]
fn a_private_monitor_answers_before_the_program_begins() {
    use std::os::unix::fs::PermissionsExt;
    if std::path::Path::new(fsocket_proto::paths::SYSTEM_SOCKET).exists() {
        return eprintln!("SKIPPED: a system monitor runs here");
    }
    let runtime = tempfile::tempdir().unwrap();
    let file = |name: &str, content: &[u8], mode| {
        let path = runtime.path().join(name);
        std::fs::write(&path, content).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
        path
    };
    std::fs::set_permissions(runtime.path(), PermissionsExt::from_mode(0o700)).unwrap();
    // ld.so skips a library that it cannot load.
    let head = std::fs::read("/proc/self/exe").unwrap();
    let late = LATE.replace("ABI", &fsocket_abi::VERSION.to_string());
    let (library, monitor) = (file("libfsocket.so", &head[..64], 0o644), file("monitor", late.as_bytes(), 0o755));
    let answered = runtime.path().join("fastsocket/answered");
    let mut command = bare(&["run", "test", "-e", answered.to_str().unwrap()]);
    command.env("FASTSOCKET_LIBRARY", library).env("FASTSOCKET_MONITOR", monitor);
    let result = command.env("XDG_RUNTIME_DIR", runtime.path()).output().unwrap();
    assert_eq!(result.status.code(), Some(0), "{result:?}");
}
