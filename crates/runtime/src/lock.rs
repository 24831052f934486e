//! A small lock for rare paths. It knows its owner, so that a signal handler
//! that interrupts the owner gets an error instead of a deadlock.
//!
//! Threads that find it taken sleep. The owner that leaves looks whether there are any without a
//! fence (it may be on the way of every `epoll_wait`), and may so overlook one that is just coming:
//! sleeps are short.

use crate::process;
use core::cell::UnsafeCell;
use core::ops::{Deref, DerefMut};
use fsocket_sync::atomic::{AtomicU32, AtomicU64, Ordering};
use fsocket_sys as sys;

/// Looks at a lock that is taken before a thread sleeps.
const SPINS: u32 = 64;
/// The first sleep, nanoseconds: one that was overlooked looks again after it. Later ones are
/// twice as long each, so that many that wait cost little.
const FIRST_NS: u64 = 1_000_000;
const LONGEST_NS: u64 = 64_000_000;

pub struct Lock<T> {
    owner: AtomicU64,
    /// Not 0: threads sleep until it is free, or are about to.
    waiting: AtomicU32,
    /// What they sleep on; changed before each wake-up.
    freed: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached through the guard only, and one guard exists.
unsafe impl<T> Sync for Lock<T> {}

/// The calling thread already holds the lock: we are in a signal handler.
#[derive(Debug)]
pub struct Reentry;

impl<T> Lock<T> {
    pub const fn new(value: T) -> Self {
        Lock {
            owner: AtomicU64::new(0),
            waiting: AtomicU32::new(0),
            freed: AtomicU32::new(0),
            value: UnsafeCell::new(value),
        }
    }

    pub fn lock(&self) -> Result<Guard<'_, T>, Reentry> {
        let me = process::thread();
        for _ in 0..SPINS {
            match self.take(me) {
                Ok(()) => return Ok(Guard { lock: self }),
                Err(held) if held == me => return Err(Reentry),
                Err(_) => core::hint::spin_loop(),
            }
        }
        self.wait(me);
        Ok(Guard { lock: self })
    }

    /// None: it is held, perhaps by the calling thread.
    pub fn try_lock(&self) -> Option<Guard<'_, T>> {
        self.take(process::thread()).is_ok().then(|| Guard { lock: self })
    }

    /// By any thread.
    pub fn is_held(&self) -> bool {
        self.owner.load(Ordering::Relaxed) != 0
    }

    #[inline]
    fn take(&self, me: u64) -> Result<(), u64> {
        // Acquire: pairs with the release in `Guard::drop`.
        self.owner.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed).map(drop)
    }

    #[cold]
    fn wait(&self, me: u64) {
        let mut limit = FIRST_NS;
        loop {
            // Also by one that was woken: it is not known whether it was the last.
            self.waiting.store(1, Ordering::SeqCst);
            // Before the try: a wake-up that comes behind it changes the word.
            let seen = self.freed.load(Ordering::Acquire);
            if self.take(me).is_ok() {
                return;
            }
            if sys::futex_wait(&self.freed, seen, Some(limit)) == Err(sys::Errno::ETIMEDOUT) {
                limit = (limit * 2).min(LONGEST_NS);
            }
        }
    }

    /// In a forked child: no other thread exists, whoever held it is gone. True: somebody held it,
    /// and was perhaps changing the value.
    pub fn reset_after_fork(&self) -> bool {
        // Most are free, and lie in pages that nothing else writes.
        if self.waiting.load(Ordering::Relaxed) != 0 {
            self.waiting.store(0, Ordering::Relaxed);
        }
        self.is_held() && self.owner.swap(0, Ordering::AcqRel) != 0
    }
}

impl<T> Lock<T> {
    #[cold]
    fn wake(&self) {
        self.waiting.store(0, Ordering::Relaxed);
        self.freed.fetch_add(1, Ordering::Release);
        sys::futex_wake(&self.freed, 1);
    }
}

pub struct Guard<'a, T> {
    lock: &'a Lock<T>,
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: this guard is the only one.
        unsafe { &*self.lock.value.get() }
    }
}
impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: this guard is the only one.
        unsafe { &mut *self.lock.value.get() }
    }
}
impl<T> Drop for Guard<'_, T> {
    fn drop(&mut self) {
        // Release: what was done under the lock, for the next `lock`.
        self.lock.owner.store(0, Ordering::Release);
        if self.lock.waiting.load(Ordering::Relaxed) != 0 {
            self.lock.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use std::sync::Barrier;

    /// Threads are told apart as in a process with the library.
    #[test]
    fn many_threads_pass_one_after_the_other() {
        static LOCK: Lock<u64> = Lock::new(0);
        const THREADS: u64 = 64;
        const TURNS: u64 = 500;
        let begin = Barrier::new(THREADS as usize);
        std::thread::scope(|s| {
            for _ in 0..THREADS {
                s.spawn(|| {
                    begin.wait();
                    for _ in 0..TURNS {
                        let mut n = LOCK.lock().expect("no handler here");
                        let seen = *n;
                        core::hint::black_box(&seen);
                        *n = seen + 1;
                    }
                });
            }
        });
        assert_eq!(*LOCK.lock().unwrap(), THREADS * TURNS);
    }

    #[test]
    fn the_owner_is_told_instead_of_waiting_for_itself() {
        static LOCK: Lock<()> = Lock::new(());
        let held = LOCK.lock().unwrap();
        assert!(LOCK.lock().is_err());
        drop(held);
        assert!(LOCK.lock().is_ok());
    }
}
