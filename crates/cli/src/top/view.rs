//! Computes what `top` shows: the difference between two successive reports.

use super::open::{InKernel, Open};
use super::options::Sort;
use fsocket_proto::report::{Counters, Process, Report};
use std::collections::BTreeMap;
use std::time::Duration;

const FALLBACK: &str = "fallback.";

/// Everything that `top` shows. Rates are per second.
#[derive(Debug, Default, Clone)]
pub struct View {
    pub monitor_pid: u32,
    pub uptime: f64,
    pub all: Rates,
    /// Share of shared memory in all connections since the monitor started. `None`: there were no
    /// connections.
    pub share_so_far: Option<f64>,
    pub open: Open,
    pub channels: usize,
    pub resident: u64,
    pub processes: Vec<ProcessRow>,
    pub listeners: Vec<ListenerRow>,
    pub reasons: Vec<ReasonRow>,
    pub zones: Vec<ZoneRow>,
}

#[derive(Debug, Default, Clone, Copy, PartialEq)]
pub struct Rates {
    /// Connections that were opened or accepted.
    pub shm: f64,
    pub kernel: f64,
    /// Bytes that were sent over shared memory.
    pub sent: f64,
    pub received: f64,
    pub fallbacks: f64,
}

#[derive(Debug, Clone)]
pub struct ProcessRow {
    pub pid: u32,
    pub name: String,
    pub open: Open,
    pub rates: Rates,
}

#[derive(Debug, Clone)]
pub struct ListenerRow {
    pub local: String,
    /// Names of the processes that listen.
    pub programs: String,
    pub opened: f64,
    pub open: u64,
    pub queued: u32,
}

#[derive(Debug, Clone)]
pub struct ReasonRow {
    pub reason: String,
    pub rate: f64,
    pub total: u64,
}

#[derive(Debug, Clone)]
pub struct ZoneRow {
    pub cpu: u32,
    /// Connections accepted per second, by the kind of queue that they came from (`local`,
    /// `global`, `remote`, `stolen`).
    pub accepted: BTreeMap<String, f64>,
}

fn share(shm: f64, kernel: f64) -> Option<f64> {
    (shm + kernel > 0.0).then(|| shm / (shm + kernel))
}

fn of(counters: &Counters, name: &str) -> u64 {
    counters.get(name).copied().unwrap_or(0)
}

/// Computes rates from counters and the time between two reports.
struct Since<'a> {
    before: Option<&'a Counters>,
    seconds: f64,
}

impl Since<'_> {
    /// Rate of a counter. A new process counts from zero. Programs can write their counters, so a
    /// counter may also decrease.
    fn rate(&self, now: &Counters, name: &str) -> f64 {
        let before = self.before.map_or(0, |before| of(before, name));
        of(now, name).saturating_sub(before) as f64 / self.seconds
    }

    fn rates(&self, now: &Counters) -> Rates {
        let rate = |name| self.rate(now, name);
        Rates {
            shm: rate("connect_shm") + rate("accept_shm"),
            kernel: rate("connect_kernel") + rate("accept_kernel"),
            sent: rate("tx_bytes"),
            received: rate("rx_bytes"),
            fallbacks: now.keys().filter(|name| name.starts_with(FALLBACK)).map(|name| rate(name)).sum(),
        }
    }
}

impl View {
    /// `before`: an earlier report of the same monitor, and the time since then; without it all
    /// rates are zero. `kernel`: kernel connections of the processes in `now`.
    pub fn new(before: Option<(Duration, &Report)>, now: &Report, kernel: &InKernel) -> View {
        // Compare the report with itself if there is no earlier one, so that all differences are
        // zero.
        let (time, before) = before.unwrap_or((Duration::from_secs(1), now));
        let seconds = time.as_secs_f64().max(0.001);
        let all = Since { before: Some(&before.totals), seconds };
        let total = |name| of(&now.totals, name) as f64;
        View {
            monitor_pid: now.monitor_pid,
            uptime: now.uptime,
            all: all.rates(&now.totals),
            share_so_far: share(
                total("connect_shm") + total("accept_shm"),
                total("connect_kernel") + total("accept_kernel"),
            ),
            open: Open::all(now, kernel),
            channels: now.channels.len(),
            resident: now.channels.iter().fold(0, |sum: u64, c| sum.saturating_add(c.resident)),
            processes: processes(before, now, seconds, kernel),
            listeners: listeners(before, now, seconds),
            reasons: reasons(&all, now),
            zones: zones(before, now, seconds),
        }
    }

