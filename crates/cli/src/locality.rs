//! `fastsocket stat --locality`: measures whether packets are handled on the CPU where the application runs.

use crate::measure;
use crate::text::{print, table};
use anyhow::Result;
use fsocket_bpf::locality::{Cell, Kind, Locality};
use serde::Serialize;
use std::collections::BTreeMap;

/// Counts of packets, by whether the CPU that handled the packet is the one where the application
/// runs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Share {
    pub local: u64,
    pub remote: u64,
}

impl Share {
    fn percent(&self) -> Option<f64> {
        let all = self.local + self.remote;
        (all > 0).then(|| self.local as f64 * 100.0 / all as f64)
    }
}

#[derive(Debug, Serialize)]
struct Row {
    pid: u32,
    program: String,
    passive: Share,
    active: Share,
    /// Packets of connections that were opened before the measurement began.
    older: Share,
    /// CPU that handled the packets, CPU of the application, number of packets.
    pairs: Vec<(u16, u32, u64)>,
}

#[derive(Debug, Serialize)]
struct Report {
    seconds: f64,
    processes: Vec<Row>,
    /// Packets that no process was found for, and failures, by reason.
    unattributed: BTreeMap<&'static str, u64>,
}

/// Selects processes. Empty lists select all.
#[derive(Debug, Default)]
pub struct Filter {
    /// These processes and all their descendants.
    pub pids: Vec<u32>,
    pub names: Vec<String>,
}

/// The filter looks at most this many generations up for an ancestor.
const GENERATIONS: usize = 32;

impl Filter {
    /// `parent` returns the parent of a process, if the process still runs.
    fn takes(&self, row: &Row, parent: impl Fn(u32) -> Option<u32>) -> bool {
        let ancestors = || std::iter::successors(Some(row.pid), |pid| parent(*pid)).take(GENERATIONS);
        (self.pids.is_empty() || ancestors().any(|pid| self.pids.contains(&pid)))
            && (self.names.is_empty() || self.names.contains(&row.program))
    }
}

/// The parent according to /proc. `None`: the process has ended.
fn parent(pid: u32) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().parse().ok().filter(|pid| *pid != 0)
}

/// Measures, then prints. The filter is applied at the end only, because processes may start and
/// end meanwhile.
pub fn run(seconds: f64, json: bool, filter: &Filter) -> Result<i32> {
    fsocket_bpf::quiet();
    let measuring = Locality::start()?;
    let seconds = measure::wait("--locality", seconds)?;
    let cells = measuring.cells()?;
    let reasons = measuring.reasons()?.iter().map(|count| (count.name, count.total())).collect();
    drop(measuring);
    let mut processes = rows(&cells);
    processes.retain(|row| filter.takes(row, parent));
    let report = Report { seconds, processes, unattributed: unattributed(reasons) };
    if json {
        anstream::println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        print(text(&report));
    }
    Ok(0)
}

