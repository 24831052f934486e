//! `fastsocket stat` and `fastsocket ss`: what the monitor knows.

mod timeline;
mod zones;

use crate::cmdline::{Ss, Stat};
use crate::control;
use crate::locality::Filter;
use crate::text::{print, table};
use anyhow::Result;
use fsocket_abi::arena::COUNTERS;
use fsocket_proto::report::{Counters, Report};
use std::collections::BTreeMap;

/// Prefix of the counters that say why the kernel was used.
const FALLBACK: &str = "fallback.";

fn report() -> Result<Report> {
    control::report(&control::find()?)
}

/// `fastsocket stat`.
pub fn stat(args: &Stat) -> Result<i32> {
    if let Some(file) = &args.timeline {
        return timeline::record(file, args.seconds);
    }
    if args.zones {
        return zones::show(args.json, args.reset);
    }
    if let Some(seconds) = args.locality {
        return crate::locality::run(seconds, args.json, &Filter { pids: args.pid.clone(), names: args.comm.clone() });
    }
    if let Some(seconds) = args.locks {
        return crate::locks::run(seconds, args.json);
    }
    let report = report()?;
    if args.json {
        let value = serde_json::json!({
            "version": report.version,
            "monitor_pid": report.monitor_pid,
            "uptime": report.uptime,
            "totals": report.totals,
            "processes": report.processes,
        });
        anstream::println!("{}", serde_json::to_string_pretty(&value)?);
        return Ok(0);
    }
    print(stat_text(&report, args.all));
    Ok(0)
}

fn stat_text(report: &Report, all: bool) -> String {
    let wanted = |v: u64| all || v > 0;
    let mut text = format!(
        "monitor {} up {:.0} s: {} processes, {} listeners, {} connections, {} channels\n\nTotals\n",
        report.monitor_pid,
        report.uptime,
        report.processes.len(),
        report.listeners.len(),
        report.connections.len(),
        report.channels.len()
    );
    let mut totals = table(&["COUNTER", "VALUE"], &[1]);
    for (name, value) in in_order(&report.totals).filter(|(n, v)| !n.starts_with(FALLBACK) && wanted(*v)) {
        totals.add_row([name.to_owned(), value.to_string()]);
    }
    text += &format!("{totals}\n\nProcesses\n");
    let header = [
        "PID",
        "PROGRAM",
        "CONNECT SHM",
        "CONNECT KERNEL",
        "ACCEPT SHM",
        "ACCEPT KERNEL",
        "SENT",
        "RECEIVED",
        "FALLBACKS",
    ];
    let mut processes = table(&header, &[0, 2, 3, 4, 5, 6, 7, 8]);
    for process in &report.processes {
        let counter = |name: &str| process.counters.get(name).copied().unwrap_or(0);
        let fallbacks: u64 = process.counters.iter().filter(|(n, _)| n.starts_with(FALLBACK)).map(|(_, v)| v).sum();
        let mut row = vec![process.pid.to_string(), process.comm.clone()];
        let names = ["connect_shm", "connect_kernel", "accept_shm", "accept_kernel", "tx_bytes", "rx_bytes"];
        row.extend(names.map(|name| counter(name).to_string()));
        row.push(fallbacks.to_string());
        processes.add_row(row);
    }
    text += &format!("{processes}\n\nWhy the kernel was used\n");
    let mut reasons = table(&["REASON", "TIMES"], &[1]);
    for (name, value) in in_order(&report.totals) {
        if let (Some(reason), true) = (name.strip_prefix(FALLBACK), wanted(value)) {
            reasons.add_row([reason.to_owned(), value.to_string()]);
        }
    }
    text + &if reasons.row_count() == 0 { "No fallbacks recorded".to_owned() } else { reasons.to_string() }
}

