//! A thread takes an object out of the set it waits on (an epoll instance). Other threads can put
//! the object back while the thread sleeps.
//!
//! Taking out and putting in are system calls, so neither is one atomic step. In every
//! interleaving, the object is in the set whenever the word says "not unsubscribed".

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

    /// For a new use of this word: no object is put in or taken out.
    pub fn reset(&self) {
        self.0.store(false, Ordering::Relaxed);
    }

    /// Called only by the waiting thread: runs `take_out`, unless `may` returns false. `may` is
    /// called when all threads can see that the object is out. A thread that changes the answer of
    /// `may` calls [`Unsubscribed::resubscribe`] afterwards. So either that call finds the object
    /// out, or `may` sees the change.
    pub fn unsubscribe(&self, take_out: impl FnOnce(), may: impl FnOnce() -> bool, put_in: impl FnOnce()) {
        if self.0.swap(true, Ordering::SeqCst) {
            return;
        }
        take_out();
        // Pairs with the fence in `resubscribe`.
        fence(Ordering::SeqCst);
        // Another thread may have put the object in meanwhile, even before this thread took it
        // out.
        let stays = may() && self.0.load(Ordering::SeqCst);
        if !stays {
            self.0.store(false, Ordering::SeqCst);
            put_in();
        }
    }

    /// Called by any thread: puts the object in again.
    pub fn resubscribe(&self, put_in: impl FnOnce()) {
        // Pairs with the fence in `unsubscribe`.
        fence(Ordering::SeqCst);
        if self.0.swap(false, Ordering::SeqCst) {
            put_in();
        }
    }
}
