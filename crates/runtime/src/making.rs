//! Counts epoll instances that are being made by the library's hooks. So no thread mistakes such
//! an instance for one that was made by a raw system call.

use crate::cow::Sparing;
use core::sync::atomic::{AtomicU32, Ordering};

/// Numbers of instances that threads have begun to make, and that are in the tables. Between the
/// two the kernel has an instance that the tables lack.
#[link_section = ".data.fsocket_start"]
static BEGUN: AtomicU32 = AtomicU32::new(0);

#[link_section = ".data.fsocket_start"]
static ENDED: AtomicU32 = AtomicU32::new(0);

/// Makes an instance by calling `make`, which also enters it into the tables.
pub fn making<T>(make: impl FnOnce() -> T) -> T {
    BEGUN.fetch_add(1, Ordering::SeqCst);
    let made = make();
    ENDED.fetch_add(1, Ordering::SeqCst);
    made
}

/// In a forked child: other threads that were making an instance do not exist.
pub fn become_child() {
    ENDED.put(BEGUN.load(Ordering::SeqCst));
}

/// Number of instances that are made and in the tables.
pub fn ended() -> u32 {
    ENDED.load(Ordering::SeqCst)
}

/// Number of instances that threads have begun to make.
pub fn begun() -> u32 {
    BEGUN.load(Ordering::SeqCst)
}
