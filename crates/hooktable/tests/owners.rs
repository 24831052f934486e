//! A name has one owner: no crate passes on what is another crate's, so that a `use` says where the code lies.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

fn files(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).expect("directory").map(|e| e.expect("entry").path());
    let rust = |p: &PathBuf| p.extension().is_some_and(|e| e == "rs");
    entries.flat_map(|p| if p.is_dir() { files(&p) } else { vec![p] }).filter(rust).collect()
}

/// The trees of all `use` declarations, each in one line, and whether it is public.
fn uses(text: &str) -> Vec<(bool, String)> {
    let mut found = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find("use ") {
        let line = rest[..at].rfind('\n').map_or(0, |n| n + 1);
        let before = rest[line..at].trim();
        let (tree, after) = rest[at + 4..].split_once(';').unwrap_or((&rest[at + 4..], ""));
        if before.is_empty() || before.starts_with("pub") && !before.contains("//") {
            found.push((!before.is_empty(), tree.split_whitespace().collect::<Vec<_>>().join(" ")));
        }
        rest = after;
    }
    found
}

/// The names that a tree brings into scope.
fn names(tree: &str) -> Vec<String> {
    let last = tree.rsplit_once("::").map_or(tree, |(_, last)| last);
    let all = last.trim_matches(['{', '}']).split(',').map(str::trim).filter(|n| !n.is_empty());
    all.map(|n| n.rsplit_once(" as ").map_or(n, |(_, name)| name).to_owned()).collect()
}

/// Public `use` declarations of a crate that name another crate of this project, also by an alias of the
/// crate's root.
fn passed_on(root: &str, text: &str) -> Vec<String> {
    let ours = |tree: &str| tree.starts_with("fsocket_");
    let aliases: BTreeSet<String> =
        uses(root).into_iter().filter(|(_, tree)| ours(tree)).flat_map(|(_, tree)| names(&tree)).collect();
    let foreign = |tree: &String| {
        let first = |path: &str| path.split([':', ' ', ';']).next().is_some_and(|name| aliases.contains(name));
        ours(tree) || tree.strip_prefix("crate::").is_some_and(first)
    };
    uses(text).into_iter().filter(|(public, tree)| *public && foreign(tree)).map(|(_, tree)| tree).collect()
}

#[test]
fn no_crate_passes_on_a_module_of_another() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut read = 0;
    for dir in std::fs::read_dir(crates).expect("directory").map(|e| e.expect("entry").path().join("src")) {
        let Ok(root) = std::fs::read_to_string(dir.join("lib.rs")) else { continue };
        for file in files(&dir) {
            let found = passed_on(&root, &std::fs::read_to_string(&file).expect("text"));
            assert!(found.is_empty(), "{}: {found:?}", file.display());
            read += 1;
        }
    }
    assert!(read > 300, "the crates have moved: {read} files");
}

#[test]
fn what_is_passed_on_is_found() {
    let root = "use fsocket_shm::{\n    chan,\n    stage as step,\n};\npub mod own;\n";
    assert_eq!(passed_on(root, "pub use fsocket_sys::Errno;"), ["fsocket_sys::Errno"]);
    assert_eq!(passed_on(root, "    pub(crate) use crate::step::{of, Path};"), ["crate::step::{of, Path}"]);
    assert_eq!(passed_on(root, "pub use crate::chan;"), ["crate::chan"]);
    assert!(passed_on(root, "use crate::chan;\npub use crate::own::Kind;\n// pub use crate::chan;").is_empty());
}
