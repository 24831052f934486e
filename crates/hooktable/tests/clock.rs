//! Tests wait for states. An assertion on an upper bound of time fails on a machine that is busy, and says nothing: it
//! belongs into a benchmark. Where a bound is the property, a comment in its line says why: `// bound: ...`.

use std::path::{Path, PathBuf};

fn sources(dir: &Path, out: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            sources(&path, out);
        } else if path.extension().is_some_and(|e| e == "rs" || e == "py") {
            out.push(path);
        }
    }
}

/// Does the line assert that something took less than a time?
fn is_bound(line: &str) -> bool {
    let line = line.trim_start();
    let asserts = ["assert!(", "assert ", "t.log(\"at once\"", "t.log(\"in time\""];
    let bounds = ["elapsed() <", "< Duration::from", "<= Duration::from", "took <", "time() - start <"];
    asserts.iter().any(|a| line.starts_with(a))
        && bounds.iter().any(|b| line.contains(b))
        && !line.contains("// bound: ")
}

#[test]
fn no_test_asserts_an_upper_bound_of_time() {
    assert!(is_bound("    assert!(began.elapsed() < Duration::from_secs(2));") && is_bound("assert!(took < LIMIT);"));
    assert!(!is_bound("    while began.elapsed() < limit {") && !is_bound("assert!(took > LIMIT);"));
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut files = Vec::new();
    ["crates", "bench", "demo", "tests"].iter().for_each(|dir| sources(&root.join(dir), &mut files));
    files.retain(|path| !path.ends_with("hooktable/tests/clock.rs"));
    let mut found = Vec::new();
    for path in &files {
        let text = std::fs::read_to_string(path).expect("a source file");
        found.extend(
            (1..).zip(text.lines()).filter(|(_, l)| is_bound(l)).map(|(n, l)| format!("{}:{n}: {l}", path.display())),
        );
    }
    assert!(files.len() > 300, "{} files", files.len());
    assert!(found.is_empty(), "{}", found.join("\n"));
}
