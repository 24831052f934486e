//! The generated pages.

use crate::families;
use crate::unhooked::{Unhooked, HARMLESS, VISIBLE};
use fsocket_abi::arena::{COUNTERS, COUNTER_HELP};
use std::fmt::Write;

/// A page: its file below `docs/`, and what is in it.
pub struct Page {
    pub file: &'static str,
    pub text: String,
}

/// All pages.
pub fn all() -> Vec<Page> {
    vec![Page { file: "hooks.md", text: hooks() }, Page { file: "fallbacks.md", text: fallbacks() }]
}

const NOTE: &str = "<!-- Written by `make docs`; a test compares. -->\n\n";

/// A cell of a table.
fn cell(s: &str) -> String {
    s.trim().replace('|', "\\|")
}

fn names(u: &Unhooked) -> String {
    u.names.iter().map(|n| format!("`{n}`")).collect::<Vec<_>>().join(", ")
}

fn hooks() -> String {
    let mut s = format!("# Hooks\n\n{NOTE}");
    let _ = writeln!(
        s,
        "`libfsocket.so` exports these {} functions and nothing else. Each asks whether the descriptor is\n\
         one of ours; if not, libc's function of that name is called with the same arguments.\n",
        crate::hooks().count()
    );
    for family in families() {
        let _ = writeln!(s, "## {family}\n\n| function | on our path |\n| --- | --- |");
        for h in crate::hooks().filter(|h| h.family == family) {
            let _ = writeln!(s, "| `{}` | {} |", h.name, cell(h.what));
        }
        s.push('\n');
    }
    let _ = writeln!(s, "# Not hooked\n");
    let _ = writeln!(s, "## Without consequences\n\n| function | why |\n| --- | --- |");
    for u in HARMLESS {
        let _ = writeln!(s, "| {} | {} |", names(u), cell(u.why));
    }
    let _ = writeln!(
        s,
        "\n## Visible to the program\n\nOn a connection over shared memory; those over the kernel are not concerned.\n\n\
         | function | what happens |\n| --- | --- |"
    );
    for u in VISIBLE {
        let _ = writeln!(s, "| {} | {} |", names(u), cell(u.why));
    }
    s
}

fn fallbacks() -> String {
    let mut s = format!("# Counters\n\n{NOTE}");
    s.push_str("What `fastsocket stat` shows per process and `fastsocket stat --json` in `totals`.\n\n");
    let mut table = |title: &str, intro: &str, fallback: bool| {
        let _ = writeln!(s, "## {title}\n\n{intro}\n\n| counter | counts |\n| --- | --- |");
        for (name, help) in COUNTERS.iter().zip(COUNTER_HELP).filter(|(n, _)| n.starts_with("fallback.") == fallback) {
            let _ = writeln!(s, "| `{name}` | {} |", cell(help.trim().trim_start_matches("Fallback: ")));
        }
        s.push('\n');
    };
    table("Reasons for the kernel", "Why a connection or a call that could have been ours was the kernel's.", true);
    table("Everything else", "What happened on our path, and how often the kernel's was taken.", false);
    s.truncate(s.trim_end().len());
    s.push('\n');
    s
}
