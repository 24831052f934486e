//! `tests/conformance/semantics.py` on stock sockets and under the library:
//! the transcripts of both sides must be equal, call by call.

use fsocket_testkit::host::Stock;
use fsocket_testkit::{script, stock_mode, Finished, Host, Proc, PYTHON};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

/// Cases that may differ while both ends use shared memory; docs/limits.md explains each. If a
/// case no longer differs, the test fails.
const KNOWN: &str = "";

const LIMIT: Duration = Duration::from_secs(400);

fn semantics(host: &Host, args: &[&str]) -> Finished {
    let mut command = host.command(Stock, PYTHON);
    command.arg(script("conformance/semantics.py")).args(args);
    if !stock_mode() {
        // The script that runs the cases must itself stay on stock sockets.
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

/// Transcripts on stock sockets. Three tests compare with the same ones, so they are made only
/// once.
#[track_caller]
fn kernel(host: &Host, args: &[&str]) -> PathBuf {
    static SEPARATE: OnceLock<Vec<u8>> = OnceLock::new();
    if !args.is_empty() {
        return run(host, "kernel.json", args);
    }
    let read = || std::fs::read(run(host, "kernel-once.json", args)).expect("transcripts");
    host.file("kernel.json", SEPARATE.get_or_init(read))
}

/// Compares stock sockets with the setup that `args` choose. `shm`: whether the library must carry
/// at least one connection in each case.
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
        // A few connections use the kernel, because their listener is without the library or the
        // socket was bound before. The others must use shared memory.
        let cases = semantics(&host, &["list"]).success().stdout.lines().count() as i128;
        assert!(delta.get("connect_shm") >= cases * 9 / 10, "of {cases} cases, over shm:\n{delta}");
        assert!(delta.get("hostile_peer") == 0, "a peer was called hostile\n{delta}");
    } else {
        // In the case `epoll_oneshot_listener_with_two_clients` the server connects to itself, so
        // that its listener has both paths.
        let own = if args.contains(&"--server") { 2 } else { 0 };
        assert_eq!((delta.get("connect_shm"), delta.get("accept_shm")), (own, own), "shared memory was used\n{delta}");
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
