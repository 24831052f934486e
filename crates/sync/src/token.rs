//! Tokens: the right to use one direction of a stream, biased to one thread.
//!
//! One thread owns a direction at first and enters without an atomic
//! read-modify-write and without a fence: it raises its own `in_flight` flag and
//! looks again whether it still owns. Another thread that wants in marks the
//! owner word and runs a heavy fence: after that, either the old owner's flag
//! is visible to it, or the old owner will see that it lost the token. From
//! then on everybody, the old owner included, uses an ordinary lock. Nobody
//! waits for a thread that is not inside an operation, and nobody sleeps while
//! inside one.
//!
//! The flag is a number: *inside* is who has written there anything but the token's *position*, where
//! in the stream it stands. So an operation that knows where it will end writes that, and is
//! outside by moving the position there, which it has to do anyway.
//!
//! The owner may also leave itself a *credit* for operations to come: a word that it sets while
//! inside, and that whoever takes over clears. An operation on credit raises the flag and looks
//! at that word, which it needs anyway, instead of at the owner's.
//!
//! Values of the owner word, in the order in which it takes them: 0 (nobody
//! yet), `me` of the first thread, `me | REVOKING` while somebody takes over,
//! [`SHARED`] for ever. An owner that leaves for good gives the token back
//! ([`Entered::give_back`]): 0 again.

use crate::atomic::{AtomicU64, Ordering};
use crate::light_fence;

/// Owner value: use the lock.
const SHARED: u64 = 1;
/// Bit of the owner word beside the old owner's identity: somebody takes over;
/// whoever finds this helps. The identity stays, so that a signal handler on
/// top of the old owner does not wait for itself.
const REVOKING: u64 = 1;

/// The calling thread is already inside: a signal handler interrupted it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reentered;

/// [`Words::in_flight`] of who cannot say where it will end. No position.
const ENTERED: u64 = u64::MAX;

/// The words of a token. All zero: nobody has ever entered.
pub trait Words {
    /// See the module's description.
    fn owner(&self) -> &AtomicU64;
    /// Not [`Words::position`]: the owner is inside. Written by the owner only, and not looked at any
    /// more once the lock is used.
    fn in_flight(&self) -> &AtomicU64;
    /// Written inside only, and by releases. Not [`u64::MAX`].
    fn position(&self) -> &AtomicU64;
    /// The lock: identity of its holder, or 0.
    fn shared(&self) -> &AtomicU64;
    /// Clears the credit. The owner does so as well before it changes what the credit is about.
    fn withdraw(&self);
}

/// What the protocol needs of the system.
pub trait Env {
    /// The other half of [`light_fence`]: `membarrier`.
    fn heavy_fence();
    /// Called while waiting for a thread that is inside, for the `turn`-th time.
    fn pause(turn: u32);
    /// A bias was revoked.
    fn took_over() {}
}

/// Entered; leaves on drop.
pub struct Entered<'a, W: Words> {
    w: &'a W,
    shared: bool,
}

/// Entered by the owner, whose the token still is; leaves on drop. A type of its own, so
/// that leaving needs no look at how one came in.
pub struct Owned<'a, W: Words>(&'a W);

impl<W: Words> Drop for Owned<'_, W> {
    #[inline(always)]
    fn drop(&mut self) {
        leave(self.0);
    }
}

/// An operation on credit that has not been begun; drop: it will not be.
pub struct OnCredit<'a, W: Words>(&'a W);

impl<W: Words> OnCredit<'_, W> {
    /// There is credit. From here on one is inside, until one moves the position to where one has said; by
    /// a release, as in [`leave`], and as the last of what one does.
    #[inline(always)]
    pub fn begin(self) {
        core::mem::forget(self);
    }
}

/// What was begun ([`OnCredit::begin`]) cannot be done: the position stays where it is, and one is outside.
#[inline(always)]
pub fn not_done<W: Words>(w: &W) {
    drop(OnCredit(w));
}

impl<W: Words> Drop for OnCredit<'_, W> {
    #[inline(always)]
    fn drop(&mut self) {
        // What was said may be the position by now, if signal handlers have moved it before they could
        // see it. One more must not do so between the two accesses of `leave`.
        self.0.in_flight().store(ENTERED, Ordering::Relaxed);
        light_fence();
        leave(self.0);
    }
}

