//! `fastsocket stat`: shows the monitor's counters, its processes, and the reasons for kernel TCP.

mod timeline;
mod zones;

use crate::cmdline::Stat;
use crate::explain::overview;
use crate::locality::Filter;
use crate::others;
use crate::text::{print, table};
use anyhow::{anyhow, Result};
use fsocket_abi::arena::COUNTERS;
use fsocket_client::control;
use fsocket_proto::paths;
use fsocket_proto::report::{Counters, Process, Report};
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Prefix of the counters that say why the kernel was used.
const FALLBACK: &str = "fallback.";

/// Moves to the upper left of the terminal, and clears it.
const CLEAR: &str = "\x1b[H\x1b[2J";

/// `fastsocket stat`.
pub fn stat(args: &Stat) -> Result<i32> {
    let Some(seconds) = args.watch else { return once(args) };
    loop {
        if std::io::stdout().is_terminal() {
            anstream::print!("{CLEAR}");
        }
        // Print the error and go on: another monitor may start later.
        if let Err(e) = once(args) {
            eprintln!("fastsocket: {e:#}");
        }
        std::thread::sleep(Duration::from_secs(seconds));
        if !std::io::stdout().is_terminal() {
            anstream::println!();
        }
    }
}

fn once(args: &Stat) -> Result<i32> {
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
    let found = control::find();
    let socket = found.as_ref().map_or(Path::new(paths::SYSTEM_SOCKET), PathBuf::as_path);
    let mut ended = None;
    let report = match &found {
        Ok(socket) => control::report(socket),
        Err(_) => control::last_report().map(|(ago, report)| {
            ended = Some(ago.as_secs());
            report
        }),
    };
    // If no monitor was found, the reason for that is the better error.
    let report = report.or_else(|e| found.as_ref().map_or_else(|none| Err(anyhow!("{none:#}")), |_| Err(e)));
    let live = report.as_ref().ok().filter(|_| ended.is_none());
    let others = others::ask(socket, live);
    let known = live.map(|report| others::with(report, &others));
    let kernel = || overview::kernel(socket, known.as_ref());
    if args.json {
        let kernel = args.kernel.then(kernel);
        let mut value = match &report {
            Ok(report) => serde_json::json!({
                "version": report.version,
                "monitor_pid": report.monitor_pid,
                "ended_seconds_ago": ended,
                "uptime": report.uptime,
                "totals": report.totals,
                "loop": report.event_loop,
                "held": report.held,
                "processes": report.processes,
                "abi": report.abi,
                "others": others::json(&others),
            }),
            // With --kernel, also processes that lack a monitor are listed, so there is output in
            // any case.
            Err(e) if args.kernel => serde_json::json!({ "error": format!("{e:#}") }),
            Err(_) => serde_json::Value::Null,
        };
        if let Some(kernel) = kernel {
            value["kernel"] = serde_json::to_value(kernel)?;
        }
        if !value.is_null() {
            anstream::println!("{}", serde_json::to_string_pretty(&value)?);
        }
    } else {
        if let Some(seconds) = ended {
            print(format!(
                "No monitor runs now. This is the last report of the private monitor, which ended {seconds} s ago:\n\n"
            ));
        }
        if let Ok(report) = &report {
            print(stat_text(report, args.all) + "\n");
        }
        for other in &others {
            print(other.heading() + &other.report.iter().map(|r| stat_text(r, args.all) + "\n").collect::<String>());
        }
        print(format!("Over kernel TCP now\n{}", overview::table(&kernel())));
    }
    report.map(|_| 0)
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
        let mut row = vec![process.pid.to_string(), name(process)];
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

fn name(process: &Process) -> String {
    match process.off {
        true => format!("{} (off)", process.comm),
        false => process.comm.clone(),
    }
}

/// Counters in the order of the table in the code, then counters that this command does not know.
fn in_order(counters: &Counters) -> impl Iterator<Item = (&str, u64)> {
    let known = COUNTERS.iter().map(|name| (*name, counters.get(*name).copied().unwrap_or(0)));
    let unknown = counters.iter().filter(|(n, _)| !COUNTERS.contains(&n.as_str())).map(|(n, v)| (n.as_str(), *v));
    known.chain(unknown)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> Report {
        let counters = Counters::from([("connect_shm".to_owned(), 7), ("fallback.remote".to_owned(), 2)]);
        let process =
            Process { pid: 12, comm: "nginx".to_owned(), family: 12, counters: counters.clone(), ..Default::default() };
        Report { totals: counters, processes: vec![process], ..Default::default() }
    }

    #[test]
    fn stat_shows_what_happened() {
        let text = stat_text(&example(), false);
        assert!(text.contains("connect_shm") && text.contains("nginx") && text.contains("remote"));
        assert!(!text.contains("hostile_peer"));
        assert!(stat_text(&example(), true).contains("hostile_peer"));
    }
}
