//! All processes at once: those that should be accelerated but are not, and those with kernel
//! connections.

use super::explain;
use super::process::Facts;
use super::reason::Reason;
use super::sockets::Sockets;
use crate::text;
use fsocket_client::locate;
use fsocket_proto::paths;
use fsocket_proto::report::Report;
use procfs::net::TcpState;
use procfs::process::{all_processes, Process};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// At most this many processes are explained.
const MOST: usize = 64;

/// A process, and one reason why it uses the kernel.
#[derive(Debug, Serialize)]
pub struct Kernel {
    pub pid: i32,
    pub name: String,
    /// Number of open connections over kernel TCP for this reason.
    pub connections: usize,
    #[serde(flatten)]
    pub why: Reason,
}

/// Finds the processes that use the kernel among those that use the monitor at `socket`, or were
/// started to use it. `report`: the monitor's report, if the monitor answered.
pub fn kernel(socket: &Path, report: Option<&Report>) -> Vec<Kernel> {
    let registered: BTreeSet<i32> =
        report.iter().flat_map(|r| &r.processes).filter_map(|p| i32::try_from(p.pid).ok()).collect();
    let processes: Vec<Process> = all_processes().into_iter().flatten().flatten().collect();
    let own = std::process::id();
    let others = |p: &&Process| i64::from(p.pid) != i64::from(own);
    let wanted = |p: &&Process| others(p) && (registered.contains(&p.pid) || was_to_use(p, socket));
    let wanted: Vec<i32> = processes.iter().filter(wanted).map(|p| p.pid).collect();
    if wanted.is_empty() {
        return Vec::new();
    }
    let sockets = Sockets::read();
    // A process that is not registered with the monitor uses the kernel for everything.
    let uses_kernel = |pid: &i32| !registered.contains(pid) || has_kernel_sockets(*pid, &sockets, report);
    let mut rows = Vec::new();
    for pid in wanted.into_iter().filter(uses_kernel).take(MOST) {
        let Ok(Some(facts)) = Facts::of(pid) else { continue };
        let explained = explain(facts, &sockets, None);
        let name = explained.facts.name.clone();
        let open = explained.kernel_connections.len();
        if let Some(why) = explained.facts.obstacles.into_iter().next() {
            rows.push(Kernel { pid, name, connections: open, why });
            continue;
        }
        let mut reasons: BTreeMap<(&str, String), usize> = BTreeMap::new();
        for l in explained.listeners.iter().filter(|l| !l.registered) {
            reasons.entry(("listener_unknown", format!("the monitor does not know {}", l.local))).or_default();
        }
        for c in explained.kernel_connections {
            *reasons.entry((c.why.reason, c.why.text)).or_default() += 1;
        }
        rows.extend(reasons.into_iter().map(|((reason, text), connections)| Kernel {
            pid,
            name: name.clone(),
            connections,
            why: Reason { reason, text },
        }));
    }
    rows
}

/// Whether the process was started to use the monitor at `socket`. Its initial environment then
/// names the monitor, or it preloads the library and names no monitor (the library then uses the
/// system's).
fn was_to_use(process: &Process, socket: &Path) -> bool {
    let Ok(environ) = process.environ() else { return false };
    match environ.get(OsStr::new(paths::ENV_SOCKET)).filter(|v| !v.is_empty()) {
        Some(named) => Path::new(named) == socket,
        None => {
            let preloads = environ.get(OsStr::new("LD_PRELOAD"));
            let has = |list: &std::ffi::OsString| {
                list.as_bytes().windows(locate::LIBRARY.len()).any(|w| w == locate::LIBRARY.as_bytes())
            };
            socket == Path::new(paths::SYSTEM_SOCKET) && preloads.is_some_and(has)
        }
    }
}

fn has_kernel_sockets(pid: i32, sockets: &Sockets, report: Option<&Report>) -> bool {
    let known = |port: u16| {
        let mut listeners = report.iter().flat_map(|r| &r.listeners);
        listeners.any(|l| l.local.rsplit(':').next().is_some_and(|p| p.parse() == Ok(port)))
    };
    !sockets.in_state(pid, &TcpState::Established).is_empty()
        || sockets.in_state(pid, &TcpState::Listen).iter().any(|e| !known(e.local_address.port()))
}

/// The rows as a table for people.
pub fn table(rows: &[Kernel]) -> String {
    if rows.is_empty() {
        return "None".into();
    }
    let mut table = text::table(&["PID", "PROGRAM", "CONNECTIONS", "REASON", ""], &[0, 2]);
    for row in rows {
        let numbers = [row.pid.to_string(), row.name.clone(), row.connections.to_string()];
        table.add_row(numbers.into_iter().chain([row.why.reason.to_owned(), row.why.text.clone()]));
    }
    table.to_string()
}
