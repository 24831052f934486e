//! The text output of `top`: one block for each look, for pipes.

use super::open::Open;
use super::options::Top;
use super::source::{Source, FIRST};
use super::view::{ProcessRow, View};
use crate::text::{print, table};
use anyhow::Result;
use std::time::Duration;

pub fn run(args: &Top, mut source: Source) -> Result<i32> {
    let delay = Duration::from_secs_f64(args.delay);
    let mut wait = FIRST.min(delay);
    let mut left = args.count;
    while left != Some(0) {
        std::thread::sleep(wait);
        match source.look() {
            Ok(mut view) => {
                view.arrange(args.sort, args.reverse, &args.filter);
                print(text(&view) + "\n\n");
            }
            Err(e) => print(e),
        }
        left = left.map(|n| n - 1);
        wait = delay;
    }
    Ok(0)
}

/// A short number such as `12`, `3.4k` or `5.6M`.
pub fn short(value: f64) -> String {
    let mut value = value;
    for unit in ["", "k", "M", "G"] {
        if value < 999.5 {
            return match unit {
                "" if value.fract() < 0.05 || value >= 9.95 => format!("{value:.0}"),
                _ if value < 9.95 => format!("{value:.1}{unit}"),
                _ => format!("{value:.0}{unit}"),
            };
        }
        value /= 1000.0;
    }
    format!("{value:.0}T")
}

pub fn percent(share: Option<f64>) -> String {
    share.map_or_else(|| "-".into(), |share| format!("{:.1}%", share * 100.0))
}

/// The line above the tables.
pub fn headline(view: &View) -> String {
    format!(
        "monitor {} up {:.0} s; open: {}; new: {}/s and {}/s, so far {} shared memory; {} B resident in {} channels",
        view.monitor_pid,
        view.uptime,
        paths(&view.open),
        short(view.all.shm),
        short(view.all.kernel),
        percent(view.share_so_far),
        short(view.resident as f64),
        view.channels,
    )
}

/// How many connections are open on each path, and their share.
pub fn paths(open: &Open) -> String {
    let all = (open.shm + open.rdma + open.kernel) as f64;
    if all == 0.0 {
        return "no connection".into();
    }
    let part = |n: u64, path: &str| format!("{n} {path} ({:.1}%)", n as f64 / all * 100.0);
    let rdma = (open.rdma > 0).then(|| part(open.rdma, "RDMA"));
    let always = [Some(part(open.shm, "shared memory")), rdma, Some(part(open.kernel, "kernel TCP"))];
    always.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

/// Column titles. SHM, KERNEL and SHARE (the share of shared memory) count open connections.
pub const PROCESSES: [&str; 10] =
    ["PID", "PROGRAM", "SHM", "KERNEL", "SHARE", "SHM/s", "KERNEL/s", "SENT B/s", "RECV B/s", "FALLBACKS/s"];
pub const LISTENERS: [&str; 5] = ["LISTENER", "PROGRAM", "NEW/s", "OPEN", "QUEUED"];
pub const REASONS: [&str; 3] = ["REASON", "TIMES/s", "SO FAR"];
pub const ZONES: [&str; 5] = ["CPU", "LOCAL/s", "GLOBAL/s", "REMOTE/s", "STOLEN/s"];

/// The cells of each table, row by row.
pub struct Cells {
    pub processes: Vec<[String; 10]>,
    pub listeners: Vec<[String; 5]>,
    pub reasons: Vec<[String; 3]>,
    pub zones: Vec<[String; 5]>,
}

pub fn cells(view: &View) -> Cells {
    let process = |p: &ProcessRow| {
        let [shm, kernel] = [p.open.shm + p.open.rdma, p.open.kernel].map(|n| n.to_string());
        let r = &p.rates;
        let [new_shm, new_kernel, sent, received, fallbacks] =
            [r.shm, r.kernel, r.sent, r.received, r.fallbacks].map(short);
        let share = percent(p.open.share());
        [p.pid.to_string(), p.name.clone(), shm, kernel, share, new_shm, new_kernel, sent, received, fallbacks]
    };
    Cells {
        processes: view.processes.iter().map(process).collect(),
        listeners: view
            .listeners
            .iter()
            .map(|l| [l.local.clone(), l.programs.clone(), short(l.opened), l.open.to_string(), l.queued.to_string()])
            .collect(),
        reasons: view.reasons.iter().map(|r| [r.reason.clone(), short(r.rate), r.total.to_string()]).collect(),
        zones: view
            .zones
            .iter()
            .map(|z| {
                let from = |name| short(z.accepted.get(name).copied().unwrap_or(0.0));
                [z.cpu.to_string(), from("local"), from("global"), from("remote"), from("stolen")]
            })
            .collect(),
    }
}

fn text(view: &View) -> String {
    let cells = cells(view);
    let mut parts = vec![headline(view)];
    let mut add = |header: &[&str], right: &[usize], rows: Vec<&[String]>| {
        if rows.is_empty() {
            return;
        }
        let mut table = table(header, right);
        for row in rows {
            table.add_row(row);
        }
        parts.push(table.to_string());
    };
    add(&PROCESSES, &[0, 2, 3, 4, 5, 6, 7, 8, 9], cells.processes.iter().map(|r| &r[..]).collect());
    add(&LISTENERS, &[2, 3, 4], cells.listeners.iter().map(|r| &r[..]).collect());
    add(&REASONS, &[1, 2], cells.reasons.iter().map(|r| &r[..]).collect());
    add(&ZONES, &[0, 1, 2, 3, 4], cells.zones.iter().map(|r| &r[..]).collect());
    parts.join("\n\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::view::tests::view;

    #[test]
    fn numbers() {
        for (value, text) in [
            (0.0, "0"),
            (0.5, "0.5"),
            (3.0, "3"),
            (9.96, "10"),
            (999.4, "999"),
            (999.6, "1.0k"),
            (1234.0, "1.2k"),
            (45_600.0, "46k"),
            (7.89e9, "7.9G"),
            (5e12, "5T"),
            (5e15, "5000T"),
        ] {
            assert_eq!(short(value), text, "{value}");
        }
        assert_eq!((percent(None), percent(Some(0.995))), ("-".into(), "99.5%".into()));
    }

    #[test]
    fn paths_that_nobody_uses_are_not_named() {
        assert_eq!(paths(&Open::default()), "no connection");
        let some = paths(&Open { shm: 1, rdma: 2, kernel: 1 });
        assert_eq!(some, "1 shared memory (25.0%), 2 RDMA (50.0%), 1 kernel TCP (25.0%)");
    }

    #[test]
    fn everything_is_shown() {
        let text = text(&view());
        let open =
            "open: 5 shared memory (25.0%), 15 kernel TCP (75.0%); new: 45/s and 5/s, so far 90.0% shared memory";
        for part in ["monitor 7", open, "nginx", "127.0.0.1:80", "remote", "LOCAL/s"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