/// Is the owner inside? Says nothing once the lock is used; but who then looks at the owner word sees that.
pub fn in_critical_section<W: Words>(w: &W) -> bool {
    // In this order: who has written what is read first is outside when the position is there; and
    // what it enters next it does after that load, so that it sees what was stored before.
    // Acquire pairs with the release in `leave`, and with those that move the position.
    let in_flight = w.in_flight().load(Ordering::Acquire);
    in_flight != w.position().load(Ordering::Acquire)
}

/// By the owner, inside.
#[inline(always)]
fn leave<W: Words>(w: &W) {
    // Release: what was done inside, for the acquire of whoever enters next.
    w.in_flight().store(w.position().load(Ordering::Relaxed), Ordering::Release);
}

/// The common case of [`enter`]: the token is this thread's, and nobody takes over.
#[inline(always)]
pub fn enter_owned<W: Words>(w: &W, me: u64) -> Option<Owned<'_, W>> {
    if w.owner().load(Ordering::Relaxed) != me {
        return None;
    }
    let owned = enter_on_credit(w)?;
    (w.owner().load(Ordering::Relaxed) == me).then_some(owned)
}

/// The same by the thread that left the credit. It is inside if it finds the credit not cleared;
/// if it does, it leaves at once. Another thread must not call it: `in_flight` is the owner's alone.
#[inline(always)]
pub fn enter_on_credit<W: Words>(w: &W) -> Option<Owned<'_, W>> {
    if w.in_flight().load(Ordering::Relaxed) != w.position().load(Ordering::Relaxed) {
        return None;
    }
    w.in_flight().store(ENTERED, Ordering::Relaxed);
    light_fence();
    Some(Owned(w))
}

/// [`enter_on_credit`] for an operation that moves the position from where it is, `from`, `to` somewhere else.
#[inline(always)]
pub fn on_credit<W: Words>(w: &W, from: u64, to: u64) -> Option<OnCredit<'_, W>> {
    if w.in_flight().load(Ordering::Relaxed) != from {
        return None;
    }
    w.in_flight().store(to, Ordering::Relaxed);
    light_fence();
    let inside = OnCredit(w);
    // Not if a signal handler has moved it before it could see that.
    (w.position().load(Ordering::Relaxed) == from).then_some(inside)
}

/// Enter as thread `me`: a non-zero even number that no other thread has.
/// Waits for a thread that is inside.
#[inline(always)]
pub fn enter<E: Env, W: Words>(w: &W, me: u64) -> Result<Entered<'_, W>, Reentered> {
    match enter_owned(w, me) {
        Some(o) => {
            core::mem::forget(o);
            Ok(Entered { w, shared: false })
        }
        None => enter_slowly::<E, W>(w, me),
    }
}

#[cold]
#[inline(never)]
fn enter_slowly<E: Env, W: Words>(w: &W, me: u64) -> Result<Entered<'_, W>, Reentered> {
    loop {
        // Acquire pairs with the release of whoever wrote the value.
        match w.owner().load(Ordering::Acquire) {
            0 => {
                let _ = w.owner().compare_exchange(0, me, Ordering::AcqRel, Ordering::Relaxed);
            }
            SHARED => return lock::<E, W>(w, me),
            o if o & !REVOKING == me && in_critical_section(w) => {
                // Unless another has taken over just now, which none does while we are inside.
                if w.owner().load(Ordering::Acquire) != SHARED {
                    return Err(Reentered);
                }
            }
            o if o == me => {
                if let Some(o) = enter_owned(w, me) {
                    core::mem::forget(o);
                    return Ok(Entered { w, shared: false });
                }
            }
            o => {
                let marked = o | REVOKING;
                if o != marked {
                    if w.owner().compare_exchange(o, marked, Ordering::AcqRel, Ordering::Relaxed).is_err() {
                        continue;
                    }
                    E::took_over();
                }
                // Seeing the flag down once is enough: raised later, the owner
                // finds that it lost the token. Once another has taken over the position moves, and
                // the flag says nothing.
                let outside = || !in_critical_section(w) || w.owner().load(Ordering::Acquire) == SHARED;
                E::heavy_fence();
                wait::<E>(outside);
                // From here on nobody gives credit; who raises the flag later finds none.
                w.withdraw();
                E::heavy_fence();
                wait::<E>(outside);
                let _ = w.owner().compare_exchange(marked, SHARED, Ordering::AcqRel, Ordering::Relaxed);
            }
        }
    }
}

fn lock<E: Env, W: Words>(w: &W, me: u64) -> Result<Entered<'_, W>, Reentered> {
    if w.shared().load(Ordering::Relaxed) == me {
        return Err(Reentered);
    }
    // Acquire pairs with the release in `drop`.
    wait::<E>(|| w.shared().compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed).is_ok());
    Ok(Entered { w, shared: true })
}