/// Counters in the order of the table in the code, then those we do not know.
fn in_order(counters: &Counters) -> impl Iterator<Item = (&str, u64)> {
    let known = COUNTERS.iter().map(|name| (*name, counters.get(*name).copied().unwrap_or(0)));
    let unknown = counters.iter().filter(|(n, _)| !COUNTERS.contains(&n.as_str())).map(|(n, v)| (n.as_str(), *v));
    known.chain(unknown)
}

/// `fastsocket ss`.
pub fn ss(args: &Ss) -> Result<i32> {
    let report = report()?;
    if args.json {
        let value = serde_json::json!({
            "version": report.version,
            "listeners": report.listeners,
            "connections": report.connections,
            "channels": report.channels,
        });
        anstream::println!("{}", serde_json::to_string_pretty(&value)?);
        return Ok(0);
    }
    print(ss_text(&report));
    Ok(0)
}

fn ss_text(report: &Report) -> String {
    let names: BTreeMap<u32, &str> = report.processes.iter().map(|p| (p.pid, p.comm.as_str())).collect();
    let users = |pids: &[u32], comm: &str| {
        let one = |pid: &u32| format!("(\"{}\",pid={pid})", names.get(pid).copied().unwrap_or(comm));
        format!("users:({})", pids.iter().map(one).collect::<Vec<_>>().join(","))
    };
    let header =
        ["State", "Recv-Q", "Send-Q", "Local Address:Port", "Peer Address:Port", "Path", "Channel:Slot", "Process"];
    let mut table = table(&header, &[1, 2]);
    for l in &report.listeners {
        let peer = if l.local.starts_with('[') { "[::]:*" } else { "0.0.0.0:*" };
        let queued = l.queued.to_string();
        table.add_row(["LISTEN", &queued, "0", &l.local, peer, "shm", "", &users(&l.pids, "")]);
    }
    for c in &report.connections {
        let (recv, send, slot) = (c.recv_q.to_string(), c.send_q.to_string(), format!("{}:{}", c.channel, c.slot));
        table.add_row([&c.state, &recv, &send, &c.local, &c.peer, &c.path, &slot, &users(&c.pids, &c.comm)]);
    }
    table.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use fsocket_proto::report::{Connection, Listener, Process};

    fn example() -> Report {
        let counters = Counters::from([("connect_shm".to_owned(), 7), ("fallback.remote".to_owned(), 2)]);
        let process = Process { pid: 12, comm: "nginx".to_owned(), family: 12, counters: counters.clone() };
        let listener = Listener { id: 1, local: "127.0.0.1:80".to_owned(), pids: vec![12], ..Default::default() };
        let connection = Connection {
            state: "ESTAB".to_owned(),
            recv_q: 5,
            local: "127.0.0.1:80".to_owned(),
            peer: "127.0.0.1:41000".to_owned(),
            pids: vec![12],
            path: "shm".to_owned(),
            ..Default::default()
        };
        let (processes, listeners, connections) = (vec![process], vec![listener], vec![connection]);
        Report { totals: counters, processes, listeners, connections, ..Default::default() }
    }

    #[test]
    fn stat_shows_what_happened() {
        let text = stat_text(&example(), false);
        assert!(text.contains("connect_shm") && text.contains("nginx") && text.contains("remote"));
        assert!(!text.contains("hostile_peer"));
        assert!(stat_text(&example(), true).contains("hostile_peer"));
    }

    #[test]
    fn ss_has_the_columns_of_ss() {
        let text = ss_text(&example());
        let lines: Vec<Vec<&str>> = text.lines().map(|l| l.split_whitespace().collect()).collect();
        assert_eq!(lines[1][..5], ["LISTEN", "0", "0", "127.0.0.1:80", "0.0.0.0:*"]);
        assert_eq!(lines[2][..5], ["ESTAB", "5", "0", "127.0.0.1:80", "127.0.0.1:41000"]);
        assert_eq!(lines[2].last(), Some(&"users:((\"nginx\",pid=12))"));
    }
}
