//! Sentences that a stranger can read: `tools/prose.py` counts those that he may stumble over.

use std::path::PathBuf;
use std::process::Command;

/// Sentences of a thousand that may be flagged: everywhere, and in the pages.
const ALL: u32 = 20;
const PAGES: u32 = 10;

/// Flagged sentences and all, by folder or page; the last one is the sum.
fn counts() -> Vec<(String, u32, u32)> {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
    let out = Command::new("python3").args(["tools/prose.py", "--count"]).current_dir(root).output().expect("python3");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let text = String::from_utf8(out.stdout).expect("text");
    let row = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [flagged, "of", all, _, "%", name] = words[..] else { panic!("{line}") };
        (name.to_owned(), flagged.parse().expect("a count"), all.parse().expect("a count"))
    };
    text.lines().map(row).collect()
}

#[test]
fn few_sentences_are_hard_to_read() {
    let counts = counts();
    let sum = |which: &dyn Fn(&str) -> bool| {
        let rows = counts.iter().filter(|(name, ..)| which(name));
        rows.fold((0, 0), |(flagged, all), row| (flagged + row.1, all + row.2))
    };
    let (flagged, all) = sum(&|name| name == "all");
    assert!(
        all > 10_000 && flagged * 1000 <= all * ALL,
        "{flagged} of {all} sentences; `tools/prose.py --change main` shows them"
    );
    let (flagged, all) = sum(&|name| name.starts_with("docs/") || name.ends_with(".md"));
    assert!(
        all > 500 && flagged * 1000 <= all * PAGES,
        "{flagged} of {all} sentences of the pages: `tools/prose.py README.md docs/*.md`"
    );
}
