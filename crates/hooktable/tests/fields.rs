//! The fields of a description, and of the socket that a fork group shares, belong to their modules: no other code loads or
//! stores them.

use std::path::{Path, PathBuf};

/// Where descriptions are.
const MODULES: &str = "crates/fdtable/src/table";

/// Lines that declare a public field which is, or holds, an atomic.
fn public_atomics(text: &str) -> Vec<String> {
    let declares = |line: &&str| {
        let field =
            line.trim_start().strip_prefix("pub").is_some_and(|rest| !rest.contains("fn ") && rest.contains(':'));
        field && line.contains("Atomic")
    };
    text.lines().filter(declares).map(|line| line.trim().to_owned()).collect()
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).expect("directory").map(|e| e.expect("entry").path());
    entries.flat_map(|p| if p.is_dir() { files(&p) } else { vec![p] }).collect()
}

#[test]
fn descriptions_keep_their_fields() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(MODULES);
    let mut files = files(&dir);
    assert!(files.len() >= 8, "the modules have moved: {files:?}");
    files.push(Path::new(env!("CARGO_MANIFEST_DIR")).join("../abi/src/sock.rs"));
    for file in files {
        let found = public_atomics(&std::fs::read_to_string(&file).expect("text"));
        assert!(found.is_empty(), "{}: {found:?}", file.display());
    }
}

#[test]
fn a_public_atomic_is_found() {
    let text = "pub struct D {\n    pub kind: AtomicU32,\n    pub(crate) list: [AtomicI32; 4],\n    own: AtomicU8,\n}";
    assert_eq!(public_atomics(text), ["pub kind: AtomicU32,", "pub(crate) list: [AtomicI32; 4],"]);
    assert!(public_atomics("pub fn list(&self) -> &[AtomicI32; 4] {").is_empty());
}