/// Renames the reasons for the user. A packet can arrive before an application has used its
/// connection; the BPF program counts the packet under "waiting_packets". If the application comes
/// later, it counts the packet under "judged". Only the difference was never attributed.
fn unattributed(mut reasons: BTreeMap<&'static str, u64>) -> BTreeMap<&'static str, u64> {
    let judged = reasons.remove("judged").unwrap_or(0);
    let waited = reasons.remove("waiting_packets").unwrap_or(0);
    reasons.insert("never_used_by_an_application", waited.saturating_sub(judged));
    reasons
}

fn rows(cells: &[Cell]) -> Vec<Row> {
    let mut rows: BTreeMap<u32, Row> = BTreeMap::new();
    for cell in cells {
        let row = rows.entry(cell.tgid).or_insert_with(|| Row {
            pid: cell.tgid,
            program: cell.comm.clone(),
            passive: Share::default(),
            active: Share::default(),
            older: Share::default(),
            pairs: Vec::new(),
        });
        let share = match cell.kind {
            Kind::Passive => &mut row.passive,
            Kind::Active => &mut row.active,
            Kind::Older => &mut row.older,
        };
        *(if cell.is_local() { &mut share.local } else { &mut share.remote }) += cell.packets;
        match row.pairs.iter_mut().find(|(handled, app, _)| (*handled, *app) == (cell.handled, cell.app)) {
            Some((.., packets)) => *packets += cell.packets,
            None => row.pairs.push((cell.handled, cell.app, cell.packets)),
        }
    }
    rows.into_values().collect()
}

fn text(report: &Report) -> String {
    if report.processes.is_empty() {
        return "no packet of an established TCP connection".to_owned();
    }
    let header = ["PID", "PROGRAM", "PASSIVE", "PACKETS", "ACTIVE", "PACKETS", "OLDER", "PACKETS"];
    let mut shares = table(&header, &[0, 2, 3, 4, 5, 6, 7]);
    for row in &report.processes {
        let mut fields = vec![row.pid.to_string(), row.program.clone()];
        for share in [&row.passive, &row.active, &row.older] {
            // The share is rounded down, so that 100 % means every single packet.
            let percent = share.percent().map_or("-".to_owned(), |p| format!("{:.1} %", (p * 10.0).floor() / 10.0));
            fields.extend([percent, (share.local + share.remote).to_string()]);
        }
        shares.add_row(fields);
    }
    let mut text = format!(
        "Packets of established connections that were handled on the CPU where the application used the connection\n\n{shares}"
    );
    let unknown: Vec<String> =
        report.unattributed.iter().filter(|(_, n)| **n > 0).map(|(name, n)| format!("{name} {n}")).collect();
    if !unknown.is_empty() {
        text += &format!("\n\nnot attributed: {}", unknown.join(", "));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(kind: Kind, handled: u16, app: u32, packets: u64) -> Cell {
        Cell { tgid: 7, comm: "nginx".to_owned(), kind, handled, app, packets }
    }

    #[test]
    fn hundred_percent_is_every_packet() {
        let report =
            |cells: &[Cell]| text(&Report { seconds: 1.0, processes: rows(cells), unattributed: BTreeMap::new() });
        let all = report(&[cell(Kind::Passive, 0, 0, 99_999), cell(Kind::Passive, 1, 1, 100_000)]);
        assert!(all.contains("100.0 %") && all.contains("nginx") && all.contains("199999"), "{all}");
        let nearly = report(&[cell(Kind::Passive, 0, 0, 99_999), cell(Kind::Passive, 1, 0, 1)]);
        assert!(nearly.contains("99.9 %"), "{nearly}");
        assert!(report(&[]).contains("no packet"));
    }

    #[test]
    fn a_filter_takes_descendants_and_names() {
        let row = rows(&[cell(Kind::Passive, 0, 0, 1)]).remove(0);
        let parent = |pid: u32| [(7, 5), (5, 1)].iter().find(|(child, _)| *child == pid).map(|(_, parent)| *parent);
        let takes = |pids: &[u32], names: &[&str]| {
            let names = names.iter().map(|n| (*n).to_owned()).collect();
            Filter { pids: pids.to_vec(), names }.takes(&row, parent)
        };
        assert!(takes(&[], &[]) && takes(&[7], &[]) && takes(&[3, 5], &[]) && takes(&[], &["x", "nginx"]));
        assert!(!takes(&[3], &[]) && !takes(&[7], &["haproxy"]) && !takes(&[], &["ngin"]));
        assert!(!Filter { pids: vec![3], names: vec![] }.takes(&row, Some), "a circle ends");
    }

    #[test]
    fn kinds_are_told_apart() {
        let rows = rows(&[cell(Kind::Passive, 0, 1, 3), cell(Kind::Active, 1, 1, 4), cell(Kind::Older, 1, 1, 5)]);
        assert_eq!((rows[0].passive.remote, rows[0].active.local, rows[0].older.local), (3, 4, 5));
        assert_eq!(rows[0].pairs, [(0, 1, 3), (1, 1, 9)]);
    }
}
