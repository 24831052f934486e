//! `fastsocket run` as an exec wrapper: what it hands over, and how it fails.

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output};

/// `fastsocket ARGS` without anything of ours to be found.
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

/// std's start-up code would ignore SIGPIPE and open closed descriptors.
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
