//! The fields of a description, and of the socket that a fork group shares, belong to their modules: no other code loads or
//! stores them. Where a connection is, one module says.

use std::path::{Path, PathBuf};

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

/// The structures of a file by name, with the lines of each.
fn structures(text: &str) -> Vec<(String, String)> {
    let mut found: Vec<(String, String)> = Vec::new();
    let mut open = false;
    for line in text.lines() {
        let declared = line.strip_prefix("pub").map_or(line, |rest| rest.trim_start_matches("(crate)").trim_start());
        if let Some(rest) = declared.strip_prefix("struct ") {
            let name = rest.chars().take_while(|c| c.is_alphanumeric()).collect();
            found.push((name, String::new()));
            open = true;
        }
        if let Some((_, body)) = found.last_mut().filter(|_| open && !line.trim_start().starts_with("//")) {
            body.push_str(line);
            body.push('\n');
        }
        open = open && !line.starts_with('}') && !line.ends_with(';');
    }
    found
}

/// These structures, those that they hold, and so on: each with the file in which it is.
fn with_parts(whole: &[&str], all: &[(PathBuf, String, String)]) -> Vec<(PathBuf, String, String)> {
    let mut found: Vec<(PathBuf, String, String)> = Vec::new();
    let mut names: Vec<String> = whole.iter().map(ToString::to_string).collect();
    while let Some(name) = names.pop() {
        for part in all.iter().filter(|(_, n, _)| *n == name) {
            if !found.contains(part) {
                // What is behind a pointer is no part.
                let held = part.2.lines().filter(|line| !line.contains('<'));
                names.extend(held.flat_map(|l| l.split(|c: char| !c.is_alphanumeric())).map(str::to_owned));
                found.push(part.clone());
            }
        }
    }
    found
}

#[test]
fn descriptions_keep_their_fields() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut all = Vec::new();
    for file in ["abi/src", "fdtable/src", "runtime/src", "sync/src"].iter().flat_map(|dir| files(&crates.join(dir))) {
        let text = std::fs::read_to_string(&file).expect("text");
        all.extend(structures(&text).into_iter().map(|(name, body)| (file.clone(), name, body)));
    }
    let parts = with_parts(&["Desc", "Sock"], &all);
    for part in ["Half", "Flags", "Conn", "Rings", "KernelConn", "Placeholder", "Memory", "Calls"] {
        assert!(parts.iter().any(|(_, name, _)| name == part), "{part} has moved");
    }
    for (file, name, body) in parts {
        let found = public_atomics(&body);
        assert!(found.is_empty(), "{}: {name}: {found:?}", file.display());
    }
}

/// What says where a connection is, and who may read it beside the path switch (`crates/abi/src/path_switch.rs`) and the
/// description's module. Everybody else asks `Desc::path_state`. (The bits themselves are private to their crate.)
const PIECES: &[(&str, &[&str])] = &[
    (".kernel_end()", &[]),
    (".went_to()", &[]),
    ("table::end_of(", &["migrate/src/path.rs", "migrate/src/path/settle.rs", "readiness/src/epoll.rs"]),
    (".path_state_in_release()", &["ops/src/close.rs"]),
    ("PeerStatus::MOV", &[]),
];

#[test]
fn one_module_says_where_a_connection_is() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut wrong = Vec::new();
    for file in files(&crates).into_iter().filter(|p| p.extension().is_some_and(|e| e == "rs")) {
        let name = file.strip_prefix(&crates).expect("a crate").to_string_lossy().into_owned();
        let owner = name.starts_with("abi/src/") || name.starts_with("fdtable/src/table");
        if owner || !name.contains("/src/") {
            continue;
        }
        let text = std::fs::read_to_string(&file).expect("text");
        let found = PIECES.iter().filter(|(piece, readers)| text.contains(piece) && !readers.contains(&name.as_str()));
        wrong.extend(found.map(|(piece, _)| format!("{name}: {piece}")));
    }
    assert!(wrong.is_empty(), "ask `Desc::path_state`: {wrong:#?}");
    let bits = std::fs::read_to_string(crates.join("abi/src/channel.rs")).expect("text");
    for bit in ["MIGRATING", "MIGRATED", "FOR_NOW", "CARRIED"] {
        assert!(bits.contains(&format!("pub(crate) const {bit}: u32")), "{bit} is private to its crate");
    }
}

#[test]
fn a_public_atomic_is_found() {
    let text = "pub struct D {\n    pub kind: AtomicU32,\n    pub(crate) list: [AtomicI32; 4],\n    own: AtomicU8,\n}";
    assert_eq!(public_atomics(text), ["pub kind: AtomicU32,", "pub(crate) list: [AtomicI32; 4],"]);
    assert!(public_atomics("pub fn list(&self) -> &[AtomicI32; 4] {").is_empty());
}

#[test]
fn the_parts_of_a_structure_are_found() {
    let text = "pub struct D {\n    // Of E.\n    h: Half,\n    s: AtomicPtr<E>,\n}\n\nstruct Half(AtomicU8);\npub struct E {}\n";
    let all: Vec<_> = structures(text).into_iter().map(|(name, body)| (PathBuf::new(), name, body)).collect();
    let names = with_parts(&["D"], &all).into_iter().map(|(_, name, _)| name);
    assert_eq!(names.collect::<Vec<_>>(), ["D", "Half"]);
}
