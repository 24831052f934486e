//! Monitors of other ABIs: after an upgrade, an old monitor stays for the programs that it serves
//! (ADR 83). Commands show the programs of these monitors, too.

use fsocket_client::control;
use fsocket_proto::report::Report;
use std::path::{Path, PathBuf};

/// A monitor of another ABI.
pub struct Other {
    pub abi: u32,
    pub socket: PathBuf,
    /// `None`: this command does not know the protocol of this monitor.
    pub report: Option<Report>,
}

/// The other monitors in the directory of `socket`. `asked`: the report of the monitor at
/// `socket`, which is left out.
pub fn ask(socket: &Path, asked: Option<&Report>) -> Vec<Other> {
    let all = control::others(socket).into_iter();
    let all = all.map(|(abi, socket)| Other { abi, report: control::report(&socket).ok(), socket });
    // The monitor at `socket` is recognized by its pid, because its ABI may differ from this
    // command's.
    let is_asked =
        |other: &Other| other.report.as_ref().zip(asked).is_some_and(|(r, a)| r.monitor_pid == a.monitor_pid);
    all.filter(|other| !is_asked(other)).collect()
}

impl Other {
    pub fn heading(&self) -> String {
        let what = match &self.report {
            None => "does not speak with this command",
            Some(report) if report.retired => "stays for the programs below, and ends with the last",
            Some(_) => "serves the programs below",
        };
        format!("\nThe monitor of ABI {} at {} {what}\n", self.abi, self.socket.display())
    }
}

/// The report, with the programs and connections of other monitors.
pub fn with(report: &Report, others: &[Other]) -> Report {
    let mut all = report.clone();
    for other in others.iter().filter_map(|other| other.report.clone()) {
        all.processes.extend(other.processes);
        all.listeners.extend(other.listeners);
        all.connections.extend(other.connections);
    }
    all
}

pub fn json(others: &[Other]) -> serde_json::Value {
    let one = |other: &Other| match &other.report {
        Some(report) => serde_json::json!({
            "abi": other.abi,
            "socket": other.socket,
            "retired": report.retired,
            "monitor_pid": report.monitor_pid,
            "uptime": report.uptime,
            "totals": report.totals,
            "processes": report.processes,
        }),
        None => serde_json::json!({ "abi": other.abi, "socket": other.socket }),
    };
    others.iter().map(one).collect()
}
