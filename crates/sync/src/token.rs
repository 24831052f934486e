//! Tokens: the right to use one direction of a stream, biased towards one thread.
//!
//! One thread owns a direction at first and enters without an atomic
//! read-modify-write and without a fence: it raises its own `in_flight` flag and
//! looks again whether it still owns. Another thread that wants to enter marks the owner word and
//! runs a heavy fence. After that, either it sees the old owner's flag, or the old owner sees that
//! it has lost the token. From then on all threads, the old owner included, use an ordinary lock.
//! No thread waits for a thread outside an operation, and no thread sleeps inside one.
//!
//! The flag is a number. The owner is *inside* if and only if `in_flight` differs from the token's
//! *position* in the stream. So an operation that knows its end position writes that number into the
//! flag. When it moves the position there, which it has to do anyway, it is outside.
//!
//! The owner may also leave itself a *credit* for later operations: a word that it sets while
//! inside, and that a thread clears when it takes over. An operation on credit raises the flag and
//! looks at that word, which it needs anyway, instead of at the owner word.
//!
//! Values of the owner word, in this order: 0 (no thread yet), `me` of the first thread, `me |
//! REVOKING` while another thread takes over, [`SHARED`] for ever. An owner that leaves for good
//! gives the token back ([`Entered::give_back`]): the word is 0 again.

use crate::atomic::{AtomicU64, Ordering};
use crate::light_fence;

/// Owner value: use the lock.
const SHARED: u64 = 1;
/// Bit of the owner word beside the old owner's identity: a thread takes over, and any thread that
/// finds this bit helps. The identity stays, so that a signal handler that has interrupted the old
/// owner does not wait for itself.
const REVOKING: u64 = 1;

/// The calling thread is already inside: a signal handler interrupted it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reentered;

/// Value of [`Words::in_flight`] for an operation that does not know its end position. It is never
/// a position.
const ENTERED: u64 = u64::MAX;

/// The words of a token. All zero: no thread has ever entered.
pub trait Words {
    /// See the module's description.
    fn owner(&self) -> &AtomicU64;
    /// Different from [`Words::position`]: the owner is inside. Only the owner writes it. Once the
    /// lock is used, nothing reads it.
    fn in_flight(&self) -> &AtomicU64;
    /// Written only inside, with release. Never [`u64::MAX`].
    fn position(&self) -> &AtomicU64;
    /// The lock: identity of its holder, or 0.
    fn shared(&self) -> &AtomicU64;
    /// Clears the credit. The owner also does so before it changes what the credit depends on.
    fn withdraw(&self);
}

/// System functions that the protocol needs.
pub trait Env {
    /// The other half of [`light_fence`], by `membarrier`.
    fn heavy_fence();
    /// Called for the `turn`-th time while waiting for a thread that is inside.
    fn pause(turn: u32);
    /// A bias was revoked.
    fn took_over() {}
}

/// The thread is inside; a drop leaves.
pub struct Entered<'a, W: Words> {
    w: &'a W,
    shared: bool,
}

/// The owner is inside, and still owns the token; a drop leaves. It is a type of its own, so that
/// leaving needs no look at how the thread entered.
pub struct Owned<'a, W: Words>(&'a W);

impl<W: Words> Drop for Owned<'_, W> {
    #[inline(always)]
    fn drop(&mut self) {
        leave(self.0);
    }
}

/// An operation on credit that has not begun; after a drop it never will.
pub struct OnCredit<'a, W: Words>(&'a W);

impl<W: Words> OnCredit<'_, W> {
    /// There is credit. From here on the thread is inside, until it moves the position to the announced
    /// number. It does that with release, as in [`leave`], as its last step.
    #[inline(always)]
    pub fn begin(self) {
        core::mem::forget(self);
    }
}

/// An operation that has begun ([`OnCredit::begin`]) is impossible. The position stays where it is, and
/// the thread is outside.
#[inline(always)]
pub fn not_done<W: Words>(w: &W) {
    drop(OnCredit(w));
}

impl<W: Words> Drop for OnCredit<'_, W> {
    #[inline(always)]
    fn drop(&mut self) {
        // The announced number may be the position by now, if signal handlers have moved the position
        // before they could see the number. No further one may do so between the two accesses of
        // `leave`.
        self.0.in_flight().store(ENTERED, Ordering::Relaxed);
        light_fence();
        leave(self.0);
    }
}

