//! `fastsocket stat --zones`: shows the numbers that the original Fastsocket had in
//! `/proc/net/fastsocket`, by CPU.

use crate::text::{print, table};
use anyhow::Result;
use fsocket_abi::arena::zone_accept::NAMES;
use fsocket_client::control;
use fsocket_proto::report::{Balance, Group, Report};

/// Kinds of selections in the order of the columns; `select.bpf.c` defines their meaning.
const SELECTIONS: [&str; 7] = ["lookups", "self", "other", "beside", "to_global", "to_kernel", "migrated"];

/// Shows the counters, and sets them to zero on request.
///
/// # Errors
/// There is no monitor, or its answer is broken.
pub fn show(json: bool, reset: bool) -> Result<i32> {
    let path = control::find()?;
    let report = if reset { control::report_and_reset(&path) } else { control::report(&path) }?;
    if json {
        let reasons: serde_json::Map<String, serde_json::Value> =
            reasons(&report).map(|(n, v)| (n, v.into())).collect();
        let value = serde_json::json!({
            "version": report.version,
            "groups": report.groups,
            "zones": report.zones,
            "flow_groups": report.flow_groups,
            "fallbacks": reasons,
        });
        anstream::println!("{}", serde_json::to_string_pretty(&value)?);
    } else {
        print(text(&report));
    }
    Ok(0)
}

/// Counts of reasons why a worker got no zone, or a zone with fewer features.
fn reasons(report: &Report) -> impl Iterator<Item = (String, u64)> + '_ {
    let zone = |n: &str| n.strip_prefix("fallback.zone_").map(str::to_owned);
    report.totals.iter().filter(|(_, v)| **v > 0).filter_map(move |(n, v)| Some((zone(n)?, *v)))
}

fn text(report: &Report) -> String {
    let mut accepts = table(&["CPU", "LOCAL", "GLOBAL", "REMOTE", "STOLEN"], &[0, 1, 2, 3, 4]);
    for zone in &report.zones {
        let count = |name: &&str| zone.accepted.get(*name).copied().unwrap_or(0).to_string();
        accepts.add_row(std::iter::once(zone.cpu.to_string()).chain(NAMES.iter().map(count)));
    }
    let mut text = format!("Accepted, by zone\n{accepts}\n");
    for group in &report.groups {
        text += &of_group(group);
    }
    if !report.flow_groups.is_empty() {
        let mut groups =
            table(&["DEVICE OR LISTENER", "CPU", "FLOW GROUPS", "AWAY", "MOVED", "BACK"], &[1, 2, 3, 4, 5]);
        for f in &report.flow_groups {
            for (cpu, n) in &f.by_cpu {
                let (cpu, n) = (cpu.to_string(), n.to_string());
                let [away, moved, back] = [f.away.to_string(), f.moved.to_string(), f.returned.to_string()];
                groups.add_row([f.device.clone(), cpu, n, away, moved, back]);
            }
        }
        text += &format!("\nFlow groups\n{groups}\n");
    }
    text += "\nFallbacks of zones\n";
    let mut why = table(&["REASON", "TIMES"], &[1]);
    for (name, times) in reasons(report) {
        why.add_row([name, times.to_string()]);
    }
    text + &if why.row_count() == 0 { "never".to_owned() } else { why.to_string() }
}

