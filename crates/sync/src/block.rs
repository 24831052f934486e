//! The loop of each wait, and how another thread ends a sleep.
//!
//! A waiter that looks, finds nothing and then sleeps would miss data that is published in
//! between. So [`block`] first *arms*: the waiter asks to be woken and runs a fence. Then it looks
//! *again*, and sleeps only if it still finds nothing. The second look finds everything that was
//! published before the fence. A later publisher finds the waiter armed, and wakes it.
//!
//! `pthread_cancel` must end a sleep even if no data comes. The canceller stores its request, runs
//! a fence, and looks for an [`Asleep`] of that thread. The sleeper notes there that it sleeps,
//! runs a fence, and looks for a request. At least one of the two sees what the other stored
//! (Dekker). The canceller may see a sleeper that has not yet reached its system call, where a
//! wake-up has no effect: so the canceller repeats the wake-up (the *poke*) until the sleeper has
//! answered.
//!
//! `model/block.rs` runs this code.

use crate::atomic::{fence, AtomicBool, Ordering};
use crate::omit::leaves_out;
use crate::step::Step;

/// A call that waits for something, as [`block`] uses it.
pub trait Wait {
    /// How a sleep ended.
    type Woken;
    /// The result of the call.
    type End;

    /// Asks to be woken, and runs a fence. Each publication after this call ends the next sleep.
    fn arm(&mut self);
    /// Returns a result if the call can end now: data is there, or there is another reason not to
    /// sleep. Must not undo what [`Wait::arm`] has set up.
    fn look(&mut self) -> Option<Self::End>;
    /// Sleeps, in the kernel.
    fn sleep(&mut self) -> Self::Woken;
    /// Undoes [`Wait::arm`], for requests that do not end by themselves when the thread wakes.
    fn disarm(&mut self) {}
    /// Called after a sleep. None: the wait continues.
    fn on_wake(&mut self, woken: Self::Woken) -> Option<Self::End>;
}

/// Waits. Between arming and sleeping there is always a look.
#[inline(always)]
pub fn block<W: Wait>(w: &mut W) -> W::End {
    loop {
        w.arm();
        let found = if leaves_out(Step::SecondLook) { None } else { w.look() };
        let end = match found {
            Some(end) => {
                w.disarm();
                Some(end)
            }
            None => {
                let woken = w.sleep();
                w.disarm();
                w.on_wake(woken)
            }
        };
        if let Some(end) = end {
            return end;
        }
    }
}

/// A thread's note that it sleeps, where other threads can find it. All bytes zero is a valid
/// value: the thread does not sleep.
#[derive(Debug, Default)]
pub struct Asleep {
    sleeps: AtomicBool,
    /// A poke is on its way: a wake-up that means nothing to the program.
    poked: AtomicBool,
}

impl Asleep {
    /// Prepares the note for another sleep. Called before other threads can find it.
    pub fn reset(&self) {
        self.sleeps.store(false, Ordering::Relaxed);
        self.poked.store(false, Ordering::Relaxed);
    }

    /// Does the thread sleep, or is it about to?
    pub fn is(&self) -> bool {
        self.sleeps.load(Ordering::Acquire)
    }

    /// Called by another thread that has stored a request for the sleeper. `poke` must end the
    /// sleeper's system call. `first` is true in the caller's first attempt. True: the sleeper may
    /// not have seen the request yet, and the caller must try again. False: the thread does not
    /// sleep, or has answered the poke.
    pub fn disturb(&self, first: bool, poke: impl FnOnce()) -> bool {
        fence(Ordering::SeqCst);
        if !self.is() {
            return false;
        }
        if first {
            self.poked.store(true, Ordering::Release);
        }
        let again = self.poked.load(Ordering::Acquire);
        if again {
            poke();
        }
        again
    }
}

/// Sleeps once by calling `f`, which fails with `eintr` if a signal ends it.
///
/// - `place`: the note by which other threads find the sleeper; None if there was no room for one.
/// - `requested`: has the thread been asked to leave? Then the sleep fails with `eintr`.
///
/// A poke without a request that the thread accepts does not end the sleep. (Exception: a poke
/// that is sent just as the sleeper answers.)
#[inline(always)]
pub fn sleep<R, E: Copy + PartialEq>(
    place: Option<&Asleep>,
    eintr: E,
    requested: impl Fn() -> bool,
    mut f: impl FnMut() -> Result<R, E>,
) -> Result<R, E> {
    if let Some(p) = place {
        p.sleeps.store(true, Ordering::Release);
        if !leaves_out(Step::SleepsFence) {
            fence(Ordering::SeqCst);
        }
    }
    loop {
        let r = if requested() { Err(eintr) } else { f() };
        let poked = place.is_some_and(|p| p.poked.swap(false, Ordering::AcqRel));
        let interrupted = matches!(&r, Err(e) if *e == eintr);
        // libc's own signal may have ended the sleep before the canceller could poke. The hook
        // only acts upon a request that was seen here.
        let leaves = interrupted && requested();
        if !(interrupted && poked && !leaves) {
            return r;
        }
    }
}