    /// Sorts and filters the rows as the user chose.
    pub fn arrange(&mut self, sort: Sort, reverse: bool, filter: &str) {
        let filter = filter.to_lowercase();
        let has = |text: &str| text.to_lowercase().contains(&filter);
        self.processes.retain(|p| has(&p.name) || p.pid.to_string().contains(&filter));
        self.listeners.retain(|l| has(&l.local) || has(&l.programs));
        // The default order is the largest value first; equal values are ordered by pid.
        let value = |p: &ProcessRow| match sort {
            Sort::Connections => p.rates.shm + p.rates.kernel,
            Sort::Kernel => p.rates.kernel,
            Sort::Bytes => p.rates.sent + p.rates.received,
            Sort::Fallbacks => p.rates.fallbacks,
            Sort::Name | Sort::Pid => 0.0,
        };
        self.processes.sort_by(|a, b| {
            let by_name = || if sort == Sort::Name { a.name.cmp(&b.name) } else { std::cmp::Ordering::Equal };
            value(b).total_cmp(&value(a)).then_with(by_name).then(a.pid.cmp(&b.pid))
        });
        self.listeners.sort_by(|a, b| b.opened.total_cmp(&a.opened).then_with(|| a.local.cmp(&b.local)));
        if reverse {
            self.processes.reverse();
        }
    }
}

fn processes(before: &Report, now: &Report, seconds: f64, kernel: &InKernel) -> Vec<ProcessRow> {
    let earlier: BTreeMap<(u32, u32), &Process> = before.processes.iter().map(|p| ((p.pid, p.family), p)).collect();
    let row = |p: &Process| {
        let before = earlier.get(&(p.pid, p.family)).map(|p| &p.counters);
        let rates = Since { before, seconds }.rates(&p.counters);
        ProcessRow { pid: p.pid, name: p.comm.clone(), open: Open::of(p, kernel), rates }
    };
    now.processes.iter().map(row).collect()
}

fn listeners(before: &Report, now: &Report, seconds: f64) -> Vec<ListenerRow> {
    let earlier: BTreeMap<u64, u64> = before.listeners.iter().map(|l| (l.id, l.opened)).collect();
    let names: BTreeMap<u32, &str> = now.processes.iter().map(|p| (p.pid, p.comm.as_str())).collect();
    let row = |l: &fsocket_proto::report::Listener| {
        let mut programs: Vec<&str> = l.pids.iter().filter_map(|pid| names.get(pid).copied()).collect();
        programs.dedup();
        ListenerRow {
            local: l.local.clone(),
            programs: programs.join(","),
            opened: l.opened.saturating_sub(earlier.get(&l.id).copied().unwrap_or(0)) as f64 / seconds,
            open: now.channels.iter().filter(|c| c.listener == l.id).map(|c| u64::from(c.connections)).sum(),
            queued: l.queued,
        }
    };
    now.listeners.iter().map(row).collect()
}

fn reasons(all: &Since<'_>, now: &Report) -> Vec<ReasonRow> {
    let counted = now.totals.iter().filter(|(_, n)| **n > 0);
    let mut rows: Vec<ReasonRow> = counted
        .filter_map(|(name, total)| {
            let reason = name.strip_prefix(FALLBACK)?.to_owned();
            Some(ReasonRow { reason, rate: all.rate(&now.totals, name), total: *total })
        })
        .collect();
    rows.sort_by(|a, b| b.rate.total_cmp(&a.rate).then(b.total.cmp(&a.total)));
    rows
}

