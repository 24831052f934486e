//! Files and functions of a size that can be read.
//!
//! A file above [`FILE`] lines or a function above [`FUNCTION`] lines says why in a comment that begins with
//! `Long:`, at the file's head or right above the function. In the crates of [`SHORT`] a function has at most
//! [`SHORT_FUNCTION`] lines, whatever the reason. The library, which is being taken apart, has
//! a number of files that may only go down; everything else has none.

use std::path::{Path, PathBuf};

const FILE: usize = 400;
const FUNCTION: usize = 80;
/// Where calls of the program are decided, and where they wait.
const SHORT: &[&str] = &["listeners", "ops", "readiness", "shm", "streams", "wait"];
const SHORT_FUNCTION: usize = 60;
/// Long files of the library, and of crates that it is split into. May only go down.
const LIBRARY_FILES: usize = 1;
/// Everything else that is ours; a crate that is not named here is the library's.
const FOLDERS: &[&str] = &["bench", "demo", "tests", "fuzz"];
const OTHERS: &[&str] =
    &["agent", "bpf", "cli", "client", "e2e", "hooktable", "measure", "metrics", "monitor", "testkit", "tune"];

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
    let parts: Vec<_> = path.iter().collect();
    let short = parts.windows(2).any(|pair| pair[1] == "src" && SHORT.iter().any(|name| pair[0] == *name));
    let most = if short { SHORT_FUNCTION } else { FUNCTION };
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
        if length > most && (short || !above.into_iter().any(|l| l.contains("// Long:"))) {
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

/// Does the note refer to the caller, or to another note?
fn defers(note: &str) -> bool {
    let elsewhere = ["caller", "vouch", "see above", "as above", "likewise", "the contract", "as in `", "as for `"];
    elsewhere.iter().any(|words| note.to_lowercase().contains(words))
}

/// The notes beside unsafe code, each with the number of its first line.
fn notes(text: &str) -> Vec<(usize, String)> {
    let mut found: Vec<(usize, String)> = Vec::new();
    let mut inside = false;
    for (i, line) in text.lines().enumerate() {
        let Some(comment) = line.trim_start().strip_prefix("//").map(str::trim) else {
            inside = false;
            continue;
        };
        if let Some(note) = comment.strip_prefix("SAFETY: ") {
            inside = true;
            found.push((i + 1, note.to_owned()));
        } else if let Some((_, note)) = found.last_mut().filter(|_| inside) {
            *note += " ";
            *note += comment;
        }
    }
    found
}

#[test]
fn notes_beside_unsafe_say_what_holds() {
    let example = notes("    // SAFETY: the\n    // caller's.\n    f();\n    // Not a note.\n    // SAFETY: new.\n");
    assert_eq!(example, [(1, "the caller's.".to_owned()), (5, "new.".to_owned())]);
    assert!(defers(&example[0].1) && defers("As above; it ends.") && !defers(&example[1].1));
    let mut sources = Vec::new();
    for place in ["crates", "bench", "demo", "tests", "fuzz"] {
        files(&root().join(place), &["rs"], &mut sources);
    }
    sources.retain(|p| !p.ends_with("hooktable/tests/style.rs"));
    let mut wrong = Vec::new();
    for path in &sources {
        let Ok(text) = std::fs::read_to_string(path) else { continue };
        let all = notes(&text).into_iter().filter(|(_, note)| defers(note));
        wrong.extend(all.map(|(line, _)| format!("{}:{line}: say what holds, and why here", path.display())));
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
    assert_eq!(long_functions(Path::new("crates/wait/src/f.rs"), &reason).len(), 1);
}
