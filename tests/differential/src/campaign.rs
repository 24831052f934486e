//! Runs many programs, on several lanes.

use crate::generate::{self, Switches};
use crate::judge::{judge, Difference, Verdict};
use crate::lane::{Lane, Mode, LIBRARY};
use crate::program::Program;
use crate::rng::Rng;
use anyhow::{ensure, Result};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::Mutex;
use std::time::{Duration, Instant};

pub struct Plan {
    pub executor: PathBuf,
    pub seed: u64,
    pub count: u64,
    pub time: Option<Duration>,
    pub lanes: usize,
    pub switches: Switches,
    /// Percentage of programs that also run with the library in some processes only.
    pub mixed: usize,
    /// Stop after this many differences.
    pub enough: usize,
}

#[derive(Default)]
pub struct Outcome {
    pub programs: u64,
    pub seconds: f64,
    pub varies: Vec<u64>,
    pub late: Vec<(u64, Difference)>,
    pub different: Vec<(u64, Difference)>,
    /// Failures of the tester or of the monitor.
    pub broken: Vec<String>,
    /// Sums of the counters of all monitors.
    pub counters: BTreeMap<String, u64>,
}

/// The counters that show which path was taken.
const SHOWN: &[&str] = &[
    "connect_shm",
    "connect_kernel",
    "accept_shm",
    "accept_kernel",
    "close_shm",
    "path_switch",
    "path_upgrade",
    "hostile_peer",
];

impl Outcome {
    /// Connections opened over shared memory, and over kernel TCP although the
    /// process has the library.
    pub fn paths(&self) -> (u64, u64) {
        let get = |name| self.counters.get(name).copied().unwrap_or(0);
        (get("connect_shm"), get("connect_kernel"))
    }

    pub fn summary(&self) -> String {
        let mut text = format!(
            "{} programs in {:.1} s ({:.0} a minute): {} different, {} late, {} broken, {} where the kernel varies\n",
            self.programs,
            self.seconds,
            self.programs as f64 * 60.0 / self.seconds.max(0.001),
            self.different.len(),
            self.late.len(),
            self.broken.len(),
            self.varies.len()
        );
        let shown = |(n, v): &(&String, &u64)| (SHOWN.contains(&n.as_str()) || n.starts_with("fallback")) && **v > 0;
        let words: Vec<String> = self.counters.iter().filter(shown).map(|(n, v)| format!("{n} {v}")).collect();
        text += &format!("counters: {}\n", words.join(", "));
        if !self.varies.is_empty() {
            text += &format!("seeds where the kernel varies: {:?}\n", self.varies);
        }
        text
    }
}

/// Modes in which the program of a seed runs, beside stock.
pub fn modes(seed: u64, program: &Program, mixed: usize) -> Vec<Mode> {
    let mut rng = Rng::new(seed ^ 0xABCD);
    let mut modes = vec![LIBRARY];
    if program.processes > 1 && rng.chance(mixed) {
        modes.push(rng.pick(&[1, 2, 3 << 1, 0b101]));
    }
    modes
}

pub fn run(plan: &Plan, report: &(dyn Fn(u64, &Verdict) + Sync)) -> Result<Outcome> {
    let start = Instant::now();
    let next = AtomicU64::new(0);
    let found = AtomicU64::new(0);
    let all = Mutex::new(Outcome::default());
    let new_lane = || -> Result<Lane> {
        let mut lane = Lane::new(&plan.executor)?;
        lane.quiet_us = lane.quiet_us.max(plan.switches.patience_us());
        Ok(lane)
    };
    let lane = || -> Result<()> {
        let mut lane = new_lane()?;
        let mut before = lane.snapshot();
        while found.load(Relaxed) < plan.enough as u64 && plan.time.is_none_or(|t| start.elapsed() < t) {
            let i = next.fetch_add(1, Relaxed);
            if i >= plan.count {
                break;
            }
            let seed = plan.seed + i;
            let (program, mixable) = generate::program(seed, plan.switches);
            let mixed = if mixable { plan.mixed } else { 0 };
            let verdict = match judge(&mut lane, &program, &modes(seed, &program, mixed)) {
                Ok(verdict) => verdict,
                Err(e) => {
                    // The monitor has ended, or a process did not start.
                    let text = format!("seed {seed}: {e:?}");
                    eprintln!("{text}");
                    all.lock().unwrap_or_else(|e| e.into_inner()).broken.push(text);
                    lane = new_lane()?;
                    before = lane.snapshot();
                    continue;
                }
            };
            report(seed, &verdict);
            let mut o = all.lock().unwrap_or_else(|e| e.into_inner());
            o.programs += 1;
            match verdict {
                Verdict::Equal => {}
                Verdict::Varies => o.varies.push(seed),
                Verdict::Late(d) => o.late.push((seed, *d)),
                Verdict::Different(d) => {
                    found.fetch_add(1, Relaxed);
                    o.different.push((seed, *d));
                }
            }
        }
        let after = lane.snapshot();
        let mut o = all.lock().unwrap_or_else(|e| e.into_inner());
        for (name, value) in after.report.iter().flat_map(|r| &r.totals) {
            *o.counters.entry(name.clone()).or_default() += value - before.total(name);
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let lanes: Vec<_> = (0..plan.lanes).map(|_| scope.spawn(lane)).collect();
        lanes.into_iter().try_for_each(|l| l.join().unwrap_or_else(|_| anyhow::bail!("a lane panicked")))
    })?;
    let mut outcome = all.into_inner().unwrap_or_else(|e| e.into_inner());
    outcome.seconds = start.elapsed().as_secs_f64();
    ensure!(outcome.programs > 0, "no program ran");
    Ok(outcome)
}
