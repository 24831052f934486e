//! Sleep and wake without a fence on the sender's fast path.
//!
//! The sleeper *arms* a [`Want`] word that the sender reads after every
//! publication. It is the classic race (Dekker): the sender stores data, then loads the word; the
//! sleeper stores the word, then loads data. One of the two must see the other, so both need a full
//! fence in between.
//!
//! While nobody sleeps the word is 0, and a sender pays one load. The first sleeper
//! sets SLEEPY and runs a heavy fence (`membarrier`), which is a fence on all senders
//! at once; then it sets CONFIRMED. From then on each sender that sees SLEEPY fences by
//! itself, and a sleeper that finds CONFIRMED needs no heavy fence. After [`QUIET`]
//! publications that found no sleeper a sender sets the word back to 0. So the
//! heavy fence is paid at most once for that many publications.
//!
//! Why nothing is lost (`model/doorbell.rs` checks it):
//!
//! - A sender loaded 0 either before SLEEPY was set or after it was cleared. Before: the heavy
//!   fence came after that load, so the data was visible before CONFIRMED was, hence to every
//!   sleeper that finds CONFIRMED. After: a sleeper that arms now finds 0 and runs a heavy fence.
//! - The word is cleared by one compare-exchange from exactly SLEEPY and CONFIRMED: never with a
//!   sleeper in it, and never during a heavy fence.
//! - Only the sleeper that set SLEEPY confirms it. Until then no sender clears SLEEPY, so a sleeper
//!   cannot confirm the SLEEPY of a later one. A sleeper that is killed before it confirms leaves
//!   the word unconfirmed. Then each later sleeper pays a heavy fence and each sender an ordinary
//!   one, and nothing is lost.
//! - When a slot gets its next connection, the word begins as confirmed, or as 0 ([`Want::renew`]).
//!   Senders of that connection start later, so none of them has loaded an earlier 0.
//!
//! A hostile peer can write anything here. It can only suppress wake-ups for its own connection
//! with this side, which it could also do by never waking this side.

use crate::atomic::{fence, AtomicU32, AtomicU64, Ordering};
use crate::light_fence;
use crate::omit::leaves_out;
use crate::step::Step;

/// Bit of a [`Want`] mask that stands for threads blocked on [`Want::seq`].
pub const FUTEX_BIT: u64 = 1 << 63;
/// A thread has slept lately, so senders run a fence.
const SLEEPY: u64 = 1 << 62;
/// All senders know that they must run a fence.
const CONFIRMED: u64 = 1 << 61;
const STICKY: u64 = SLEEPY | CONFIRMED;
/// The number of waiters that a word has bits for, from bit 0 on.
pub const BITS: usize = 61;

/// After this many publications without a sleeper, senders stop running fences.
pub const QUIET: u32 = if cfg!(loom) { 1 } else { 64 };

/// The waiters that ask to be woken at the next change. Sleepers write the word, and the other side
/// reads it after each publication. Bits 0..=60 name waiters of the channel side. Bit 63
/// ([`FUTEX_BIT`]) says that a thread sleeps on `seq`. Bits 61 and 62 say that senders must fence.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct Want {
    mask: AtomicU64,
    /// Futex word; bumped before each futex wake.
    pub seq: AtomicU32,
    /// Number of publications that found no sleeper, since the last one that did; only senders
    /// write it. It is a hint.
    quiet: AtomicU32,
    /// When the publisher last notified waiters, in ticks of the CPU's counter; 0: unknown. A hint
    /// for the order of several notifications.
    pub notified_at: AtomicU64,
}

/// The fence that a sleeper must run between arming and its last look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Armed {
    /// `fence(SeqCst)` is enough, because the senders run one, too.
    Confirmed,
    /// A heavy fence, because some senders may not know yet that they must fence.
    Unconfirmed,
    /// A heavy fence, and then [`Want::confirm`].
    First,
}

impl Want {
    /// Called by the sleeper: asks for a wake-up. The caller must run the fence that is returned and
    /// check its condition again before it sleeps. Most callers use [`Want::arm_and_fence`] or
    /// [`Batch`], which run the fence.
    #[inline]
    pub fn arm(&self, bits: u64) -> Armed {
        // Acquire: sees what the heavy fence of the confirming sleeper made visible. Release:
        // publishes with the bits what the sleeper wrote about them (`space_at`).
        let old = self.mask.fetch_or(bits | SLEEPY, Ordering::AcqRel);
        match (old & SLEEPY != 0, old & CONFIRMED != 0) {
            (true, true) => Armed::Confirmed,
            (true, false) => Armed::Unconfirmed,
            (false, _) => Armed::First,
        }
    }

    /// Called by a sleeper that got [`Armed::First`] and has run its heavy fence. The word must
    /// still belong to the same connection.
    #[inline]
    pub fn confirm(&self) {
        // Release: after the heavy fence; pairs with the acquire in `arm`.
        self.mask.fetch_or(CONFIRMED, Ordering::Release);
    }

    /// Called by the sleeper: [`Want::arm`], and the fence that must follow.
    #[inline]
    pub fn arm_and_fence(&self, bits: u64, heavy: impl FnOnce()) {
        let armed = self.arm(bits);
        if armed == Armed::Confirmed {
            fence(Ordering::SeqCst);
            return;
        }
        if !leaves_out(Step::SleeperHeavy) {
            heavy();
        }
        if armed == Armed::First || leaves_out(Step::OnlyFirstConfirms) {
            self.confirm();
        }
    }

