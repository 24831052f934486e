//! Both ends of a connection go over to another path at one moment, or neither does.
//!
//! There is a moment for it only while the stream is at rest: both ends report the same bytes,
//! and no thread is inside a call on either ([`Calls`]). The opener says what has passed and
//! offers; the accepter, whose calls are kept out as well, compares and takes; the opener looks
//! once more and decides. Whoever gives up first says so in the same word, by compare-and-swap.

use crate::atomic::{AtomicU32, Ordering};

const GOING: u32 = 1 << 31;
const NEVER: u32 = 1 << 30;

/// The calls on one end that are under way, and whether it is being decided.
#[repr(transparent)]
#[derive(Debug, Default)]
pub struct Calls(AtomicU32);

/// How a call may go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entry {
    /// It is counted: [`Calls::leave`] follows.
    Counted,
    /// It is being decided; ask again in a moment.
    Wait,
    /// This end will never go over.
    Never,
}

impl Calls {
    pub fn reset(&self) {
        self.0.store(0, Ordering::Relaxed);
    }
    /// Before a call on the old path. Once counted, the caller must look whether it has gone
    /// over in between.
    pub fn enter(&self) -> Entry {
        loop {
            let now = self.0.load(Ordering::Acquire);
            if now & NEVER != 0 {
                return Entry::Never;
            }
            if now & GOING != 0 {
                return Entry::Wait;
            }
            // Acquire pairs with the release in `decided`: which path it is.
            if self.0.compare_exchange(now, now + 1, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                return Entry::Counted;
            }
        }
    }
    pub fn leave(&self) {
        // Release: what the call did, before a decision.
        self.0.fetch_sub(1, Ordering::Release);
    }
    /// Keeps calls out, unless one is under way. True: [`Calls::decided`] follows.
    pub fn decide(&self) -> bool {
        self.0.compare_exchange(0, GOING, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }
    /// `never`: nor will it be tried again.
    pub fn decided(&self, never: bool) {
        // Release: the new path, for who enters next.
        self.0.store(if never { NEVER } else { 0 }, Ordering::Release);
    }
    /// It stays as it is. False: that is just being decided.
    pub fn forbid(&self) -> bool {
        let now = self.0.load(Ordering::Acquire);
        now & GOING == 0 && self.0.compare_exchange(now, now | NEVER, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }
    pub fn never(&self) -> bool {
        self.0.load(Ordering::SeqCst) & NEVER != 0
    }
}

/// Values of the word between the two ends; different for each use of the word.
#[derive(Debug, Clone, Copy)]
pub struct Steps {
    pub offered: u32,
    pub taken: u32,
    pub over: u32,
    pub refused: u32,
}

/// Sleep and wake on the word. A sleep may end at any time.
pub trait Env {
    /// While the word has this value, but not for ever.
    fn wait_while(&self, word: &AtomicU32, value: u32);
    fn wake(&self, word: &AtomicU32);
}

/// The opener, whose calls are kept out and who has written down what has passed. `tell`: the
/// other end hears of it, or false. `still`: is that still all that has passed? True: both
/// go over.
pub fn open(
    word: &AtomicU32,
    s: Steps,
    env: &impl Env,
    tell: impl FnOnce() -> bool,
    still: impl FnOnce() -> bool,
) -> bool {
    // Release: what was written down, for the acquire in `taken`'s caller.
    word.store(s.offered, Ordering::Release);
    if tell() {
        env.wait_while(word, s.offered);
    }
    // Acquire: what the other end did before it took it.
    let go = word.load(Ordering::Acquire) == s.taken && still();
    let end = if go { s.over } else { s.refused };
    let done = go && word.compare_exchange(s.taken, end, Ordering::AcqRel, Ordering::Acquire).is_ok();
    if !done {
        // Whoever takes it now, or has, finds that it is over.
        word.store(s.refused, Ordering::Release);
    }
    env.wake(word);
    done
}

/// The accepter, whose calls are kept out and who has found that the same has passed. True: both
/// go over.
pub fn take(word: &AtomicU32, s: Steps, env: &impl Env) -> bool {
    let step = |from, to| word.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire);
    if step(s.offered, s.taken).is_err() {
        return false;
    }
    env.wake(word);
    env.wait_while(word, s.taken);
    step(s.taken, s.refused) == Err(s.over)
}

/// The accepter does not.
pub fn refuse(word: &AtomicU32, s: Steps, env: &impl Env) {
    let _ = word.compare_exchange(s.offered, s.refused, Ordering::AcqRel, Ordering::Relaxed);
    env.wake(word);
}
