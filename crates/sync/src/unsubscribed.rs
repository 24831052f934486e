//! A thread that takes something out of what it waits for, and others that put it back for
//! it while it sleeps.
//!
//! Taking out and putting in are system calls, so neither side is one step. Whatever they are
//! interleaved with: while the word says "not unsubscribed", it is in.

use crate::atomic::{fence, AtomicBool, Ordering};

/// Is the thread unsubscribed?
#[derive(Debug)]
pub struct Unsubscribed(AtomicBool);

impl Unsubscribed {
    #[cfg(not(loom))]
    #[allow(clippy::new_without_default)] // only ever in statics
    pub const fn new() -> Unsubscribed {
        Unsubscribed(AtomicBool::new(false))
    }
    #[cfg(loom)]
    #[allow(clippy::new_without_default)]
    pub fn new() -> Unsubscribed {
        Unsubscribed(AtomicBool::new(false))
    }

    #[inline]
    pub fn is(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Nothing is in or out any more.
    pub fn reset(&self) {
        self.0.store(false, Ordering::Relaxed);
    }

    /// Only the thread itself: `take_out`, while it `may`. That is asked when everybody can see
    /// that it is out: who changes it then calls [`Unsubscribed::resubscribe`], and either finds the thread
    /// unsubscribed or is seen here.
    pub fn unsubscribe(&self, take_out: impl FnOnce(), may: impl FnOnce() -> bool, put_in: impl FnOnce()) {
        if self.0.swap(true, Ordering::SeqCst) {
            return;
        }
        take_out();
        // Pairs with the fence in `resubscribe`.
        fence(Ordering::SeqCst);
        // Whoever has been here meanwhile may have put it in before it was taken out.
        let stays = may() && self.0.load(Ordering::SeqCst);
        if !stays {
            self.0.store(false, Ordering::SeqCst);
            put_in();
        }
    }

    /// Any thread: it is put in again.
    pub fn resubscribe(&self, put_in: impl FnOnce()) {
        // Pairs with the fence in `unsubscribe`.
        fence(Ordering::SeqCst);
        if self.0.swap(false, Ordering::SeqCst) {
            put_in();
        }
    }
}
