//! Sleep and wake without a fence on the sender's fast path.
//!
//! The sleeper *arms* a [`Want`] word that the sender reads after every
//! publication. The race is the classic one (Dekker): the sender stores data, then
//! loads the word; the sleeper stores the word, then loads data. One of the two
//! must see the other, so both need a full fence in between.
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
//! - A sender that loads 0 did so before SLEEPY was set or after it was cleared. Before: the heavy
//!   fence came after that load, so the data was visible before CONFIRMED was, hence to every
//!   sleeper that finds CONFIRMED. After: a sleeper that arms now finds 0 and runs a heavy fence.
//! - The word is cleared by one compare-exchange from exactly SLEEPY and CONFIRMED: never with a
//!   sleeper in it, and never while a heavy fence is outstanding.
//! - Only the sleeper that set SLEEPY confirms it. Until then nobody clears it, so it cannot
//!   confirm a later sleeper's. If it is killed before that, the word stays as it is: each
//!   sleeper then pays a heavy fence and each sender a light one, and nothing is lost.
//! - The next connection of a slot begins with the word confirmed, or with 0 ([`Want::renew`]). Its senders
//!   come after that, so none of them has loaded an earlier 0.
//!
//! A hostile peer can write anything here. It can lose wake-ups of its own connection
//! with this side, as it could by not waking at all.

use crate::atomic::{fence, AtomicU32, AtomicU64, Ordering};
use crate::light_fence;
use crate::step::Step;

/// Bit of a [`Want`] mask that stands for threads blocked on [`Want::seq`].
pub const FUTEX_BIT: u64 = 1 << 63;
/// Somebody has slept lately: senders fence.
const SLEEPY: u64 = 1 << 62;
/// All senders know that.
const CONFIRMED: u64 = 1 << 61;
const STICKY: u64 = SLEEPY | CONFIRMED;
/// Waiters that a word has bits for, from bit 0 on.
pub const BITS: usize = 61;

/// Publications without a sleeper after which senders stop to fence.
pub const QUIET: u32 = if cfg!(loom) { 1 } else { 64 };

/// Who wants to hear of the next change; written by sleepers, read by the
/// other side after each publication. Bits 0..=60 name waiters of the channel
/// side, bit 63 ([`FUTEX_BIT`]) says that somebody sleeps on `seq`, bits 61 and 62 that
/// senders must fence.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct Want {
    mask: AtomicU64,
    /// Futex word; bumped before each futex wake.
    pub seq: AtomicU32,
    /// Publications that found no sleeper since one was there; senders only. A hint.
    quiet: AtomicU32,
    /// When the publisher told waiters last, in ticks of the CPU's counter; 0: not said. A hint,
    /// for the order of several that are told of.
    pub notified_at: AtomicU64,
}

/// The fence that a sleeper must run between arming and its last look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Armed {
    /// `fence(SeqCst)`: senders fence as well.
    Confirmed,
    /// A heavy one: not all senders know yet.
    Unconfirmed,
    /// A heavy one, and then [`Want::confirm`].
    First,
}

impl Want {
    /// Sleeper: ask to be told. The caller must run the fence that is returned and check its
    /// condition again before it sleeps. Most use [`Want::arm_and_fence`] or [`Batch`].
    #[inline]
    pub fn arm(&self, bits: u64) -> Armed {
        // Acquire: what the heavy fence of the sleeper that confirmed made visible. Release: with
        // the bits, what the sleeper said about them (`space_at`).
        let old = self.mask.fetch_or(bits | SLEEPY, Ordering::AcqRel);
        match (old & SLEEPY != 0, old & CONFIRMED != 0) {
            (true, true) => Armed::Confirmed,
            (true, false) => Armed::Unconfirmed,
            (false, _) => Armed::First,
        }
    }

    /// Sleeper that has armed [`Armed::First`] and run its heavy fence. The connection that the word
    /// belongs to must be the same still.
    #[inline]
    pub fn confirm(&self) {
        // Release: behind the heavy fence; pairs with the acquire in `arm`.
        self.mask.fetch_or(CONFIRMED, Ordering::Release);
    }

    /// Sleeper: [`Want::arm`] and what must follow.
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

    /// Ask to be told without a fence: the next publication may miss it. For who looks anyway, and
    /// wants to know since when something is there.
    #[inline]
    pub fn hint(&self, bits: u64) {
        self.mask.fetch_or(bits, Ordering::Relaxed);
    }

    /// Sleeper: no longer interested. A wake that is already on its way may
    /// still arrive.
    #[inline]
    pub fn disarm(&self, bits: u64) {
        self.mask.fetch_and(!(bits & !STICKY), Ordering::Relaxed);
    }

    /// Who is armed now; a hint.
    #[inline]
    pub fn armed(&self) -> u64 {
        self.mask.load(Ordering::Relaxed) & !STICKY
    }

    /// Publisher, after its release store: is nobody to be told? The fast path; otherwise
    /// [`Want::take`] or [`Want::waiting`] say more.
    #[inline(always)]
    pub fn is_silent(&self) -> bool {
        light_fence();
        self.mask.load(Ordering::Relaxed) == 0
    }

    /// Publisher, after its release store: whom to wake. Zero almost always,
    /// at the price of one load of a line that nobody writes.
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
        // AcqRel: the release makes the publication visible to a sleeper that
        // re-arms after us.
        self.mask.fetch_and(STICKY, Ordering::AcqRel) & !STICKY
    }

    /// Publisher, after [`Want::waiting`]: takes one of these, which no other publisher wakes then. False: another has.
    pub fn claim(&self, bit: u64) -> bool {
        // AcqRel: as in `take_armed`.
        self.mask.fetch_and(!(bit & !STICKY), Ordering::AcqRel) & bit != 0
    }

    /// Publisher that wakes on a condition of its own: who is armed. They stay so.
    pub fn waiting(&self) -> u64 {
        let mut seen = self.mask.load(Ordering::Acquire);
        if seen & SLEEPY != 0 && !leaves_out(Step::SenderFence) {
            // The sleeper's fence may not be a heavy one.
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

    /// A publication found nobody asleep.
    fn was_quiet(&self, seen: u64) {
        // Not exact with several senders, which only matters for when.
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

    /// For the next connection, while no other party uses the word; what that one's parties do is behind this.
    ///
    /// A word that all senders know stays confirmed: they find it so, and fence. So connections that follow each other in one
    /// slot do not pay for a heavy fence each. A sender of the last connection that comes late clears the
    /// word as any other sender may, or is too early, and nobody has read what it wrote.
    pub fn renew(&self) {
        // Acquire, release: as in `arm` and `confirm`, for a sleeper that finds it confirmed.
        let known = self.mask.load(Ordering::Acquire) & STICKY;
        self.mask.store(if known == STICKY { STICKY } else { 0 }, Ordering::Release);
        self.quiet.store(0, Ordering::Relaxed);
    }
}

/// Words that one sleeper arms before one fence.
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

    /// The word's connection must stay the same until [`Batch::fence`].
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

    /// What was armed so far has had its fence when this returns.
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

#[cfg(loom)]
use crate::model::leaves_out;
#[cfg(not(loom))]
#[inline(always)]
fn leaves_out(_: Step) -> bool {
    false
}
