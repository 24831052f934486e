//! A small lock for rare paths. It knows its owner, so that a signal handler
//! that interrupts the owner gets an error instead of a deadlock.

use crate::process;
use core::cell::UnsafeCell;
use core::ops::{Deref, DerefMut};
use fsocket_sync::atomic::{AtomicU64, Ordering};

pub struct Lock<T> {
    owner: AtomicU64,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached through the guard only, and one guard exists.
unsafe impl<T> Sync for Lock<T> {}

/// The calling thread already holds the lock: we are in a signal handler.
#[derive(Debug)]
pub struct Reentry;

impl<T> Lock<T> {
    pub const fn new(value: T) -> Self {
        Lock { owner: AtomicU64::new(0), value: UnsafeCell::new(value) }
    }

    pub fn lock(&self) -> Result<Guard<'_, T>, Reentry> {
        let me = process::thread();
        let mut tries = 0u32;
        // Acquire: pairs with the release in `Guard::drop`.
        while let Err(held) = self.owner.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed) {
            if held == me {
                return Err(Reentry);
            }
            tries += 1;
            match tries {
                0..=64 => core::hint::spin_loop(),
                65..=128 => fsocket_sys::sched_yield(),
                _ => fsocket_sys::nanosleep(50_000),
            }
        }
        Ok(Guard { lock: self })
    }

    /// In a forked child: no other thread exists, whoever held it is gone. True: somebody held it,
    /// and was perhaps changing the value.
    pub fn reset_after_fork(&self) -> bool {
        self.owner.swap(0, Ordering::AcqRel) != 0
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
    }
}