fn wait<E: Env>(mut done: impl FnMut() -> bool) {
    let mut turn = 0u32;
    while !done() {
        turn = turn.saturating_add(1);
        E::pause(turn);
    }
}

impl<W: Words> Entered<'_, W> {
    /// Leaves, and for good: the next one that enters owns the token as if nobody had before. `me` has
    /// withdrawn its credit while inside, and does not enter on credit again.
    pub fn give_back(self, me: u64) {
        let (w, shared) = (self.w, self.shared);
        drop(self);
        if !shared {
            // Fails where somebody takes over. Release: what was done inside, for the acquire of the
            // exchange by which the next one becomes the owner.
            let _ = w.owner().compare_exchange(me, 0, Ordering::Release, Ordering::Relaxed);
        }
    }
}

impl<W: Words> Drop for Entered<'_, W> {
    #[inline(always)]
    fn drop(&mut self) {
        if self.shared {
            // Release: as in `leave`.
            self.w.shared().store(0, Ordering::Release);
        } else {
            leave(self.w);
        }
    }
}

/// Nobody has ever entered: values for a recycled token that no thread uses.
pub fn reset<W: Words>(w: &W) {
    w.owner().store(0, Ordering::Relaxed);
    w.in_flight().store(w.position().load(Ordering::Relaxed), Ordering::Relaxed);
    w.shared().store(0, Ordering::Relaxed);
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Token([AtomicU64; 4]);
    impl Words for Token {
        fn owner(&self) -> &AtomicU64 {
            &self.0[0]
        }
        fn in_flight(&self) -> &AtomicU64 {
            &self.0[1]
        }
        fn shared(&self) -> &AtomicU64 {
            &self.0[2]
        }
        fn position(&self) -> &AtomicU64 {
            &self.0[3]
        }
        fn withdraw(&self) {}
    }
    struct Alone;
    impl Env for Alone {
        fn heavy_fence() {}
        fn pause(_: u32) {
            panic!("waits for itself");
        }
    }
    const ME: u64 = 16;
    const OTHER: u64 = 32;

    #[test]
    fn a_signal_handler_is_told_not_to_wait() {
        let t = Token::default();
        let inside = enter::<Alone, _>(&t, ME).ok();
        assert!(inside.is_some());
        assert_eq!(enter::<Alone, _>(&t, ME).err(), Some(Reentered), "as owner");
        // Another thread has begun to take over and waits for us.
        t.owner().store(ME | REVOKING, Ordering::Relaxed);
        assert_eq!(enter::<Alone, _>(&t, ME).err(), Some(Reentered), "as owner that loses the token");
        drop(inside);
        let inside = enter::<Alone, _>(&t, ME).ok();
        assert!(inside.is_some());
        assert_eq!(t.owner().load(Ordering::Relaxed), SHARED, "helped the other thread");
        assert_eq!(enter::<Alone, _>(&t, ME).err(), Some(Reentered), "as holder of the lock");
    }

    #[test]
    fn a_signal_handler_on_top_of_a_call_on_credit_is_told_so_too() {
        let t = Token::default();
        drop(enter::<Alone, _>(&t, ME));
        let inside = on_credit(&t, 0, 24);
        assert!(inside.is_some());
        assert_eq!(enter::<Alone, _>(&t, ME).err(), Some(Reentered));
        assert!(on_credit(&t, 0, 24).is_none() && enter_on_credit(&t).is_none());
        drop(inside);
        on_credit(&t, 0, 24).expect("nobody is inside").begin();
        assert_eq!(enter::<Alone, _>(&t, ME).err(), Some(Reentered));
        t.position().store(24, Ordering::Release);
        assert!(enter_on_credit(&t).is_some() && on_credit(&t, 24, 48).is_some());
        assert!(enter::<Alone, _>(&t, ME).is_ok());
    }

    #[test]
    fn an_idle_owner_is_not_waited_for() {
        let t = Token::default();
        drop(enter::<Alone, _>(&t, ME));
        drop(enter::<Alone, _>(&t, OTHER));
        assert_eq!(t.owner().load(Ordering::Relaxed), SHARED);
        assert!(enter::<Alone, _>(&t, ME).is_ok());
        reset(&t);
        assert!(enter::<Alone, _>(&t, OTHER).is_ok());
        assert_eq!(t.owner().load(Ordering::Relaxed), OTHER);
    }
}
