//! One queue with two kinds of takers. Some go *inside*: they block in the kernel until something
//! comes. Others must never block there, because they also wait for something else; but the queue
//! has no call that takes without blocking.
//!
//! A non-blocking taker therefore holds a lock, and takes only if something waits and no thread is
//! inside. Then no other thread can take it first. A blocking taker enters its number first and
//! checks the lock afterwards; a non-blocking taker holds the lock first and checks the entries
//! afterwards. Both use sequentially consistent accesses, so at least one of them sees the other.

use crate::atomic::{fence, AtomicU32, Ordering};

/// The threads that are inside. All bytes zero is a valid value: there are none.
#[derive(Debug)]
#[repr(C)]
pub struct Inside<const N: usize> {
    /// Numbers of threads; 0: free.
    slots: [AtomicU32; N],
    /// How often a thread has come out.
    out: AtomicU32,
}

impl<const N: usize> Default for Inside<N> {
    fn default() -> Self {
        Inside { slots: core::array::from_fn(|_| AtomicU32::new(0)), out: AtomicU32::new(0) }
    }
}

impl<const N: usize> Inside<N> {
    /// Enters `me`, a non-zero thread number, and then calls `until_free`. `until_free` waits
    /// until it has seen the lock free once. Returns the place for [`Inside::leave`]. None: all
    /// places are taken, and the caller must not go inside.
    pub fn enter(&self, me: u32, until_free: impl FnOnce()) -> Option<usize> {
        let first = me as usize % N;
        let places = || (first..N).chain(0..first);
        // A thread that left by a jump out of a signal handler finds its old place again.
        let old = places().find(|i| self.slots[*i].load(Ordering::Relaxed) == me);
        let free = |i: &usize| self.slots[*i].compare_exchange(0, me, Ordering::SeqCst, Ordering::Relaxed).is_ok();
        let place = old.or_else(|| places().find(free))?;
        fence(Ordering::SeqCst);
        until_free();
        Some(place)
    }

    pub fn leave(&self, place: usize) {
        self.out.fetch_add(1, Ordering::Relaxed);
        self.slots[place].store(0, Ordering::Release);
    }

    /// How often a thread has come out.
    pub fn out(&self) -> u32 {
        self.out.load(Ordering::Relaxed)
    }

    /// Is no thread inside? Called by the holder of the lock. Removes entries of threads that have
    /// died.
    pub fn is_empty(&self, is_alive: impl Fn(u32) -> bool) -> bool {
        fence(Ordering::SeqCst);
        let is_free = |slot: &AtomicU32| match slot.load(Ordering::SeqCst) {
            0 => true,
            who if is_alive(who) => false,
            who => slot.compare_exchange(who, 0, Ordering::SeqCst, Ordering::Relaxed).is_ok(),
        };
        self.slots.iter().all(is_free)
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[test]
    fn a_thread_has_one_place() {
        let inside = Inside::<2>::default();
        assert_eq!(inside.enter(3, || ()), Some(1));
        assert_eq!(inside.enter(3, || ()), Some(1), "it did not leave");
        assert_eq!(inside.enter(5, || ()), Some(0));
        assert_eq!(inside.enter(7, || ()), None);
        assert!(!inside.is_empty(|_| true));
        inside.leave(1);
        assert_eq!((inside.enter(7, || ()), inside.out()), (Some(1), 1));
    }

    #[test]
    fn the_dead_are_not_inside() {
        let inside = Inside::<2>::default();
        inside.enter(3, || ());
        inside.enter(4, || ());
        assert!(!inside.is_empty(|who| who == 4));
        assert!(inside.is_empty(|_| false));
        assert!(inside.is_empty(|_| true), "their places are free");
    }
}
