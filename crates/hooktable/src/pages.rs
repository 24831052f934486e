//! The generated pages.

use crate::families;
use crate::hook::{AfterSignal, Asleep};
use crate::limits::limits as all_limits;
use crate::unhooked::{HARMLESS, VISIBLE};
use fsocket_abi::arena::{COUNTERS, COUNTER_CASES, COUNTER_HELP};
use std::fmt::Write;

/// A page: its file below `docs/`, and what is in it.
pub struct Page {
    pub file: &'static str,
    pub text: String,
}

/// All pages.
pub fn all() -> Vec<Page> {
    vec![
        Page { file: "hooks.md", text: hooks() },
        Page { file: "fallbacks.md", text: fallbacks() },
        Page { file: "limits.md", text: limits() },
    ]
}

const NOTE: &str = "<!-- Written by `make docs`; a test compares. -->\n\n";

/// A cell of a table.
fn cell(s: &str) -> String {
    s.trim().replace('|', "\\|")
}

fn names(all: &[impl AsRef<str>]) -> String {
    all.iter().map(|n| format!("`{}`", n.as_ref())).collect::<Vec<_>>().join(", ")
}

/// Columns of prose.
const WIDTH: usize = 100;

/// An entry of a list, broken at spaces.
fn entry(s: &mut String, text: &str) {
    let mut column = 1;
    s.push('-');
    for word in text.split_whitespace() {
        if column + 1 + word.chars().count() > WIDTH {
            s.push_str("\n ");
            column = 1;
        }
        let _ = write!(s, " {word}");
        column += 1 + word.chars().count();
    }
    s.push('\n');
}

/// The last column of a hook.
fn properties(h: &crate::Hook) -> String {
    let Some(p) = h.properties else { return String::new() };
    let signal = match p.after_signal {
        AfterSignal::NoSleep => None,
        AfterSignal::GoesOn => Some("restarts"),
        AfterSignal::Fails => Some("EINTR"),
    };
    let all = [p.point.then_some("cancelled"), signal, (p.asleep == Asleep::Wakes).then_some("begins")];
    all.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

fn hooks() -> String {
    let mut s = format!("# Hooks\n\n{NOTE}");
    let _ = writeln!(
        s,
        "`libfsocket.so` exports these {} functions and nothing else. Each asks whether the descriptor is\n\
         one of ours; if not, libc's function of that name is called with the same arguments.\n\n\
         *Cancelled*: a cancellation point, as in glibc. *Restarts*: with `SA_RESTART` a call that sleeps goes on after a\n\
         signal, unless the socket has a time-out; *EINTR*: it fails in any case. *Begins*: the library begins at the first\n\
         such call of a program (ADR 62).\n",
        crate::hooks().count()
    );
    for family in families() {
        let _ = writeln!(s, "## {family}\n\n| function | on our path | |\n| --- | --- | --- |");
        for h in crate::hooks().filter(|h| h.family == family) {
            let _ = writeln!(s, "| `{}` | {} | {} |", h.name, cell(h.what), properties(h));
        }
        s.push('\n');
        // A limit stands with the first of its functions.
        let mine = |name: &str| crate::hooks().any(|h| h.family == family && h.name == name);
        let mut any = false;
        for l in all_limits().hook.iter().filter(|l| mine(&l.of[0])) {
            entry(&mut s, &format!("{}: {}", names(&l.of), l.what));
            any = true;
        }
        if any {
            s.push('\n');
        }
    }
    let _ = writeln!(s, "# Not hooked\n");
    let _ = writeln!(s, "## Without consequences\n\n| function | why |\n| --- | --- |");
    for u in HARMLESS {
        let _ = writeln!(s, "| {} | {} |", names(u.names), cell(u.why));
    }
    let _ = writeln!(
        s,
        "\n## Visible to the program\n\nOn a connection over shared memory; those over the kernel are not concerned.\n\n\
         | function | what happens |\n| --- | --- |"
    );
    for u in VISIBLE {
        let _ = writeln!(s, "| {} | {} |", names(u.names), cell(u.why));
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

fn limits() -> String {
    let all = all_limits();
    let mut s = format!("# Limits\n\n{NOTE}## What you will notice\n\n");
    s.push_str("| what you notice | why | what to do |\n| --- | --- | --- |\n");
    for n in &all.notice {
        let _ = writeln!(s, "| {} | {} | {} |", cell(&n.what), cell(&n.why), cell(&n.remedy));
    }
    s.push_str(
        "\n## Why the kernel is used\n\n\
         The program does not notice in any of these cases, except by the clock; the counter in `fastsocket stat`\n\
         says so.\n\n",
    );
    let apart = |name: &str| all.section.iter().any(|x| x.counters.iter().any(|c| name.starts_with(c)));
    cases(&mut s, |name| !apart(name));
    s.push_str("# Appendix: details\n\n");
    for section in &all.section {
        let _ = writeln!(s, "## {}\n", section.name);
        cases(&mut s, |name| section.counters.iter().any(|c| name.starts_with(c)));
        for what in &section.limits {
            entry(&mut s, what);
        }
        for l in all.hook.iter().filter(|l| l.section == section.name) {
            entry(&mut s, &l.what);
        }
        s.push('\n');
    }
    s.truncate(s.trim_end().len());
    s.push('\n');
    s
}

/// A table of the cases in which counters grow; nothing if there are none.
fn cases(s: &mut String, of: impl Fn(&str) -> bool) {
    let all = COUNTERS.iter().zip(COUNTER_CASES).filter(|(name, case)| of(name) && !case.is_empty());
    let rows: String = all.map(|(name, case)| format!("| {} | `{name}` |\n", cell(case))).collect();
    if !rows.is_empty() {
        let _ = writeln!(s, "| case | counter |\n| --- | --- |\n{rows}");
    }
}
