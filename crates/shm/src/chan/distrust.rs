//! A peer that breaks the protocol repeatedly loses its whole channel, not only single
//! connections. So its writes can cost this process only a limited time (ADR 37).
//!
//! Code in many places detects violations, also under locks. There it only notes them;
//! [`end_broken`] ends the channel later, where no lock is held.

use super::Chan;
use crate::{ctl, stats};
use core::sync::atomic::{AtomicBool, Ordering};
use fsocket_abi::arena::Counter;
use fsocket_sys::cpu;

/// This many violations end a channel. An honest peer that is killed in the middle of an operation
/// can look like a violation, but only once or twice.
const VIOLATIONS: u32 = 8;
/// This many useless marks within a second end a channel. An honest peer sets a few for each short
/// connection whose other end is closed already, and there can be 400,000 such connections a
/// second.
const USELESS: u32 = 4_000_000;

/// Values of [`Chan::broken`].
pub const TO_BE_ENDED: u32 = 1;
pub const ANNOUNCED: u32 = 2;
pub const ENDED: u32 = 3;

pub static ANY: AtomicBool = AtomicBool::new(false);

impl Chan {
    pub(super) fn trust(&self) {
        for n in [&self.broken, &self.violations, &self.useless] {
            n.store(0, Ordering::Relaxed);
        }
    }

    /// True: no code may look at the channel any more.
    pub fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Relaxed) != 0
    }

    /// Counts a violation by the other side in one connection.
    #[cold]
    pub fn violated(&self) {
        stats::count(Counter::HostilePeer);
        if self.violations.fetch_add(1, Ordering::Relaxed) + 1 == VIOLATIONS {
            self.distrust(TO_BE_ENDED);
        }
    }

    /// Ends the channel at the first violation of this kind, because each look would find the same
    /// violation again.
    #[cold]
    pub fn broke(&self) {
        stats::count(Counter::HostilePeer);
        self.distrust(TO_BE_ENDED);
    }

    fn distrust(&self, how: u32) {
        if self.broken.compare_exchange(0, how, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            self.retired.store(true, Ordering::Release);
            ANY.store(true, Ordering::Release);
            ctl::defer();
        }
    }

    /// Counts a mark of the other side for a connection that has nothing new, or has ended.
    #[cold]
    pub fn marked_in_vain(&self) {
        let now = cpu::ticks();
        if now.wrapping_sub(self.useless_since.load(Ordering::Relaxed)) > 1_000_000 * cpu::ticks_per_us() {
            self.useless_since.store(now, Ordering::Relaxed);
            self.useless.store(0, Ordering::Relaxed);
        }
        if self.useless.fetch_add(1, Ordering::Relaxed) > USELESS {
            self.broke();
        }
    }
}

/// The monitor reports that the channel was ended: by the monitor itself, or by another process of
/// this side.
pub fn broken_elsewhere(c: &Chan) {
    c.distrust(ANNOUNCED);
}
