//! Durations from time stamps that cost a few nanoseconds.

use super::args::Outcome;
use hdrhistogram::Histogram;
use std::time::{Duration, Instant};

/// Maximum number of durations. A run with more ends early.
const KEPT: usize = 4 << 20;
/// Number of durations for which [`Samples::has_room`] guarantees room.
const SPARE: usize = 64;

#[inline(always)]
fn now() -> u64 {
    // SAFETY: every x86-64 CPU has the instruction.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// Durations of one operation, in the CPU's ticks.
pub struct Samples {
    ticks: Vec<u64>,
    ops: usize,
    started: Instant,
    first: u64,
    last: u64,
}

impl Samples {
    /// Makes room for the operations of `secs` seconds, and starts the clock.
    pub fn new(secs: f64) -> Self {
        // The value is not zero, so that every page is resident before the clock starts.
        let ticks = vec![u64::MAX; KEPT.min((secs * 20e6) as usize) + 2 * SPARE];
        let first = now();
        Samples { ticks, ops: 0, started: Instant::now(), first, last: first }
    }

    /// Marks the start of the next operation.
    #[inline]
    pub fn start(&mut self) {
        self.last = now();
    }

    /// Marks the end of an operation and the start of the next one. Returns the number of operations so far.
    #[inline]
    pub fn lap(&mut self) -> usize {
        let now = now();
        self.ticks[self.ops] = now - self.last;
        self.last = now;
        self.ops += 1;
        self.ops
    }

    #[inline]
    pub fn has_room(&self) -> bool {
        self.ops + SPARE < self.ticks.len()
    }

    /// Discards the durations so far; the clock goes on.
    pub fn clear(&mut self) {
        self.ops = 0;
    }

    pub fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// Mean and quantiles in nanoseconds, the number of operations, and the time since the clock started.
    pub fn outcome(&self) -> Outcome {
        let seconds = self.elapsed().as_secs_f64();
        let ns_per_tick = seconds * 1e9 / (now() - self.first).max(1) as f64;
        // The upper bound is 100 s.
        let mut histogram = Histogram::<u64>::new_with_bounds(1, 1_000_000_000_000, 3).expect("valid bounds");
        let mut sum = 0.0;
        for ticks in &self.ticks[..self.ops] {
            let ns = *ticks as f64 * ns_per_tick;
            sum += ns;
            // The unit is 0.1 ns, so that rounding does not show in a median of 200 ns.
            histogram.saturating_record((ns * 10.0) as u64);
        }
        let at = |q| histogram.value_at_quantile(q) as f64 / 10.0;
        let mean = sum / self.ops.max(1) as f64;
        let ops = self.ops as u64;
        Outcome { ops, seconds, mean, p1: at(0.01), p50: at(0.5), p99: at(0.99), ..Default::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_nanoseconds() {
        let mut samples = Samples::new(0.1);
        for _ in 0..3 {
            samples.start();
            std::thread::sleep(Duration::from_millis(5));
            samples.lap();
        }
        let outcome = samples.outcome();
        assert_eq!(outcome.ops, 3);
        assert!(outcome.mean >= 4.5e6 && outcome.p1 >= 4.5e6 && outcome.p99 >= outcome.p50, "{outcome:?}");
        samples.clear();
        assert_eq!(samples.outcome().ops, 0);
    }
}
