//! Moves both ends of a connection to another path at the same moment, or neither of them.
//!
//! This is possible only while the stream is at rest: both ends report the same byte counts, and
//! no thread is inside a call on either end ([`Calls`]).
//!
//! 1. The opener keeps calls out, writes down its byte counts, and makes an offer.
//! 2. The accepter keeps calls out, compares the counts with its own, and takes the offer.
//! 3. The opener checks that its counts have not changed, and decides.
//!
//! Either side may give up: it writes that into the same word, by compare-and-swap, and the first
//! write decides.

use crate::atomic::{AtomicU32, Ordering};

const GOING: u32 = 1 << 31;
const NEVER: u32 = 1 << 30;

/// The number of calls in progress on one end, and whether a decision is being made.
#[repr(transparent)]
#[derive(Debug, Default)]
pub struct Calls(AtomicU32);

/// Answer to a call that wants to enter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entry {
    /// The call is counted, and must call [`Calls::leave`] at its end.
    Counted,
    /// A decision is being made; the caller tries again in a moment.
    Wait,
    /// This end will never move.
    Never,
}

impl Calls {
    pub fn reset(&self) {
        self.0.store(0, Ordering::Relaxed);
    }
    /// Enters a call on the old path. A counted call must check whether the connection has moved
    /// meanwhile.
    pub fn enter(&self) -> Entry {
        loop {
            let now = self.0.load(Ordering::Acquire);
            if now & NEVER != 0 {
                return Entry::Never;
            }
            if now & GOING != 0 {
                return Entry::Wait;
            }
            // Acquire pairs with the release in `decided`: the caller sees which path is in use.
            if self.0.compare_exchange(now, now + 1, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                return Entry::Counted;
            }
        }
    }
    pub fn leave(&self) {
        // Release: a thread that decides later sees what the call did.
        self.0.fetch_sub(1, Ordering::Release);
    }
    /// Keeps new calls out, unless a call is in progress. True: the caller must call
    /// [`Calls::decided`].
    pub fn decide(&self) -> bool {
        self.0.compare_exchange(0, GOING, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }
    /// Lets calls in again. `never`: there will be no further attempt to move.
    pub fn decided(&self, never: bool) {
        // Release: publishes the new path, for later calls.
        self.0.store(if never { NEVER } else { 0 }, Ordering::Release);
    }
    /// Forbids the move for ever. False: a decision is being made at this moment.
    pub fn forbid(&self) -> bool {
        let now = self.0.load(Ordering::Acquire);
        now & GOING == 0 && self.0.compare_exchange(now, now | NEVER, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }
    pub fn never(&self) -> bool {
        self.0.load(Ordering::SeqCst) & NEVER != 0
    }
}

/// Values of the word between the two ends. Each use of the word has its own numbers.
#[derive(Debug, Clone, Copy)]
pub struct Steps {
    pub offered: u32,
    pub taken: u32,
    pub over: u32,
    pub refused: u32,
}

/// Sleeps and wakes on the word. A sleep may end at any time.
pub trait Env {
    /// Sleeps while the word has this value, for a limited time.
    fn wait_while(&self, word: &AtomicU32, value: u32);
    fn wake(&self, word: &AtomicU32);
}

/// Called by the opener after it has kept calls out and written down its byte counts. `tell`
/// informs the other end; it returns false if it cannot. `still`: are the byte counts unchanged?
/// True: both ends move.
pub fn open(
    word: &AtomicU32,
    s: Steps,
    env: &impl Env,
    tell: impl FnOnce() -> bool,
    still: impl FnOnce() -> bool,
) -> bool {
    // Release: publishes the byte counts, for the acquire in the caller of `take`.
    word.store(s.offered, Ordering::Release);
    if tell() {
        env.wait_while(word, s.offered);
    }
    // Acquire: sees what the other end did before it took the offer.
    let go = word.load(Ordering::Acquire) == s.taken && still();
    let end = if go { s.over } else { s.refused };
    let done = go && word.compare_exchange(s.taken, end, Ordering::AcqRel, Ordering::Acquire).is_ok();
    if !done {
        // An accepter that has taken the offer, or takes it now, finds that the opener has
        // refused.
        word.store(s.refused, Ordering::Release);
    }
    env.wake(word);
    done
}

/// Called by the accepter after it has kept calls out and found equal byte counts. True: both ends
/// move.
pub fn take(word: &AtomicU32, s: Steps, env: &impl Env) -> bool {
    let step = |from, to| word.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire);
    if step(s.offered, s.taken).is_err() {
        return false;
    }
    env.wake(word);
    env.wait_while(word, s.taken);
    step(s.taken, s.refused) == Err(s.over)
}

/// The accepter refuses the offer.
pub fn refuse(word: &AtomicU32, s: Steps, env: &impl Env) {
    let _ = word.compare_exchange(s.offered, s.refused, Ordering::AcqRel, Ordering::Relaxed);
    env.wake(word);
}