    /// Asks for a notification, without a fence: the next sender may not see the request. For a
    /// thread that will look anyway, and only needs the time of the publication (`notified_at`).
    #[inline]
    pub fn hint(&self, bits: u64) {
        self.mask.fetch_or(bits, Ordering::Relaxed);
    }

    /// Called by the sleeper: withdraws its request. A wake-up that is already on its way may still
    /// arrive.
    #[inline]
    pub fn disarm(&self, bits: u64) {
        self.mask.fetch_and(!(bits & !STICKY), Ordering::Relaxed);
    }

    /// The waiters that are armed now. It is a hint.
    #[inline]
    pub fn armed(&self) -> u64 {
        self.mask.load(Ordering::Relaxed) & !STICKY
    }

    /// Called by the publisher, after its release store: true if no waiter is armed. This is the
    /// fast path. If false, [`Want::take`] or [`Want::waiting`] name the waiters.
    #[inline(always)]
    pub fn is_silent(&self) -> bool {
        light_fence();
        self.mask.load(Ordering::Relaxed) == 0
    }

    /// Called by the publisher, after its release store: returns the waiters to wake, and disarms
    /// them. The result is almost always 0. Then the call costs one load of a cache line that
    /// rarely changes.
    #[inline(always)]
    pub fn take(&self) -> u64 {
        if self.is_silent() {
            return 0;
        }
        self.take_armed()
    }

    #[inline(never)]
    fn take_armed(&self) -> u64 {
        if self.waiting() == 0 {
            return 0;
        }
        // Release: a sleeper that arms again afterwards sees the publication.
        self.mask.fetch_and(STICKY, Ordering::AcqRel) & !STICKY
    }

    /// Called by the publisher, after [`Want::waiting`]: takes one of these waiters, so that no
    /// other publisher wakes the same one. False: another publisher has taken this waiter.
    pub fn claim(&self, bit: u64) -> bool {
        // AcqRel: as in `take_armed`.
        self.mask.fetch_and(!(bit & !STICKY), Ordering::AcqRel) & bit != 0
    }

    /// The armed waiters, which stay armed. For a publisher that decides itself which ones to wake.
    pub fn waiting(&self) -> u64 {
        let mut seen = self.mask.load(Ordering::Acquire);
        if seen & SLEEPY != 0 && !leaves_out(Step::SenderFence) {
            // The sleeper may have run only an ordinary fence, so this side needs one, too.
            fence(Ordering::SeqCst);
            seen = self.mask.load(Ordering::Acquire);
        }
        if seen & !STICKY == 0 {
            self.was_quiet(seen);
        } else if self.quiet.load(Ordering::Relaxed) != 0 {
            self.quiet.store(0, Ordering::Relaxed);
        }
        seen & !STICKY
    }

    /// Counts a publication that found no sleeper, and clears the word after [`QUIET`] of them.
    fn was_quiet(&self, seen: u64) {
        // The count is inexact with several senders. That only changes when the word is cleared.
        let n = self.quiet.load(Ordering::Relaxed).wrapping_add(1);
        if n < QUIET {
            self.quiet.store(n, Ordering::Relaxed);
            return;
        }
        self.quiet.store(0, Ordering::Relaxed);
        if seen == STICKY || leaves_out(Step::ClearConfirmed) && seen == SLEEPY {
            let _ = self.mask.compare_exchange(seen, 0, Ordering::AcqRel, Ordering::Relaxed);
        }
    }

    /// Prepares the word for the next connection, before a thread of that connection uses it.
    ///
    /// A confirmed word stays confirmed. So successive connections in one slot do not each pay for a
    /// heavy fence. A late sender of the last connection may still clear the word, as any sender
    /// may. If it does so before this store, no sleeper has seen the cleared word.
    pub fn renew(&self) {
        // Acquire and release, as in `arm` and `confirm`, for a sleeper that finds CONFIRMED.
        let known = self.mask.load(Ordering::Acquire) & STICKY;
        self.mask.store(if known == STICKY { STICKY } else { 0 }, Ordering::Release);
        self.quiet.store(0, Ordering::Relaxed);
    }
}

/// Arms several words for one sleeper, and then runs one fence for all of them.
#[must_use]
pub struct Batch<'a> {
    heavy: fn(),
    needs_heavy: bool,
    first: [Option<&'a Want>; Batch::FIRST],
    n: usize,
}

impl<'a> Batch<'a> {
    const FIRST: usize = if cfg!(loom) { 2 } else { 32 };

    pub const fn new(heavy: fn()) -> Self {
        Batch { heavy, needs_heavy: false, first: [None; Batch::FIRST], n: 0 }
    }

    /// Arms one word, which must belong to the same connection until [`Batch::fence`].
    pub fn arm(&mut self, want: &'a Want, bits: u64) {
        match want.arm(bits) {
            Armed::Confirmed => {}
            Armed::Unconfirmed => self.needs_heavy = true,
            Armed::First => {
                self.needs_heavy = true;
                self.first[self.n] = Some(want);
                self.n += 1;
                if self.n == Batch::FIRST {
                    self.fence();
                }
            }
        }
    }

    /// After this call, the fence has been run for all words that were armed.
    pub fn fence(&mut self) {
        if core::mem::take(&mut self.needs_heavy) {
            (self.heavy)();
        } else {
            fence(Ordering::SeqCst);
        }
        for want in self.first[..core::mem::take(&mut self.n)].iter_mut().filter_map(Option::take) {
            want.confirm();
        }
    }
}
