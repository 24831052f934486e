//! Files and functions of a size that can be read, and the field's words instead of private ones.
//!
//! A file above [`FILE`] lines or a function above [`FUNCTION`] lines says why in a comment that begins with
//! `Long:`, at the file's head or right above the function. The library, which is being taken apart, has
//! a number of files that may only go down; everything else has none.

use std::path::{Path, PathBuf};

const FILE: usize = 400;
const FUNCTION: usize = 80;
/// Long files of the library, and of crates that it is split into. May only go down.
const LIBRARY_FILES: usize = 1;
/// Everything else that is ours; a crate that is not named here is the library's.
const FOLDERS: &[&str] = &["bench", "demo", "tests", "fuzz"];
const OTHERS: &[&str] =
    &["agent", "bpf", "cli", "client", "e2e", "hooktable", "measure", "metrics", "monitor", "testkit", "tune"];

/// Words that an engineer of this field does not know, and those that are used instead
/// (`told`, `part`, `away` and the like are words of everyday English, too, and not looked for).
const PRIVATE: &[(&str, &str)] = &[
    ("aloof", "unsubscribed from peers"),
    ("anew", "again"),
    ("bell", "waker"),
    ("bells", "wakers"),
    ("bury", "reclaim"),
    ("buried", "reclaimed"),
    ("deaf", "shut down both ways"),
    ("deputy", "delegate"),
    ("estate", "inherited state"),
    ("given_up", "detached"),
    ("heir", "exec successor"),
    ("heirs", "exec successors"),
    ("lie_down", "park"),
    ("meet_the_deaf", "replay reset"),
    ("nap", "idle, park"),
    ("naps", "is idle, parks"),
    ("napping", "parked"),
    ("nudge", "wake hint"),
    ("nudges", "wake hints"),
    ("parcel", "descriptor hand-off socket"),
    ("relatives", "fork group"),
    ("strained", "overloaded"),
    ("unsettled", "pending"),
];
/// Lines of the library with such a word. May only go down.
const LIBRARY_WORDS: usize = 4;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn files(dir: &Path, extensions: &[&str], out: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        let name = entry.file_name().to_string_lossy().into_owned();
        if path.is_dir() {
            if !matches!(name.as_str(), "target" | "corpus" | "out") && !name.starts_with('.') {
                files(&path, extensions, out);
            }
        } else if path.extension().is_some_and(|e| extensions.iter().any(|x| e == *x)) {
            out.push(path);
        }
    }
}

/// Sources of the library, and of everything else.
fn sources(extensions: &[&str]) -> (Vec<PathBuf>, Vec<PathBuf>) {
    let (mut library, mut others) = (Vec::new(), Vec::new());
    for entry in std::fs::read_dir(root().join("crates")).expect("the crates").flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let known = OTHERS.contains(&name.as_str());
        files(&entry.path(), extensions, if known { &mut others } else { &mut library });
    }
    FOLDERS.iter().for_each(|folder| files(&root().join(folder), extensions, &mut others));
    (library, others)
}

/// Functions above [`FUNCTION`] lines without a reason: `rustfmt` puts a function's last brace where its first
/// line begins.
fn long_functions(path: &Path, text: &str) -> Vec<String> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    for (i, line) in lines.iter().enumerate() {
        let code = line.trim_start();
        let is_function = code.split("fn ").next().is_some_and(|before| {
            code.contains("fn ")
                && before.split_whitespace().all(|w| {
                    w.starts_with("pub") || w.starts_with('"') || matches!(w, "const" | "async" | "unsafe" | "extern")
                })
        });
        if !is_function || line.ends_with(';') || line.ends_with('}') {
            continue;
        }
        let end = format!("{}}}", &line[..line.len() - code.len()]);
        let length = lines[i..].iter().position(|l| **l == end).map_or(0, |n| n + 1);
        let above = lines[..i].iter().rev().take_while(|l| {
            let l = l.trim_start();
            l.starts_with("//") || l.starts_with("#[")
        });
        if length > FUNCTION && !above.into_iter().any(|l| l.contains("// Long:")) {
            found.push(format!("{}:{}: {length} lines", path.display(), i + 1));
        }
    }
    found
}

