//! Descriptors of memory that is shared with others, kept while it is mapped: another monitor is shown them
//! (ADR 48).

use core::sync::atomic::{AtomicI32, AtomicU32, Ordering};

/// So many are kept even if they leave the library's other descriptors little room.
const FEW: u32 = 48;
static COUNT: AtomicU32 = AtomicU32::new(0);

/// A descriptor plus one; 0: none is kept. All bytes zero is a valid value.
pub struct Kept(AtomicI32);

impl Kept {
    #[allow(clippy::new_without_default)] // only ever in statics
    pub const fn new() -> Kept {
        Kept(AtomicI32::new(0))
    }

    /// Keeps what `copy` returns, a descriptor of the library's own above the number `high`. Without one the
    /// memory is unknown to another monitor: so that the library's other descriptors have room, all that are
    /// kept take half of the numbers above `high` at most.
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

    /// The memory is not mapped any more. Returns the descriptor, which the caller closes.
    pub fn take(&self) -> Option<i32> {
        let fd = self.0.swap(0, Ordering::AcqRel).checked_sub(1).filter(|fd| *fd >= 0)?;
        COUNT.fetch_sub(1, Ordering::Relaxed);
        Some(fd)
    }

    /// The descriptor got another number. False: it is not this one.
    pub fn renumbered(&self, old: i32, new: i32) -> bool {
        self.0.compare_exchange(old + 1, new + 1, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }
}

fn has_room(high: i32) -> bool {
    let limit = fsocket_sys::limit(libc::RLIMIT_NOFILE);
    u64::from(COUNT.load(Ordering::Relaxed)) < limit.saturating_sub(high as u64) / 2
}
