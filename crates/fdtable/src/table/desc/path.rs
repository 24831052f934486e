//! How far this process has followed a connection that has left its rings.
//! [`super::Desc::path_state`] combines this with the words of the fork group and of the peer.
//!
//! | state | `kernel_end` | `went_to` |
//! | --- | --- | --- |
//! | in its rings, or no connection | none | none |
//! | `PathState::Draining`: the ring still has bytes to read | the library's descriptor | none |
//! | `PathState::Kernel`: the program's descriptors are a kernel connection | none once no operation is running | one of the program's |
//!
//! The two descriptors are stored separately, because each has its own life: the last operation
//! closes the library's, the program closes its own.

use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};

/// See the module's description. Descriptors are stored plus one; 0: none.
#[repr(C)]
pub struct Path {
    kernel_end: AtomicI32,
    /// The descriptor of the description that the program has given up; negative if another file
    /// has replaced it.
    detached: AtomicI32,
    went_to: AtomicI32,
    /// Links of retired descriptions: index of the next one plus one, and the time of retirement
    /// in nanoseconds.
    retired_next: AtomicU32,
    retired_at: AtomicU64,
    settling: AtomicBool,
    comes_back: AtomicBool,
}

impl Path {
    pub(super) fn reset(&self) {
        self.went_to.store(0, Ordering::Relaxed);
        self.detached.store(0, Ordering::Relaxed);
        self.settling.store(false, Ordering::Relaxed);
        self.comes_back.store(false, Ordering::Relaxed);
    }

    /// The library's descriptor of the kernel connection that continues the stream after the
    /// bytes in the ring.
    #[inline]
    pub(crate) fn kernel_end(&self) -> Option<i32> {
        // Acquire: pairs with the release in `set_kernel_end`, so the socket is ready.
        let end = self.kernel_end.load(Ordering::Acquire);
        (end != 0).then(|| end - 1)
    }
    /// Stores the kernel end. False: another thread was faster.
    pub(crate) fn set_kernel_end(&self, fd: i32) -> bool {
        self.kernel_end.compare_exchange(0, fd + 1, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
    pub(crate) fn take_kernel_end(&self) -> Option<i32> {
        let end = self.kernel_end.swap(0, Ordering::AcqRel);
        (end != 0).then(|| end - 1)
    }

    /// A descriptor of the kernel connection that has replaced this connection.
    pub(crate) fn went_to(&self) -> Option<i32> {
        // Acquire: pairs with the release in `set_went_to`.
        let fd = self.went_to.load(Ordering::Acquire);
        (fd != 0).then(|| fd - 1)
    }
    pub fn set_went_to(&self, fd: Option<i32>) {
        self.went_to.store(fd.map_or(0, |fd| fd + 1), Ordering::Release);
    }

    /// Begins to move the connection to the kernel. True: the calling thread does that; no other
    /// thread has begun.
    pub fn begin_settling(&self) -> bool {
        !self.settling.swap(true, Ordering::AcqRel)
    }

    /// Will the connection come back from the kernel? It is there only while an operator wants
    /// that, or while it is passed on.
    pub fn comes_back(&self) -> bool {
        self.comes_back.load(Ordering::Relaxed)
    }
    pub fn set_comes_back(&self, comes_back: bool) {
        self.comes_back.store(comes_back, Ordering::Relaxed);
    }

    /// The descriptor `fd` has left the table; `replaced`: another file has taken its number.
    pub fn set_detached(&self, fd: i32, replaced: bool) {
        let entry = fd + 1;
        // Release: makes the removal visible; pairs with the acquire in `detached`.
        self.detached.store(if replaced { -entry } else { entry }, Ordering::Release);
    }
    #[inline]
    pub fn detached(&self) -> Option<(i32, bool)> {
        // Acquire: pairs with the release in `set_detached`, so the number has left the table.
        let entry = self.detached.load(Ordering::Acquire);
        (entry != 0).then(|| (entry.abs() - 1, entry < 0))
    }
    /// Clears the note. Does nothing if another descriptor was detached meanwhile.
    pub fn forget_detached(&self, (fd, replaced): (i32, bool)) {
        let entry = if replaced { -(fd + 1) } else { fd + 1 };
        let _ = self.detached.compare_exchange(entry, 0, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// The next retired description (index plus one), and the time in nanoseconds when this one
    /// was retired.
    pub fn retired(&self) -> (u32, u64) {
        (self.retired_next.load(Ordering::Relaxed), self.retired_at.load(Ordering::Relaxed))
    }
    pub fn retire(&self, now: u64) {
        self.set_retired_next(0);
        self.retired_at.store(now, Ordering::Relaxed);
    }
    pub fn set_retired_next(&self, next: u32) {
        self.retired_next.store(next, Ordering::Relaxed);
    }
}
