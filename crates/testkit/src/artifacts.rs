//! Paths of the files that a build makes, with a check that they are current.

use std::path::{Path, PathBuf};

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
    // `scripts/test.py` sets the variable: it has just built the file, and sources may be edited
    // while the tests run.
    let fresh = std::env::var_os("FASTSOCKET_TEST_FRESH").is_some();
    if let Some(newer) = newer_source(&path).filter(|_| !fresh) {
        panic!("{} is stale: {} has changed since; build again", path.display(), newer.display());
    }
    path
}

/// A source that is younger than the built file. Cargo lists the sources in a file beside it. An
/// installed file has no such list, so it is not checked.
fn newer_source(built: &Path) -> Option<PathBuf> {
    let time = |path: &Path| std::fs::metadata(path).and_then(|data| data.modified()).ok();
    let list = std::fs::read_to_string(built.with_extension("d")).ok()?;
    let sources = list.split_once(": ")?.1.split_whitespace().map(PathBuf::from);
    let when = time(built)?;
    sources.into_iter().find(|source| time(source).is_some_and(|changed| changed > when))
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

#[cfg(test)]
mod tests {
    #[test]
    fn a_changed_source_makes_a_build_stale() {
        let dir = tempfile::tempdir().unwrap();
        let [source, built, list] = ["source.rs", "library.so", "library.d"].map(|name| dir.path().join(name));
        let write = |path: &std::path::Path, text: &str, time: u64| {
            std::fs::write(path, text).unwrap();
            let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(time);
            std::fs::File::open(path).unwrap().set_modified(time).unwrap();
        };
        write(&source, "", 1_000);
        write(&built, "", 2_000);
        assert_eq!(super::newer_source(&built), None, "installed, without a list");
        write(&list, &format!("{}: {}\n", built.display(), source.display()), 2_000);
        assert_eq!(super::newer_source(&built), None);
        write(&source, "", 3_000);
        assert_eq!(super::newer_source(&built), Some(source));
    }
}
