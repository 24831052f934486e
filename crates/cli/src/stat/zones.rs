//! `fastsocket stat --zones`: what the original's `/proc/net/fastsocket` files
//! had, by CPU.

use super::{print, table};
use crate::control;
use anyhow::Result;
use fsocket_abi::arena::zone_accept::NAMES;
use fsocket_proto::report::{Group, Report};

/// Kinds of selections, in the order shown; `select.bpf.c` says what they are.
const SELECTIONS: [&str; 7] = ["lookups", "self", "other", "beside", "to_global", "to_kernel", "migrated"];

/// Shows, and sets to zero if asked to.
///
/// # Errors
/// No monitor, or a broken one.
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
            "fallbacks": reasons,
        });
        anstream::println!("{}", serde_json::to_string_pretty(&value)?);
    } else {
        print(text(&report));
    }
    Ok(0)
}

/// Why there is no zone, or a lesser one.
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
    text += "\nWithout a zone, or a lesser one\n";
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
    format!(
        "\nWorkers of {}\n{workers}\nListen sockets selected, by CPU that handled the SYN\n{selections}\n",
        group.local
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use fsocket_proto::report::{Counters, Zone, ZoneWorker};

    #[test]
    fn a_line_for_each_cpu() {
        let report = Report {
            totals: Counters::from([("fallback.zone_shared".to_owned(), 3), ("fallback.remote".to_owned(), 9)]),
            groups: vec![Group {
                id: 1,
                local: "0.0.0.0:80".to_owned(),
                workers: vec![ZoneWorker { pid: 77, cpu: 1, place: 1 }],
                selections: [("lookups".to_owned(), vec![0, 5])].into(),
            }],
            zones: vec![Zone { cpu: 1, accepted: Counters::from([("local".to_owned(), 5)]) }],
            ..Default::default()
        };
        let text = text(&report);
        let lines: Vec<Vec<&str>> = text.lines().map(|l| l.split_whitespace().collect()).collect();
        assert!(lines.contains(&vec!["1", "5", "0", "0", "0"]), "{text}");
        assert!(lines.contains(&vec!["77", "1"]), "{text}");
        assert!(lines.contains(&vec!["1", "5", "0", "0", "0", "0", "0", "0"]), "{text}");
        assert!(lines.contains(&vec!["shared", "3"]) && !text.contains("remote\n"), "{text}");
    }
}