#[test]
fn long_files_and_functions_have_a_reason() {
    let look = |paths: &[PathBuf]| {
        let (mut long_files, mut functions) = (Vec::new(), Vec::new());
        for path in paths {
            let text = std::fs::read_to_string(path).expect("a source file");
            let head = text.lines().take_while(|l| l.starts_with("//!")).any(|l| l.starts_with("//! Long:"));
            let n = text.lines().count();
            if n > FILE && !head {
                long_files.push(format!("{}: {n} lines", path.display()));
            }
            functions.extend(long_functions(path, &text));
        }
        (long_files, functions)
    };
    let (library, others) = sources(&["rs"]);
    let (long, functions) = look(&others);
    assert!(long.is_empty() && functions.is_empty(), "split, or say why (`Long: ...`): {long:#?} {functions:#?}");
    let (long, functions) = look(&library);
    assert!(long.len() <= LIBRARY_FILES, "{} long files, may only go down: {long:#?}", long.len());
    assert!(functions.is_empty(), "split, or say why (`Long: ...`): {functions:#?}");
}

#[test]
fn private_words_do_not_come_back() {
    let look = |paths: &[PathBuf]| {
        let mut found = Vec::new();
        for path in paths.iter().filter(|p| !p.ends_with("hooktable/tests/style.rs")) {
            let Ok(text) = std::fs::read_to_string(path) else { continue };
            for (i, line) in text.lines().enumerate() {
                let lower = line.to_lowercase();
                let words: Vec<&str> = lower.split(|c: char| !c.is_alphanumeric() && c != '_').collect();
                for (word, instead) in PRIVATE.iter().filter(|(word, _)| words.contains(word)) {
                    found.push(format!("{}:{}: {word}: {instead}", path.display(), i + 1));
                }
            }
        }
        found
    };
    let (library, mut others) = sources(&["rs", "c", "h", "py", "sh", "toml", "md"]);
    files(&root().join("docs"), &["md"], &mut others);
    // (Decisions speak as people spoke then.)
    others.retain(|p| !p.components().any(|c| c.as_os_str() == "adr"));
    others.extend(["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md"].map(|f| root().join(f)));
    let found = look(&others);
    assert!(found.is_empty(), "{found:#?}");
    let found = look(&library);
    assert!(found.len() <= LIBRARY_WORDS, "{} lines, may only go down: {found:#?}", found.len());
}

/// Does the note begin with a reference to the caller, or to another note?
fn defers(line: &str) -> bool {
    let Some(note) = line.trim_start().strip_prefix("// SAFETY: ") else { return false };
    ["the caller", "as above", "likewise", "as there"].iter().any(|begin| note.starts_with(begin))
}

#[test]
fn notes_beside_unsafe_say_what_holds() {
    assert!(
        defers("    // SAFETY: the caller's.") && defers("// SAFETY: as above; it ends.") && !defers("// SAFETY: new.")
    );
    let mut sources = Vec::new();
    for place in ["crates", "bench", "demo", "tests", "fuzz"] {
        files(&root().join(place), &["rs"], &mut sources);
    }
    sources.retain(|p| !p.ends_with("hooktable/tests/style.rs"));
    let mut wrong = Vec::new();
    for path in &sources {
        let Ok(text) = std::fs::read_to_string(path) else { continue };
        let lines = text.lines().enumerate().filter(|(_, l)| defers(l));
        wrong.extend(lines.map(|(i, _)| format!("{}:{}: say what holds, and why here", path.display(), i + 1)));
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// What the tests of length look for is found.
#[test]
fn a_long_function_is_seen() {
    let body = "    x();\n".repeat(FUNCTION);
    let plain = format!("pub fn f() {{\n{body}}}\n");
    assert_eq!(long_functions(Path::new("f.rs"), &plain).len(), 1);
    let reason = format!("/// F.\n// Long: a table.\npub(crate) unsafe extern \"C\" fn f() {{\n{body}}}\n");
    assert!(long_functions(Path::new("f.rs"), &reason).is_empty());
    assert!(long_functions(Path::new("f.rs"), "fn f() {\n}\n").is_empty());
}
