//! The pages say what the tables say.

use fsocket_hooktable::{hooks, pages, unhooked};
use std::collections::BTreeSet;
use std::path::PathBuf;

fn docs(file: &str) -> String {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(file);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

#[test]
fn pages_are_current() {
    for page in pages::all() {
        assert!(docs(page.file) == page.text, "docs/{} differs from the tables: run `make docs`", page.file);
    }
}

#[test]
fn each_function_has_one_line() {
    let names: BTreeSet<_> = hooks().map(|h| h.name).collect();
    assert_eq!(names.len(), hooks().count(), "a function is in the table twice");
    let mut seen = BTreeSet::new();
    for u in unhooked::HARMLESS.iter().chain(unhooked::VISIBLE) {
        for n in u.names {
            assert!(!names.contains(n), "{n} is hooked, and listed as not hooked");
            assert!(seen.insert(n), "{n} is listed twice as not hooked");
        }
    }
}

#[test]
fn limits_name_every_fallback() {
    let text = docs("limits.md");
    let reason = |s: &str| {
        let end = s.find(|c: char| !(c.is_ascii_lowercase() || c == '_')).unwrap_or(s.len());
        s[..end].to_owned()
    };
    let named: BTreeSet<_> = text.split("fallback.").skip(1).map(reason).filter(|r| !r.is_empty()).collect();
    let known: BTreeSet<_> =
        fsocket_abi::arena::COUNTERS.iter().filter_map(|c| c.strip_prefix("fallback.")).map(str::to_owned).collect();
    assert_eq!(named, known, "docs/limits.md and the table of counters");
}
