//! A peer that breaks the protocol again and again loses its channel, not one connection after
//! the other: what it writes costs us a bounded time (ADR 37).
//!
//! A violation is noticed on all kinds of paths, under locks too. There it is only written down;
//! [`end_broken`] does the rest where nothing is held.

use super::Chan;
use crate::{ctl, stats};
use core::sync::atomic::{AtomicBool, Ordering};
use fsocket_abi::arena::Counter;
use fsocket_sys::cpu;

/// So many violations end a channel. An honest peer that dies or is killed in the middle of something
/// can look like one that breaks the protocol, once or twice.
const VIOLATIONS: u32 = 8;
/// So many useless marks in a second do. An honest peer sets some for each short connection, whose
/// other end may be closed already, and there are 400,000 of those in a second.
const USELESS: u32 = 4_000_000;

/// [`Chan::broken`].
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

    /// Is it not to be looked at any more?
    pub fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Relaxed) != 0
    }

    /// The other side has broken the protocol in one connection.
    #[cold]
    pub fn violated(&self) {
        stats::count(Counter::HostilePeer);
        if self.violations.fetch_add(1, Ordering::Relaxed) + 1 == VIOLATIONS {
            self.distrust(TO_BE_ENDED);
        }
    }

    /// It has done what would be found again with each look: once is enough.
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

    /// The other side has marked a connection in which nothing is new, or that is over.
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

/// The monitor says that another process of this side has ended the channel, or that it has itself.
pub fn broken_elsewhere(c: &Chan) {
    c.distrust(ANNOUNCED);
}
