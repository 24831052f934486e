//! Sleep and wake without a fence on the sender's fast path.
//!
//! The sleeper *arms* a [`Want`] word that the sender reads after every
//! publication. The race is the classic one (Dekker): sender stores data then
//! loads the want word; sleeper stores the want word then loads data. One of
//! the two must see the other. The sender runs a million times a second and the
//! sleeper only before it sleeps, so the whole price is put on the sleeper: it
//! runs a heavy fence (`membarrier`) between arming and its last check.

use crate::atomic::{AtomicU32, AtomicU64, Ordering};
use crate::light_fence;

/// Bit of a [`Want`] mask that stands for threads blocked on [`Want::seq`].
pub const FUTEX_BIT: u64 = 1 << 63;

/// Who wants to hear of the next change; written by sleepers, read by the
/// other side after each publication. Bits 0..=62 name waiters of the channel
/// side, bit 63 ([`FUTEX_BIT`]) says that somebody sleeps on `seq`.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct Want {
    mask: AtomicU64,
    /// Futex word; bumped before each futex wake.
    pub seq: AtomicU32,
    /// When the publisher told waiters last, in ticks of the CPU's counter; 0: not said. A hint,
    /// for the order of several that are told of.
    pub told: AtomicU64,
}

impl Want {
    /// Sleeper: ask to be told. The caller must run a heavy fence and check
    /// its condition again before it sleeps.
    #[inline]
    pub fn arm(&self, bits: u64) {
        // Relaxed: ordered against the later check by the heavy fence; pairs
        // with the load in `take`.
        self.mask.fetch_or(bits, Ordering::Relaxed);
    }

    /// Sleeper: no longer interested. A wake that is already on its way may
    /// still arrive.
    #[inline]
    pub fn disarm(&self, bits: u64) {
        self.mask.fetch_and(!bits, Ordering::Relaxed);
    }

    /// What is armed now; a hint.
    #[inline]
    pub fn armed(&self) -> u64 {
        self.mask.load(Ordering::Relaxed)
    }

    /// Publisher, after its release store: whom to wake. Zero almost always,
    /// at the price of one load of a line that nobody writes.
    #[inline(always)]
    pub fn take(&self) -> u64 {
        light_fence();
        if self.mask.load(Ordering::Relaxed) == 0 {
            return 0;
        }
        // AcqRel: the release makes the publication visible to a sleeper that
        // re-arms after us.
        self.mask.swap(0, Ordering::AcqRel)
    }

    /// Forget everything; only while no other party uses the word.
    pub fn reset(&self) {
        self.mask.store(0, Ordering::Relaxed);
    }
}
