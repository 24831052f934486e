//! Epoll instances that are just being made.

use crate::cow::Sparing;
use core::sync::atomic::{AtomicU32, Ordering};

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