fn of_group(group: &Group) -> String {
    let mut workers = table(&["PID", "CPU"], &[0, 1]);
    for w in &group.workers {
        workers.add_row([w.pid.to_string(), w.cpu.to_string()]);
    }
    let header: Vec<String> =
        std::iter::once("CPU".to_owned()).chain(SELECTIONS.iter().map(|s| s.to_uppercase())).collect();
    let header: Vec<&str> = header.iter().map(String::as_str).collect();
    let mut selections = table(&header, &[0, 1, 2, 3, 4, 5, 6, 7]);
    let cpus = group.selections.values().map(Vec::len).max().unwrap_or(0);
    for cpu in 0..cpus {
        let count = |name: &&str| group.selections.get(*name).and_then(|v| v.get(cpu)).copied().unwrap_or(0);
        let counts: Vec<u64> = SELECTIONS.iter().map(count).collect();
        if counts.iter().any(|n| *n > 0) {
            selections.add_row(std::iter::once(cpu.to_string()).chain(counts.iter().map(u64::to_string)));
        }
    }
    let balance = group.balance.as_ref().map_or(String::new(), |b| of_balance(b, group));
    format!(
        "\nWorkers of {}\n{workers}\n{balance}Listen sockets selected, by CPU that handled the SYN\n{selections}\n",
        group.local
    )
}

/// Text for the accept queues, and for how many connections each worker stole from which other
/// worker.
fn of_balance(b: &Balance, group: &Group) -> String {
    let header = ["CPU", "PID", "LENGTH", "AVERAGE", "LIMIT", "BUSY", "ADDED", "ACCEPTED"];
    let mut queues = table(&header, &[0, 1, 2, 3, 4, 6, 7]);
    for q in &b.queues {
        let pid = group.workers.iter().find(|w| w.place == q.place).map_or(0, |w| w.pid);
        queues.add_row([
            q.cpu.to_string(),
            pid.to_string(),
            q.length.to_string(),
            format!("{:.1}", q.average),
            b.limit.to_string(),
            if q.busy { "busy" } else { "" }.to_owned(),
            q.added.to_string(),
            q.taken.to_string(),
        ]);
    }
    let mut text = format!("Accept queues\n{queues}\n");
    if !b.steals.is_empty() {
        let cpu = |place: u32| {
            b.queues.iter().find(|q| q.place == place).map_or_else(|| "gone".to_owned(), |q| q.cpu.to_string())
        };
        let mut steals = table(&["BY CPU", "FROM CPU", "CONNECTIONS"], &[0, 1, 2]);
        for s in &b.steals {
            steals.add_row([cpu(s.thief), cpu(s.victim), s.connections.to_string()]);
        }
        text += &format!("Stolen\n{steals}\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use fsocket_proto::report::{Counters, Queue, Steals, Zone, ZoneWorker};

    #[test]
    fn a_line_for_each_cpu() {
        let report = Report {
            totals: Counters::from([("fallback.zone_shared".to_owned(), 3), ("fallback.remote".to_owned(), 9)]),
            groups: vec![Group {
                id: 1,
                local: "0.0.0.0:80".to_owned(),
                workers: vec![ZoneWorker { pid: 77, cpu: 1, place: 1 }],
                balance: Some(Balance {
                    limit: 64,
                    queues: vec![Queue {
                        place: 1,
                        cpu: 1,
                        length: 50,
                        average: 7.25,
                        busy: true,
                        ..Default::default()
                    }],
                    steals: vec![Steals { thief: 2, victim: 1, connections: 9 }],
                }),
                selections: [("lookups".to_owned(), vec![0, 5])].into(),
            }],
            zones: vec![Zone { cpu: 1, accepted: Counters::from([("local".to_owned(), 5)]) }],
            ..Default::default()
        };
        let text = text(&report);
        let lines: Vec<Vec<&str>> = text.lines().map(|l| l.split_whitespace().collect()).collect();
        assert!(lines.contains(&vec!["1", "5", "0", "0", "0"]), "{text}");
        assert!(lines.contains(&vec!["77", "1"]), "{text}");
        assert!(lines.contains(&vec!["1", "77", "50", "7.2", "64", "busy", "0", "0"]), "{text}");
        assert!(lines.contains(&vec!["gone", "1", "9"]), "{text}");
        assert!(lines.contains(&vec!["1", "5", "0", "0", "0", "0", "0", "0"]), "{text}");
        assert!(lines.contains(&vec!["shared", "3"]) && !text.contains("remote\n"), "{text}");
    }
}
