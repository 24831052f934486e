//! A small lock for rare paths. It stores its owner, so a signal handler that interrupts the owner
//! gets an error instead of a deadlock.
//!
//! Threads that find the lock taken sleep. The owner checks for sleepers without a fence when it
//! leaves, because some locks are taken in every `epoll_wait`. So it may miss a thread that is
//! just about to sleep. For that reason sleeps are short.

use crate::process;
use core::cell::UnsafeCell;
use core::ops::{Deref, DerefMut};
use fsocket_sync::atomic::{AtomicU32, AtomicU64, Ordering};
use fsocket_sys as sys;

/// Attempts before a thread sleeps.
const SPINS: u32 = 64;
/// Length of the first sleep, in nanoseconds. A sleeper that the owner has missed tries again
/// after it. Each later sleep is twice as long, so many waiting threads cost little.
const FIRST_NS: u64 = 1_000_000;
const LONGEST_NS: u64 = 64_000_000;

pub struct Lock<T> {
    owner: AtomicU64,
    /// Not 0: threads sleep until the lock is free, or are about to sleep.
    waiting: AtomicU32,
    /// The futex word of the sleepers. It changes before each wake-up.
    freed: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached only through a guard, and at most one guard exists at a time.
unsafe impl<T> Sync for Lock<T> {}

/// The calling thread already holds the lock: a signal handler has interrupted it.
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

    /// Takes the lock if it is free. None: a thread holds it, perhaps the calling one.
    pub fn try_lock(&self) -> Option<Guard<'_, T>> {
        self.take(process::thread()).is_ok().then(|| Guard { lock: self })
    }

    /// Does any thread hold the lock?
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
            // A woken thread sets the word, too, because other threads may still sleep.
            self.waiting.store(1, Ordering::SeqCst);
            // Loaded before the attempt, so that a later wake-up changes the word and ends the
            // sleep.
            let seen = self.freed.load(Ordering::Acquire);
            if self.take(me).is_ok() {
                return;
            }
            if sys::futex_wait(&self.freed, seen, Some(limit)) == Err(sys::Errno::ETIMEDOUT) {
                limit = (limit * 2).min(LONGEST_NS);
            }
        }
    }

    /// In a forked child: frees the lock, because other threads that held it do not exist. True:
    /// the lock was held, so the value may be only partly changed.
    pub fn reset_after_fork(&self) -> bool {
        // Most locks are free. Not writing them avoids a copy of their pages.
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
        // SAFETY: only this guard exists, so no other reference to the value does.
        unsafe { &*self.lock.value.get() }
    }
}
impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: only this guard exists, so no other reference to the value does.
        unsafe { &mut *self.lock.value.get() }
    }
}
impl<T> Drop for Guard<'_, T> {
    fn drop(&mut self) {
        // Release: publishes what was done under the lock, for the next `lock`.
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

    /// Threads have different identities, as in a process with the library.
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
