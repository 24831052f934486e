//! `tests/conformance/semantics.py` on stock sockets and under the library:
//! the transcripts of both sides must be equal, call by call.

use fsocket_testkit::host::Stock;
use fsocket_testkit::{script, stock_mode, Finished, Host, Proc, PYTHON};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

/// Cases that differ while both ends are over shared memory, each explained in
/// docs/limits.md. One that no longer differs fails the test.
const KNOWN: &str = "";

const LIMIT: Duration = Duration::from_secs(400);

fn semantics(host: &Host, args: &[&str]) -> Finished {
    let mut command = host.command(Stock, PYTHON);
    command.arg(script("conformance/semantics.py")).args(args);
    if !stock_mode() {
        // The runner itself stays on stock sockets.
        command.env("FS_PRELOAD", fsocket_testkit::artifacts::library()).env("FASTSOCKET_SOCKET", host.socket());
    }
    Proc::spawn(host.logs(), "semantics", command).finish(LIMIT)
}

/// Runs every case, and keeps the transcripts in a file.
#[track_caller]
fn run(host: &Host, name: &str, args: &[&str]) -> PathBuf {
    let done = semantics(host, &[&["run"], args].concat()).success();
    host.file(name, done.stdout)
}

/// The kernel's transcripts. Three tests compare with the same ones: they are made once.
#[track_caller]
fn kernel(host: &Host, args: &[&str]) -> PathBuf {
    static SEPARATE: OnceLock<Vec<u8>> = OnceLock::new();
    if !args.is_empty() {
        return run(host, "kernel.json", args);
    }
    let read = || std::fs::read(run(host, "kernel-once.json", args)).expect("transcripts");
    host.file("kernel.json", SEPARATE.get_or_init(read))
}

/// Stock against what `args` choose; `shm`: the library carries at least one
/// connection a case.
#[track_caller]
fn compare(stock_args: &[&str], args: &[&str], shm: bool) {
    let host = Host::new();
    let kernel = kernel(&host, stock_args);
    let before = host.snapshot();
    let ours = run(&host, "ours.json", if stock_mode() { stock_args } else { args });
    let delta = host.snapshot().since(&before);
    let (kernel, ours) = (kernel.display().to_string(), ours.display().to_string());
    let known = if shm && !stock_mode() { KNOWN } else { "" };
    let verdict = semantics(&host, &["compare", &kernel, &ours, "--known", known]);
    eprint!("{}", verdict.stdout);
    assert!(verdict.code == Some(0), "transcripts differ\n{}{}", verdict.stdout, verdict.stderr);
    if stock_mode() {
        eprintln!("PATH NOT ASSERTED: stock mode");
    } else if shm {
        // A few connections go to nobody, or were bound before: those are the
        // kernel's. The others are ours.
        let cases = semantics(&host, &["list"]).success().stdout.lines().count() as i128;
        assert!(delta.get("connect_shm") >= cases * 9 / 10, "of {cases} cases, over shm:\n{delta}");
        assert!(delta.get("hostile_peer") == 0, "a peer was called hostile\n{delta}");
    } else {
        delta.assert_kernel_only();
    }
}

#[test]
fn library_on_both_sides() {
    compare(&[], &["--server", "lib", "--client", "lib"], true);
}

#[test]
fn library_at_the_server() {
    compare(&[], &["--server", "lib"], false);
}

#[test]
fn library_at_the_client() {
    compare(&[], &["--client", "lib"], false);
}

#[test]
fn a_process_that_talks_to_itself() {
    compare(&["--together"], &["--together", "--server", "lib"], true);
}
