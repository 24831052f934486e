//! The files that a build leaves.

use std::path::PathBuf;

/// Directory with the built artefacts: `FASTSOCKET_ARTIFACTS`, else
/// `target/release` of the workspace.
pub fn dir() -> PathBuf {
    match std::env::var_os("FASTSOCKET_ARTIFACTS") {
        Some(dir) => PathBuf::from(dir),
        None => crate::workspace().join("target/release"),
    }
}

fn artefact(name: &str) -> PathBuf {
    let path = dir().join(name);
    assert!(path.is_file(), "{} is not built: run `make` first", path.display());
    path
}

/// The preloaded library.
pub fn library() -> PathBuf {
    artefact("libfsocket.so")
}

/// The monitor.
pub fn monitor() -> PathBuf {
    artefact("fastsocketd")
}

/// The command line.
pub fn cli() -> PathBuf {
    artefact("fastsocket")
}

/// The benchmark.
pub fn bench() -> PathBuf {
    artefact("fastsocket-bench")
}

/// The demo server.
pub fn demo() -> PathBuf {
    artefact("fastsocket-demo")
}

/// The agent.
pub fn agent() -> PathBuf {
    artefact("fastsocket-agent")
}
