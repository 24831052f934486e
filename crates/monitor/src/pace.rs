//! How long the loop is with one thing before it looks at the next.

use fsocket_proto::report;
use std::time::{Duration, Instant};

/// Turns by how long they took: up to 1 µs, 2, 4, … and longer.
const BUCKETS: usize = 24;

pub struct Pace {
    since: Instant,
    longest: Duration,
    buckets: [u64; BUCKETS],
}

impl Default for Pace {
    fn default() -> Pace {
        Pace { since: Instant::now(), longest: Duration::ZERO, buckets: [0; BUCKETS] }
    }
}

impl Pace {
    /// The loop has slept until now.
    pub fn begin(&mut self) {
        self.since = Instant::now();
    }

    /// A turn has ended, and the next one begins.
    pub fn lap(&mut self) {
        let now = Instant::now();
        self.note(now.duration_since(self.since));
        self.since = now;
    }

    fn note(&mut self, took: Duration) {
        self.longest = self.longest.max(took);
        let us = took.as_nanos().div_ceil(1000).max(1).next_power_of_two();
        self.buckets[(us.trailing_zeros() as usize).min(BUCKETS - 1)] += 1;
    }

    pub fn report(&self) -> report::Loop {
        report::Loop { longest_us: self.longest.as_micros() as u64, turns: self.buckets.to_vec() }
    }

    /// Forgets what was.
    pub fn reset(&mut self) {
        *self = Pace { since: self.since, ..Pace::default() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_are_counted_by_their_length() {
        let mut p = Pace::default();
        for us in [0, 1, 2, 3, 4, 5, 1_000_000, 100_000_000] {
            p.note(Duration::from_micros(us));
        }
        assert_eq!((p.buckets[0], p.buckets[1], p.buckets[2], p.buckets[3]), (2, 1, 2, 1));
        assert_eq!((p.buckets[20], p.buckets[BUCKETS - 1]), (1, 1));
        assert_eq!(p.report().longest_us, 100_000_000);
        p.reset();
        assert_eq!(p.report().longest_us, 0);
    }
}