fn zones(before: &Report, now: &Report, seconds: f64) -> Vec<ZoneRow> {
    let row = |zone: &fsocket_proto::report::Zone| {
        let before = before.zones.iter().find(|z| z.cpu == zone.cpu).map(|z| &z.accepted);
        let since = Since { before, seconds };
        let accepted = zone.accepted.keys().map(|from| (from.clone(), since.rate(&zone.accepted, from))).collect();
        ZoneRow { cpu: zone.cpu, accepted }
    };
    now.zones.iter().map(row).collect()
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use fsocket_proto::report::{self, Channel, Listener, Zone};

    fn counters<const N: usize>(of: [(&str, u64); N]) -> Counters {
        of.map(|(name, n)| (name.to_owned(), n)).into()
    }

    pub fn report(turn: u64) -> Report {
        let process = |pid, comm: &str, shm, kernel| Process {
            pid,
            comm: comm.into(),
            family: pid,
            counters: counters([
                ("accept_shm", turn * shm),
                ("connect_kernel", turn * kernel),
                ("tx_bytes", turn * 500),
            ]),
            open: report::Open { shm: shm / 18, ..Default::default() },
            ..Default::default()
        };
        Report {
            monitor_pid: 7,
            totals: counters([("accept_shm", turn * 90), ("connect_kernel", turn * 10), ("fallback.remote", turn * 4)]),
            processes: vec![process(11, "nginx", 90, 0), process(12, "curl", 0, 10)],
            listeners: vec![Listener {
                id: 1,
                local: "127.0.0.1:80".into(),
                pids: vec![11],
                opened: turn * 90,
                queued: 3,
                ..Default::default()
            }],
            channels: vec![Channel {
                id: 1,
                listener: 1,
                client_pid: 12,
                connections: 5,
                resident: 8192,
                by_agents: false,
            }],
            zones: vec![Zone { cpu: 1, accepted: counters([("local", turn * 6)]) }],
            ..Default::default()
        }
    }

    pub fn view() -> View {
        let kernel = InKernel { by_pid: [(12, 15)].into(), all: 15 };
        View::new(Some((Duration::from_secs(2), &report(1))), &report(2), &kernel)
    }

    #[test]
    fn rates_are_a_second() {
        let v = view();
        assert_eq!((v.all.shm, v.all.kernel, v.all.fallbacks), (45.0, 5.0, 2.0));
        assert_eq!(v.share_so_far, Some(0.9));
        assert_eq!((v.open, v.open.share()), (Open { shm: 5, rdma: 0, kernel: 15 }, Some(0.25)));
        assert_eq!((v.processes[0].open.share(), v.processes[1].open.share()), (Some(1.0), Some(0.0)));
        assert_eq!((v.listeners[0].opened, v.listeners[0].open, v.listeners[0].queued), (45.0, 5, 3));
        assert_eq!(v.listeners[0].programs, "nginx");
        assert_eq!((v.reasons[0].reason.as_str(), v.reasons[0].rate, v.reasons[0].total), ("remote", 2.0, 8));
        assert_eq!(v.zones[0].accepted["local"], 3.0);
        assert_eq!(v.processes[0].rates.sent, 250.0);
    }

    #[test]
    fn counters_that_go_back_and_the_first_look() {
        let look = |before: Option<&Report>, now: &Report| {
            View::new(before.map(|report| (Duration::from_secs(1), report)), now, &InKernel::default())
        };
        let v = look(Some(&report(3)), &report(1));
        assert_eq!(v.all, Rates::default());
        assert_eq!(look(None, &report(1)).all, Rates::default());
        let new = look(Some(&Report::default()), &report(1));
        assert_eq!(new.processes[0].rates.shm, 90.0, "a process that was not there before");
    }

    #[test]
    fn sorted_and_filtered() {
        let names = |sort, reverse, filter: &str| {
            let mut v = view();
            v.arrange(sort, reverse, filter);
            v.processes.iter().map(|p| p.name.clone()).collect::<Vec<_>>()
        };
        assert_eq!(names(Sort::Connections, false, ""), ["nginx", "curl"]);
        assert_eq!(names(Sort::Kernel, false, ""), ["curl", "nginx"]);
        assert_eq!(names(Sort::Name, false, ""), ["curl", "nginx"]);
        assert_eq!(names(Sort::Name, true, ""), ["nginx", "curl"]);
        assert_eq!(names(Sort::Pid, false, "NGI"), ["nginx"]);
        assert_eq!(names(Sort::Pid, false, "12"), ["curl"]);
        let mut v = view();
        v.arrange(Sort::Pid, false, ":80");
        assert_eq!((v.processes.len(), v.listeners.len()), (0, 1));
    }
}
