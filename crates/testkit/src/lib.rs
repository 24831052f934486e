//! What the end-to-end tests share: finding the built artefacts, a private
//! monitor per test, guarded child processes, and assertions about the path
//! that carried the bytes.
//!
//! Every wait has a limit, every child is in a process group of its own that
//! is killed when its guard drops. Nothing is retried.
//!
//! `FASTSOCKET_TEST_MODE=stock` runs the same tests on kernel sockets, with
//! every path assertion skipped (and said so): a check of the tests themselves.

pub mod artifacts;
pub mod counters;
pub mod host;
pub mod load;
pub mod net;
pub mod netns;
pub mod process;
pub mod servers;
pub mod workers;

pub use counters::{Delta, Snapshot};
pub use host::{Host, Side};
pub use process::{Finished, Proc};

use std::path::PathBuf;

/// Python of the distribution: a real binary, not a version manager's script.
pub const PYTHON: &str = "/usr/bin/python3";

/// Are we told to run everything on kernel sockets?
pub fn stock_mode() -> bool {
    std::env::var("FASTSOCKET_TEST_MODE").is_ok_and(|v| v == "stock")
}

/// Root of the workspace.
pub fn workspace() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).canonicalize().expect("workspace root")
}

/// A script of `tests/`, e.g. `apps/echo_server.py`.
pub fn script(relative: &str) -> PathBuf {
    let path = workspace().join("tests").join(relative);
    assert!(path.exists(), "no such test script: {}", path.display());
    path
}

/// Compiles a C program of `tests/` (e.g. `apps/uring.c`) with more arguments for
/// the compiler; the result is `to`.
#[track_caller]
pub fn compile(source: &str, to: &std::path::Path, more: &[&str]) {
    let mut cc = std::process::Command::new("cc");
    cc.args(["-O1", "-pthread", "-o"]).arg(to).arg(script(source)).args(more);
    let out = cc.output().unwrap_or_else(|e| panic!("cc: {e}"));
    assert!(out.status.success(), "cc {source} {more:?}:\n{}", String::from_utf8_lossy(&out.stderr));
}

/// Full path of a program, searched in PATH and the sbin directories.
pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var("PATH").unwrap_or_default();
    let mut candidates = path
        .split(':')
        .chain(["/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/bin", "/bin"])
        .map(|dir| PathBuf::from(dir).join(name));
    candidates.find(|candidate| candidate.is_file())
}

/// Path of a program that the test needs, or leave the test, loudly.
/// With `FASTSOCKET_TEST_STRICT` set (CI does) a missing program is a failure.
#[macro_export]
macro_rules! need {
    ($name:literal) => {
        match $crate::find_program($name) {
            Some(path) => path,
            None if std::env::var_os("FASTSOCKET_TEST_STRICT").is_some() => {
                panic!("{} is not installed (FASTSOCKET_TEST_STRICT is set)", $name)
            }
            None => {
                eprintln!("SKIPPED: {} is not installed and could not be (make deps)", $name);
                return;
            }
        }
    };
}
