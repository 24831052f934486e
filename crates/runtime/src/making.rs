//! Epoll instances that are just being made.

use crate::cow::Sparing;
use core::sync::atomic::{AtomicI32, AtomicU32, Ordering};

/// Instances that other threads make through us: begun, and known to our tables. Between the
/// two the kernel has one that we have not seen yet.
#[link_section = ".data.fsocket_start"]
static BEGUN: AtomicU32 = AtomicU32::new(0);

#[link_section = ".data.fsocket_start"]
static ENDED: AtomicU32 = AtomicU32::new(0);

/// Make an instance, and put it where it belongs, by `make`.
pub fn making<T>(make: impl FnOnce() -> T) -> T {
    BEGUN.fetch_add(1, Ordering::SeqCst);
    let made = make();
    ENDED.fetch_add(1, Ordering::SeqCst);
    made
}

/// In a forked child: threads that were making one are not here.
pub fn become_child() {
    ENDED.put(BEGUN.load(Ordering::SeqCst));
}

/// How many have been made, and are where they belong.
pub fn ended() -> u32 {
    ENDED.load(Ordering::SeqCst)
}

/// How many have been begun.
pub fn begun() -> u32 {
    BEGUN.load(Ordering::SeqCst)
}

/// An instance that the tables do not know yet, in a child that serves one connection; -1: there is none.
#[link_section = ".data.fsocket_start"]
static LATER: AtomicI32 = AtomicI32::new(-1);

/// Its number is below this: so far the numbers of instances are watched.
pub const LATER_MOST: i32 = 64;

pub fn set_later(fd: i32) {
    LATER.store(fd, Ordering::Relaxed);
}

#[inline]
pub fn later() -> Option<i32> {
    Some(LATER.load(Ordering::Relaxed)).filter(|fd| *fd >= 0)
}

#[inline]
pub fn is_later(fd: i32) -> bool {
    fd >= 0 && LATER.load(Ordering::Relaxed) == fd
}

/// It is known, or closed, if it is this number.
#[inline]
pub fn forget_later(fd: i32) {
    if is_later(fd) {
        LATER.store(-1, Ordering::Relaxed);
    }
}