/// Is the owner inside? The answer means nothing once the lock is used; but a caller that then looks at the
/// owner word sees that.
pub fn in_critical_section<W: Words>(w: &W) -> bool {
    // The order matters. A thread that has written the first value is outside when the position is
    // there. Its next entry comes after that load, so it sees what was stored before. Acquire pairs
    // with the release in `leave`, and with those that move the position.
    let in_flight = w.in_flight().load(Ordering::Acquire);
    in_flight != w.position().load(Ordering::Acquire)
}

/// Does the thread `me` own the token?
#[inline]
pub fn is_owner<W: Words>(w: &W, me: u64) -> bool {
    w.owner().load(Ordering::Relaxed) == me
}

/// Did a thread end inside? `is_dead` says which threads have ended.
pub fn died_inside<W: Words>(w: &W, is_dead: impl Fn(u64) -> bool) -> bool {
    is_dead(w.shared().load(Ordering::Acquire)) || in_critical_section(w) && is_dead(w.owner().load(Ordering::Acquire))
}

/// Threads that have ended are outside from here on, so no other thread waits for them. Their progress is unknown.
pub fn expel<W: Words>(w: &W, is_dead: impl Fn(u64) -> bool) {
    if is_dead(w.owner().load(Ordering::Acquire)) {
        leave(w);
    }
    let holder = w.shared().load(Ordering::Acquire);
    if is_dead(holder) {
        let _ = w.shared().compare_exchange(holder, 0, Ordering::AcqRel, Ordering::Relaxed);
    }
}

/// Called by the owner, inside.
#[inline(always)]
fn leave<W: Words>(w: &W) {
    // Release: publishes what was done inside, to the acquire of the next thread that enters.
    w.in_flight().store(w.position().load(Ordering::Relaxed), Ordering::Release);
}

/// The common case of [`enter`]: this thread owns the token, and no thread takes over.
#[inline(always)]
pub fn enter_owned<W: Words>(w: &W, me: u64) -> Option<Owned<'_, W>> {
    if w.owner().load(Ordering::Relaxed) != me {
        return None;
    }
    let owned = enter_on_credit(w)?;
    (w.owner().load(Ordering::Relaxed) == me).then_some(owned)
}

/// The same by the thread that left the credit. It is inside if it finds the credit not cleared;
/// otherwise it leaves at once. Only this thread may call it: `in_flight` belongs to the owner.
#[inline(always)]
pub fn enter_on_credit<W: Words>(w: &W) -> Option<Owned<'_, W>> {
    if w.in_flight().load(Ordering::Relaxed) != w.position().load(Ordering::Relaxed) {
        return None;
    }
    w.in_flight().store(ENTERED, Ordering::Relaxed);
    light_fence();
    Some(Owned(w))
}

/// [`enter_on_credit`] for an operation that moves the position from `from` to `to`.
#[inline(always)]
pub fn on_credit<W: Words>(w: &W, from: u64, to: u64) -> Option<OnCredit<'_, W>> {
    if w.in_flight().load(Ordering::Relaxed) != from {
        return None;
    }
    w.in_flight().store(to, Ordering::Relaxed);
    light_fence();
    let inside = OnCredit(w);
    // It fails if a signal handler has moved the position before it could see that.
    (w.position().load(Ordering::Relaxed) == from).then_some(inside)
}

/// Enters as thread `me`: a non-zero even number that no other thread has. Waits for a thread that
/// is inside.
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
        // Acquire pairs with the release of the thread that wrote the value.
        match w.owner().load(Ordering::Acquire) {
            0 => {
                let _ = w.owner().compare_exchange(0, me, Ordering::AcqRel, Ordering::Relaxed);
            }
            SHARED => return lock::<E, W>(w, me),
            o if o & !REVOKING == me && in_critical_section(w) => {
                // Another thread may have taken over just now; none does while this one is inside.
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
                // It is enough to see the flag down once: an owner that raises it later finds that
                // it has lost the token. Once another thread has taken over, the position moves,
                // and the flag means nothing.
                let outside = || !in_critical_section(w) || w.owner().load(Ordering::Acquire) == SHARED;
                E::heavy_fence();
                wait::<E>(outside);
                // From here on no thread gives credit, and one that raises the flag later finds
                // none.
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
    /// Leaves for good: the next thread that enters becomes the owner, as if none had entered before.
    /// `me` has withdrawn its credit while inside, and does not enter on credit again.
    pub fn give_back(self, me: u64) {
        let (w, shared) = (self.w, self.shared);
        drop(self);
        if !shared {
            // It fails if another thread takes over. Release: publishes what was done inside, to
            // the acquire of the exchange by which the next thread becomes the owner.
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

/// Sets the values for a recycled token that no thread uses: no thread has ever entered.
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
