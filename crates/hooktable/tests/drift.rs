//! The pages say what the tables say.

use fsocket_hooktable::limits::limits;
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

/// Every reason for kernel TCP says when it counts, and every reason that docs/limits.md names exists.
#[test]
fn reasons_for_the_kernel_are_known() {
    use fsocket_abi::arena::{COUNTERS, COUNTER_CASES};
    for (name, case) in COUNTERS.iter().zip(COUNTER_CASES) {
        assert!(!name.starts_with("fallback.") || !case.is_empty(), "{name}: in which case?");
    }
    let text = docs("limits.md");
    let quoted: BTreeSet<_> = text.split('`').skip(1).step_by(2).filter(|w| w.starts_with("fallback.")).collect();
    let known: BTreeSet<_> = COUNTERS.iter().copied().filter(|c| c.starts_with("fallback.")).collect();
    assert!(quoted.is_subset(&known), "docs/limits.md names {:?}", quoted.difference(&known));
}

#[test]
fn limits_stand_with_functions_that_are_hooked() {
    let names: BTreeSet<_> = hooks().map(|h| h.name).collect();
    for l in &limits().hook {
        for f in &l.of {
            assert!(names.contains(f.as_str()), "{f} is not hooked: {}", l.what);
        }
    }
    let of_hooks = limits().hook.iter().map(|l| &l.what);
    let all: Vec<_> = of_hooks.chain(limits().section.iter().flat_map(|s| &s.notice).map(|n| &n.what)).collect();
    assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), all.len(), "a limit is there twice");
}

/// Pages that grow are not read.
#[test]
fn pages_keep_their_size() {
    let words = |text: &str| text.split_whitespace().count();
    let top = |file: &str| docs(&format!("../{file}"));
    let all: usize = std::fs::read_dir(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs"))
        .expect("docs")
        .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
        .filter(|name| name.ends_with(".md") && name != "hooks.md")
        .map(|name| words(&docs(&name)))
        .sum();
    let pages = [
        ("limits.md", words(&docs("limits.md")), 1500),
        ("performance.md", words(&docs("performance.md")), 1200),
        ("README.md", words(&top("README.md")), 900),
        ("ARCHITECTURE.md", words(&top("ARCHITECTURE.md")), 1500),
        ("CHANGELOG.md", words(&top("CHANGELOG.md")), 600),
        ("docs, without decisions and hooks.md", all, 11000),
    ];
    for (page, words, most) in pages {
        assert!(words <= most, "{page}: {words} words, at most {most}: shorten it");
    }
}
