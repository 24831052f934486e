//! Decides whether a worker that waits in `accept`, `poll` or `select` gets a queue of its own.
//!
//! A worker that serves one connection at a time does not accept meanwhile. Connections in its
//! own queue would wait for it although other workers are idle, so such a worker uses the shared
//! queue. A worker that hands its connections on, or runs an event loop, returns to `accept` at
//! once. So a worker gets its local listen socket after a number of quick returns, and loses it
//! after a long absence.

use crate::cow::Sparing;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use fsocket_sys::cpu;

/// Number of successive quick returns after which a worker counts as quick.
const PROBATION: u32 = 32;
/// If the worker returns within QUICK_US, the return is quick; after AWAY_US, the worker was
/// away. Microseconds.
const QUICK_US: u64 = 2_000;
const AWAY_US: u64 = 20_000;

/// The record of a worker's returns. A zeroed value is valid.
pub struct Dwell {
    /// When the worker accepted its last connection, in ticks; 0: the worker has returned since.
    accepted: AtomicU64,
    quick: AtomicU32,
}

/// How the worker behaves, as its last return shows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shown {
    Nothing,
    Quick,
    Away,
}

impl Dwell {
    #[cfg(test)]
    const fn new() -> Dwell {
        Dwell { accepted: AtomicU64::new(0), quick: AtomicU32::new(0) }
    }

    pub fn reset(&self) {
        self.accepted.put(0);
        self.quick.put(0);
    }

    /// The worker leaves with a connection.
    pub fn accepted(&self) {
        self.accepted.store(cpu::ticks().max(1), Ordering::Relaxed);
    }

    /// The worker waits for connections again.
    pub fn returned(&self) -> Shown {
        match self.accepted.swap(0, Ordering::Relaxed) {
            0 => self.shown(),
            then => self.after(cpu::ticks().wrapping_sub(then) / cpu::ticks_per_us()),
        }
    }

    fn after(&self, us: u64) -> Shown {
        if us < QUICK_US {
            self.quick.store(self.quick.load(Ordering::Relaxed).saturating_add(1), Ordering::Relaxed);
        } else if us < AWAY_US {
            self.quick.store(self.quick.load(Ordering::Relaxed) / 2, Ordering::Relaxed);
        } else {
            self.quick.store(0, Ordering::Relaxed);
            return Shown::Away;
        }
        self.shown()
    }

    fn shown(&self) -> Shown {
        if self.quick.load(Ordering::Relaxed) >= PROBATION {
            Shown::Quick
        } else {
            Shown::Nothing
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trust_is_earned_slowly_and_lost_at_once() {
        let p = Dwell::new();
        for _ in 1..PROBATION {
            assert_eq!(p.after(10), Shown::Nothing);
        }
        assert_eq!(p.after(10), Shown::Quick);
        assert_eq!(p.after(5_000), Shown::Nothing, "half of it is gone");
        assert_eq!(p.after(1_000_000), Shown::Away);
        assert_eq!(p.after(10), Shown::Nothing);
    }
}
