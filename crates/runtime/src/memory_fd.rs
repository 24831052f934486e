//! Descriptors of shared memory. The process keeps them while the memory is mapped, so that it can
//! show them to the next monitor (ADR 48).

use core::sync::atomic::{AtomicI32, AtomicU32, Ordering};

/// This many descriptors are kept even if they leave little room for the library's others.
const FEW: u32 = 48;
static COUNT: AtomicU32 = AtomicU32::new(0);

/// A kept descriptor + 1; 0: none. All bytes zero is a valid value.
pub struct Kept(AtomicI32);

impl Kept {
    #[allow(clippy::new_without_default)] // only ever in statics
    pub const fn new() -> Kept {
        Kept(AtomicI32::new(0))
    }

    /// Keeps the result of `copy`, a descriptor of the library above the number `high`, if there
    /// is room: all kept descriptors together take at most half of the numbers above `high`.
    /// Without the descriptor, the next monitor does not learn of the memory.
    pub fn keep(&self, high: i32, copy: impl FnOnce() -> Option<i32>) {
        if COUNT.load(Ordering::Relaxed) >= FEW && !has_room(high) {
            return;
        }
        if let Some(fd) = copy() {
            COUNT.fetch_add(1, Ordering::Relaxed);
            self.0.store(fd + 1, Ordering::Release);
        }
    }

    /// The descriptor, if it is kept.
    pub fn fd(&self) -> Option<i32> {
        self.0.load(Ordering::Acquire).checked_sub(1).filter(|fd| *fd >= 0)
    }

    /// Returns the descriptor, which the caller must close, because the memory is no longer
    /// mapped.
    pub fn take(&self) -> Option<i32> {
        let fd = self.0.swap(0, Ordering::AcqRel).checked_sub(1).filter(|fd| *fd >= 0)?;
        COUNT.fetch_sub(1, Ordering::Relaxed);
        Some(fd)
    }

    /// The library has moved a descriptor from `old` to `new`. False: another one.
    pub fn renumbered(&self, old: i32, new: i32) -> bool {
        self.0.compare_exchange(old + 1, new + 1, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }
}

fn has_room(high: i32) -> bool {
    let limit = fsocket_sys::limit(libc::RLIMIT_NOFILE);
    u64::from(COUNT.load(Ordering::Relaxed)) < limit.saturating_sub(high as u64) / 2
}
