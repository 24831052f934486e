//! Files and tests that the pages name exist.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Folders at the top whose files the pages name.
const FOLDERS: &[&str] = &["bench", "crates", "demo", "docs", "fuzz", "packaging", "scripts", "tests"];

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn files(dir: &Path, extension: &str, out: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() && path.file_name().is_some_and(|n| n != "target") {
            files(&path, extension, out);
        } else if path.extension().is_some_and(|e| e == extension) {
            out.push(path);
        }
    }
}

/// Texts between backticks, without indented code.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter(|l| !l.starts_with("    ")).flat_map(|l| l.split('`').skip(1).step_by(2))
}

/// Targets of links that are not there.
fn missing_links(page: &Path, text: &str) -> Vec<String> {
    let from = page.parent().expect("a folder");
    let links = text.split("](").skip(1).filter_map(|rest| rest.split([')', '#']).next());
    let missing = links.filter(|to| !to.is_empty() && !to.contains("://") && !from.join(to).exists());
    missing.map(|to| format!("{}: {to}", page.display())).collect()
}

/// Files that a page names and that are not there: paths from the top, `shm/x.rs` for `crates/shm/src/x.rs`,
/// and targets of links.
fn missing(page: &Path, text: &str) -> Vec<String> {
    let paths = quoted(text).filter(|path| {
        let plain = path.chars().all(|c| c.is_ascii_alphanumeric() || "_./-".contains(c));
        let Some((first, rest)) = path.split_once('/').filter(|_| plain) else { return false };
        match (FOLDERS.contains(&first), rest.ends_with(".rs")) {
            // (What a build or a benchmark makes.)
            (true, _) => !root().join(path).exists() && !path.starts_with("bench/out"),
            (false, true) => !root().join("crates").join(first).join("src").join(rest).exists(),
            (false, false) => false,
        }
    });
    let paths = paths.map(|what| format!("{}: {what}", page.display()));
    missing_links(page, text).into_iter().chain(paths).collect()
}

/// The decisions, without their index.
fn decisions() -> Vec<PathBuf> {
    let mut pages = Vec::new();
    files(&root().join("docs/adr"), "md", &mut pages);
    pages.retain(|page| !page.ends_with("README.md"));
    pages
}

/// Pages that say how things are now. (Decisions name the files of their time.)
fn pages() -> Vec<PathBuf> {
    let mut pages = Vec::new();
    files(&root().join("docs"), "md", &mut pages);
    pages.retain(|page| !page.components().any(|part| part.as_os_str() == "adr"));
    let top = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md"];
    let below = ["bench/README.md", "demo/README.md", "tests/README.md", "packaging/RELEASE.md"];
    pages.extend(top.iter().chain(&below).map(|page| root().join(page)));
    pages
}

#[test]
fn files_that_pages_name_exist() {
    let gone: Vec<_> = pages().iter().flat_map(|page| missing(page, &read(page))).collect();
    assert!(gone.is_empty(), "{gone:#?}");
}

/// Source files that each entry of `docs/where.md` names: the first two columns of a row, or an item.
fn changes(text: &str) -> Vec<(String, usize)> {
    let rows =
        text.lines().filter_map(|l| l.strip_prefix("| ")).filter_map(|row| row.rsplit_once(" | ")).map(|(row, _)| row);
    let items = text.split("\n- ").skip(1).map(|item| item.split("\n\n").next().unwrap_or(item));
    let sources = |entry: &str| quoted(entry).filter(|path| path.starts_with("crates/") && path.contains('.')).count();
    let name = |entry: &str| entry.split(['|', '.']).next().unwrap_or(entry).to_owned();
    rows.chain(items).map(|entry| (name(entry), sources(entry))).filter(|(_, n)| *n > 0).collect()
}

#[test]
fn a_change_needs_three_files_at_most() {
    let all = changes(&read(&root().join("docs/where.md")));
    assert!(all.len() >= 14, "{all:#?}");
    let many: Vec<_> = all.into_iter().filter(|(_, n)| *n > 3).collect();
    assert!(many.is_empty(), "the code needs another cut: {many:#?}");
    let text =
        "| a | `crates/a/src/b.rs` | t |\n\n- **B.** `crates/a/x.rs`, `crates/b/`,\n  `crates/c/y.toml`\n- **C**";
    assert_eq!(changes(text), [("a ".to_owned(), 1), ("**B".to_owned(), 2)]);
}

/// The index lists each decision once, with its title, and nothing else.
#[test]
fn the_index_of_decisions_is_complete() {
    let entries = decisions().into_iter().map(|page| {
        let text = read(&page);
        let title = text.lines().next().and_then(|l| l.strip_prefix("# ")).expect("a title");
        let name = page.file_name().expect("a name").to_string_lossy().into_owned();
        format!("[{}]({name})", title.replacen(". ", ": ", 1))
    });
    let index = read(&root().join("docs/adr/README.md"));
    let lines: Vec<_> = index.lines().filter_map(|l| l.strip_prefix("- ")).collect();
    let listed: BTreeSet<_> = lines.iter().filter_map(|l| Some(format!("{})", l.split_once(')')?.0))).collect();
    assert_eq!(listed, entries.collect(), "docs/adr/README.md and the files beside it");
    assert_eq!(listed.len(), lines.len(), "a decision is listed twice");
}

