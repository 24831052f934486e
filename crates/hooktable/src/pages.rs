//! The generated pages.

use crate::families;
use crate::hook::{AfterSignal, Asleep};
use crate::limits::limits as all_limits;
use crate::unhooked::{HARMLESS, VISIBLE};
use fsocket_abi::arena::{COUNTERS, COUNTER_CASES, COUNTER_HELP};
use std::fmt::Write;

/// A page: its file below `docs/`, and its text.
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

/// Text of a table cell, with vertical bars escaped.
fn cell(s: &str) -> String {
    s.trim().replace('|', "\\|")
}

fn names(all: &[impl AsRef<str>]) -> String {
    all.iter().map(|n| format!("`{}`", n.as_ref())).collect::<Vec<_>>().join(", ")
}

/// Maximum width of prose, in columns.
const WIDTH: usize = 100;

/// Appends an entry of a list, with line breaks at spaces.
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

/// Text of the last column of a hook.
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
        "`libfsocket.so` exports these {} functions and nothing else. Each calls libc's function of that name, with the\n\
         same arguments, unless the descriptor belongs to the library. Below each table are the differences to the kernel.\n\n\
         *Cancelled*: a cancellation point, as in glibc. *Restarts*: with `SA_RESTART` a call that sleeps goes on after a\n\
         signal, unless the socket has a time-out; *EINTR*: it fails in any case. *Begins*: the library begins at the first\n\
         such call of a program (ADR 62).\n",
        crate::hooks().count()
    );
    for family in families() {
        let _ = writeln!(s, "## {family}\n\n| function | what it does | |\n| --- | --- | --- |");
        for h in crate::hooks().filter(|h| h.family == family) {
            let _ = writeln!(s, "| `{}` | {} | {} |", h.name, cell(h.what), properties(h));
        }
        s.push('\n');
        // A limit is listed in the family of its first function.
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
        "\n## Visible to the program\n\nThis concerns connections over shared memory only.\n\n\
         | function | what happens |\n| --- | --- |"
    );
    for u in VISIBLE {
        let _ = writeln!(s, "| {} | {} |", names(u.names), cell(u.why));
    }
    s
}

fn fallbacks() -> String {
    let mut s = format!("# Counters\n\n{NOTE}");
    s.push_str(
        "`fastsocket stat` shows these counters for each process, `fastsocket stat --json` also in `totals`.\n\n",
    );
    let mut table = |title: &str, intro: &str, fallback: bool| {
        let _ = writeln!(s, "## {title}\n\n{intro}\n");
        let all = COUNTERS.iter().zip(COUNTER_HELP.iter().zip(COUNTER_CASES));
        for (name, (help, case)) in all.filter(|(name, _)| name.starts_with("fallback.") == fallback) {
            entry(&mut s, &format!("`{name}`: {}", if case.is_empty() { help } else { case }));
        }
        s.push('\n');
    };
    table(
        "Reasons for the kernel",
        "Why a connection or a zone used the kernel although the library was loaded.",
        true,
    );
    table("Everything else", "Events over shared memory and zones, and connections over kernel TCP.", false);
    s.truncate(s.trim_end().len());
    s.push('\n');
    s
}

fn limits() -> String {
    let mut s = format!("# Limits\n\n{NOTE}");
    s.push_str(
        "This page lists the differences to kernel sockets that users notice. Each entry says what you notice, why, and,\n\
         after an arrow, what you can do. [Hooks](hooks.md) has the differences of single functions, [counters](fallbacks.md)\n\
         every reason for kernel TCP, [performance](performance.md) the figures.\n\n",
    );
    for section in &all_limits().section {
        let _ = writeln!(s, "## {}\n", section.name);
        for n in &section.notice {
            let remedy = n.remedy.as_ref().map_or(String::new(), |r| format!(" → {}", r.trim()));
            entry(&mut s, &format!("**{}**. {}{remedy}", n.what.trim().trim_end_matches('.'), n.why.trim()));
        }
        s.push('\n');
    }
    s.truncate(s.trim_end().len());
    s.push('\n');
    s
}
