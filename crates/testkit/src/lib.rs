//! Shared parts of the end-to-end tests: built artefacts, a private monitor per test, guarded child
//! processes, and assertions about the path of the bytes.
//!
//! Every wait has a time limit. Every child runs in a process group of its own, which is killed
//! when its guard drops. Nothing is retried.
//!
//! `FASTSOCKET_TEST_MODE=stock` runs the same tests on kernel sockets, to check the tests
//! themselves. Assertions about paths are then skipped, with a message.

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

/// The distribution's Python, because it is a binary and not the script of a version manager.
pub const PYTHON: &str = "/usr/bin/python3";

/// Whether the tests run on kernel sockets only.
pub fn stock_mode() -> bool {
    std::env::var("FASTSOCKET_TEST_MODE").is_ok_and(|v| v == "stock")
}

/// Root of the workspace.
pub fn workspace() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).canonicalize().expect("workspace root")
}

/// Path of a file below `tests/`, such as `conformance/semantics.py`.
pub fn script(relative: &str) -> PathBuf {
    let path = workspace().join("tests").join(relative);
    assert!(path.exists(), "no such test script: {}", path.display());
    path
}

/// Path of a helper program. A plain name such as `echo_server.py` is in `tests/apps`, for several
/// modules or kinds of tests. A name with a folder such as `leaks/churn.py` belongs to one
/// end-to-end module, and lies beside it.
pub fn helper(name: &str) -> PathBuf {
    let folder = if name.contains('/') { "crates/e2e/tests/e2e" } else { "tests/apps" };
    let path = workspace().join(folder).join(name);
    assert!(path.exists(), "no such helper program: {}", path.display());
    path
}

/// Compiles a helper program in C (see [`helper`]) into the file `to`, with `more` arguments for
/// the compiler.
#[track_caller]
pub fn compile(source: &str, to: &std::path::Path, more: &[&str]) {
    let mut cc = std::process::Command::new("cc");
    cc.args(["-O1", "-pthread", "-o"]).arg(to).arg(helper(source)).args(more);
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

/// The path of a program that the test needs. If it is missing, the test is skipped with a
/// message. With `FASTSOCKET_TEST_STRICT` set (as in CI), the test fails instead.
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