/// Targets of `make`, and scripts, that commands name and that are not there.
fn missing_commands(makefile: &str, text: &str) -> Vec<String> {
    let missing = |command: &str| {
        let mut words = command.split_whitespace().skip_while(|w| *w == "sudo" || w.contains('='));
        match words.next() {
            Some("make") => {
                let targets = words.take_while(|w| *w != "#" && !w.contains('='));
                targets.filter(|t| !makefile.contains(&format!("\n{t}:"))).map(str::to_owned).collect()
            }
            Some(script) if FOLDERS.iter().any(|f| script.starts_with(&format!("{f}/"))) && !script.contains('*') => {
                Some(script.to_owned()).filter(|s| !root().join(s).exists()).into_iter().collect()
            }
            _ => Vec::new(),
        }
    };
    let commands = text.lines().filter_map(|l| l.strip_prefix("    ")).chain(quoted(text));
    commands.flat_map(|l| l.split(" && ")).flat_map(missing).collect()
}

#[test]
fn commands_that_pages_name_exist() {
    let makefile = read(&root().join("Makefile"));
    let missing = |page: &PathBuf| (page.clone(), missing_commands(&makefile, &read(page)));
    let gone: Vec<_> = pages().iter().map(missing).filter(|(_, gone)| !gone.is_empty()).collect();
    assert!(gone.is_empty(), "{gone:#?}");
    let bad = "`make tests`\n    sudo make instal\n    K=1 packaging/none.sh v1\n    make && make page # make it\n";
    assert_eq!(missing_commands(&makefile, bad), ["instal", "packaging/none.sh", "page", "tests"]);
    assert_eq!(missing_commands(&makefile, "    make e2e T=redis::bgsave\n    make test-all\n"), [""; 0]);
}

/// A decision says its reasons in one page, and all of them together can be read in an hour.
#[test]
fn a_decision_is_one_page() {
    const SECTIONS: [&str; 4] = ["## Context", "## Choice", "## Rejected", "## Consequences"];
    let words = |text: &str| text.split_whitespace().count();
    let mut all = words(&read(&root().join("docs/adr/README.md")));
    for page in decisions() {
        let text = read(&page);
        let sections: Vec<_> = text.lines().filter(|l| l.starts_with("## ")).collect();
        assert_eq!(sections, SECTIONS, "{}", page.display());
        assert!(words(&text) <= 400, "{}: {} words, at most 400", page.display(), words(&text));
        all += words(&text);
    }
    assert!(all <= 15_000, "docs/adr: {all} words, at most 15,000: shorten them");
}

#[test]
fn links_of_decisions_exist() {
    let gone: Vec<_> = decisions().iter().flat_map(|page| missing_links(page, &read(page))).collect();
    assert!(gone.is_empty(), "{gone:#?}");
}

/// Tests in the last column of the promises' tables that no file has.
fn unknown<'a>(security: &'a str, tests: &BTreeSet<String>) -> Vec<&'a str> {
    let promises = security.split("## Promises").nth(1).and_then(|t| t.split("\n## ").next()).expect("promises");
    let rows = promises.lines().filter_map(|l| l.strip_suffix(" |")?.rsplit(" | ").next());
    let names = rows.flat_map(quoted).filter(|n| n.matches('_').count() > 1 && !n.contains(['/', ':']));
    names.filter(|n| !tests.contains(*n)).collect()
}

#[test]
fn tests_that_security_names_exist() {
    let mut sources = Vec::new();
    ["crates", "tests"].iter().for_each(|dir| files(&root().join(dir), "rs", &mut sources));
    let mut tests = BTreeSet::new();
    for source in &sources {
        let text = read(source);
        let names = text.split("#[test]").skip(1).filter_map(|t| t.split("fn ").nth(1)?.split('(').next());
        tests.extend(names.map(str::to_owned));
    }
    let security = read(&root().join("SECURITY.md"));
    assert_eq!(unknown(&security, &tests), [""; 0]);
    // The test finds the names that it looks for.
    let all = unknown(&security, &BTreeSet::new()).len();
    assert!(all > 30, "{all} names");
}

/// The test of files finds a missing file.
#[test]
fn a_missing_file_is_seen() {
    let page = root().join("README.md");
    let bad = "`crates/listeners/src/nowhere.rs` `listeners/nowhere.rs` [x](docs/nowhere.md)\n";
    assert_eq!(missing(&page, bad).len(), 3);
    let good = "`crates/listeners/src/route.rs` `listeners/route.rs` [x](docs/limits.md#zones) `sync/token.rs` `a/b`\n";
    assert_eq!(missing(&page, good), [""; 0]);
}
