//! Counters in memory that all workers share with their parent, and what is
//! printed of them every second.

use crate::sys;
use std::fmt::Write;
use std::io::Result;
use std::sync::atomic::{AtomicU64, Ordering};

/// One worker's counters, on cache lines of its own. A replacement of a dead worker goes on with
/// its counters.
#[derive(Default)]
#[repr(align(128))]
pub struct Counters {
    pub accepted: AtomicU64,
    /// Answered requests.
    pub requests: AtomicU64,
    /// Bytes sent to clients.
    pub bytes: AtomicU64,
    pub closed: AtomicU64,
    /// Clients that reset, or went away in the middle of a request or answer.
    pub client_errors: AtomicU64,
    /// Connections to backends.
    pub connected: AtomicU64,
    /// Backends that refused, reset, or answered too little.
    pub backend_errors: AtomicU64,
    pub timeouts: AtomicU64,
    /// With --locality: accepted connections asked about, at their end, and
    /// those among them whose packets were received on the worker's CPU.
    pub passive: AtomicU64,
    pub passive_local: AtomicU64,
    /// The same for connections to backends.
    pub active: AtomicU64,
    pub active_local: AtomicU64,
}

/// Adds to a counter that only this worker writes: no locked instruction.
pub fn add(counter: &AtomicU64, n: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
}

/// Values of one worker, or of all, at one moment.
#[derive(Clone, Copy, Default)]
pub struct Values([u64; NAMES.len()]);

const NAMES: [&str; 12] = [
    "accepted",
    "requests",
    "bytes",
    "closed",
    "client_errors",
    "connected",
    "backend_errors",
    "timeouts",
    "passive",
    "passive_local",
    "active",
    "active_local",
];

impl Counters {
    fn values(&self) -> Values {
        let all = [
            &self.accepted,
            &self.requests,
            &self.bytes,
            &self.closed,
            &self.client_errors,
            &self.connected,
            &self.backend_errors,
            &self.timeouts,
            &self.passive,
            &self.passive_local,
            &self.active,
            &self.active_local,
        ];
        Values(all.map(|counter| counter.load(Ordering::Relaxed)))
    }
}

impl Values {
    fn get(&self, name: &str) -> u64 {
        NAMES.iter().position(|n| *n == name).map_or(0, |i| self.0[i])
    }

    fn combine(self, other: Values, with: fn(u64, u64) -> u64) -> Values {
        let mut result = self;
        result.0.iter_mut().zip(other.0).for_each(|(a, b)| *a = with(*a, b));
        result
    }

    fn json(&self) -> String {
        let fields: Vec<String> = NAMES.iter().zip(self.0).map(|(name, value)| format!("\"{name}\":{value}")).collect();
        format!("{{{}}}", fields.join(","))
    }

    fn row(&self, worker: &str, cpu: &str, open: u64) -> String {
        format!(
            "{worker:>6} {cpu:>4} {:>9} {:>9} {:>9.2} {open:>7} {:>7} {:>7} {:>7}",
            self.get("accepted"),
            self.get("requests"),
            self.get("bytes") as f64 / 1e6,
            self.get("client_errors"),
            self.get("backend_errors"),
            self.get("timeouts"),
        )
    }
}

const HEADER: &str = "worker  cpu  accept/s requests/s    MB/s    open clt err bck err timeout";

/// Share in percent, or nothing to take a share of.
fn share(part: u64, of: u64) -> Option<f64> {
    (of > 0).then(|| part as f64 * 100.0 / of as f64)
}

/// The counters of all workers, and what they were a second ago.
pub struct Stats {
    workers: &'static [Counters],
    before: Vec<Values>,
    /// CPU of each worker, if pinned.
    cpus: Vec<Option<usize>>,
    ticks: u64,
}

impl Stats {
    pub fn new(cpus: Vec<Option<usize>>) -> Result<Stats> {
        let memory = sys::shared_memory(cpus.len() * size_of::<Counters>())?;
        // SAFETY: page-aligned, zeroed, large enough, never unmapped, and only
        // ever used as atomics; all zero is a valid `Counters`.
        let workers = unsafe { std::slice::from_raw_parts(memory.cast::<Counters>(), cpus.len()) };
        Ok(Stats { workers, before: vec![Values::default(); cpus.len()], cpus, ticks: 0 })
    }

    pub fn worker(&self, index: usize) -> &'static Counters {
        &self.workers[index]
    }

    /// The difference since the last call, as text or JSON, ending in a newline.
    pub fn tick(&mut self, json: bool) -> String {
        let now: Vec<Values> = self.workers.iter().map(Counters::values).collect();
        let grown: Vec<Values> =
            now.iter().zip(&self.before).map(|(now, before)| now.combine(*before, u64::saturating_sub)).collect();
        self.before.clone_from(&now);
        self.ticks += 1;
        let sum = |all: &[Values]| all.iter().fold(Values::default(), |a, b| a.combine(*b, u64::wrapping_add));
        if json {
            let workers: Vec<String> = grown.iter().map(Values::json).collect();
            return format!(
                "{{\"second\":{},\"total\":{},\"workers\":[{}]}}\n",
                self.ticks,
                sum(&grown).json(),
                workers.join(",")
            );
        }
        let mut text = String::new();
        if self.ticks % 20 == 1 || self.workers.len() > 8 {
            text += HEADER;
            text += "\n";
        }
        for (i, values) in grown.iter().enumerate() {
            let cpu = self.cpus[i].map_or("any".to_owned(), |cpu| cpu.to_string());
            let _ = writeln!(text, "{}", values.row(&i.to_string(), &cpu, open(&now[i])));
        }
        let _ = writeln!(text, "{}", sum(&grown).row("all", "", now.iter().map(open).sum()));
        text
    }

    /// Everything since the start.
    pub fn totals(&self, json: bool) -> String {
        let all: Vec<Values> = self.workers.iter().map(Counters::values).collect();
        let total = all.iter().fold(Values::default(), |a, b| a.combine(*b, u64::wrapping_add));
        if json {
            let workers: Vec<String> = all.iter().map(Values::json).collect();
            return format!("{{\"final\":true,\"total\":{},\"workers\":[{}]}}\n", total.json(), workers.join(","));
        }
        let mut text = "totals:".to_owned();
        for (name, value) in NAMES.iter().zip(total.0).filter(|(_, value)| *value > 0) {
            let _ = write!(text, " {name} {value}");
        }
        for kind in ["passive", "active"] {
            if let Some(percent) = share(total.get(&format!("{kind}_local")), total.get(kind)) {
                let _ = write!(text, "; {kind} connections local {percent:.1} %");
            }
        }
        text + "\n"
    }
}

/// Connections that are open. A killed worker's are counted as open for ever,
/// as nobody is there to count their end.
fn open(values: &Values) -> u64 {
    values.get("accepted").saturating_sub(values.get("closed"))
}
