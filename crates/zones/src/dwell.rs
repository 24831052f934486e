//! Whether a worker that waits in `accept`, `poll` or `select` may have a queue of
//! its own.
//!
//! A worker that serves one connection at a time is away while it does: what comes
//! to its own queue meanwhile waits for it, though others are idle. Such a worker is
//! better off with the shared queue. One that hands its connections on, or runs an
//! event loop, is back at once. So a worker gets its local listen socket after a
//! number of quick returns, and loses it when it stays away.

use crate::cow::Sparing;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use fsocket_sys::cpu;

/// Returns in a row that make a worker quick.
const PROBATION: u32 = 32;
/// A return is quick below this, and the worker was away above that: microseconds.
const QUICK_US: u64 = 2_000;
const AWAY_US: u64 = 20_000;

/// Zero is valid.
pub struct Dwell {
    /// When the last connection was accepted; 0: it has been back since.
    accepted: AtomicU64,
    quick: AtomicU32,
}

/// What a worker that comes back has shown itself to be.
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

    /// It leaves with a connection.
    pub fn accepted(&self) {
        self.accepted.store(cpu::ticks().max(1), Ordering::Relaxed);
    }

    /// It waits again.
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
