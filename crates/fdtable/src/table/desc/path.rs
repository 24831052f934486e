//! Where the connection of a description has gone, as far as this process has followed.
//!
//! | state | `kernel_end` | `went_to` |
//! | --- | --- | --- |
//! | in its rings, or no connection | none | none |
//! | the path was switched; the ring still has something to read | our own number | none |
//! | the kernel's: the description's numbers refer to a kernel connection | none, or until nobody is in an operation | a number of it |

use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};

/// See the module's description. Numbers are kept plus one; 0: none.
#[repr(C)]
pub struct Path {
    kernel_end: AtomicI32,
    /// The number by which the program has given the description up; negative if something else has taken its place.
    detached: AtomicI32,
    went_to: AtomicI32,
    /// In the list of retired descriptions: index plus one of the next, and since when, nanoseconds.
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

    /// Our own number of the kernel connection that comes behind what is left in the ring.
    #[inline]
    pub fn kernel_end(&self) -> Option<i32> {
        // Acquire: pairs with the release in `set_kernel_end`; the socket is there.
        let end = self.kernel_end.load(Ordering::Acquire);
        (end != 0).then(|| end - 1)
    }
    /// False: another thread was faster.
    pub fn set_kernel_end(&self, fd: i32) -> bool {
        self.kernel_end.compare_exchange(0, fd + 1, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
    pub fn take_kernel_end(&self) -> Option<i32> {
        let end = self.kernel_end.swap(0, Ordering::AcqRel);
        (end != 0).then(|| end - 1)
    }

    /// A number of the kernel connection that this one has become.
    pub fn went_to(&self) -> Option<i32> {
        // Acquire: pairs with the release in `set_went_to`.
        let fd = self.went_to.load(Ordering::Acquire);
        (fd != 0).then(|| fd - 1)
    }
    pub fn set_went_to(&self, fd: Option<i32>) {
        self.went_to.store(fd.map_or(0, |fd| fd + 1), Ordering::Release);
    }

    /// A thread makes it the kernel's. True: the calling one, from now on.
    pub fn begin_settling(&self) -> bool {
        !self.settling.swap(true, Ordering::AcqRel)
    }

    /// It is the kernel's only as long as an operator wants that, or as it is passed on.
    pub fn comes_back(&self) -> bool {
        self.comes_back.load(Ordering::Relaxed)
    }
    pub fn set_comes_back(&self, comes_back: bool) {
        self.comes_back.store(comes_back, Ordering::Relaxed);
    }

    /// The number `fd` has left the table; `replaced`: something else has taken its place.
    pub fn set_detached(&self, fd: i32, replaced: bool) {
        let entry = fd + 1;
        // Release: that; pairs with the acquire in `detached`.
        self.detached.store(if replaced { -entry } else { entry }, Ordering::Release);
    }
    #[inline]
    pub fn detached(&self) -> Option<(i32, bool)> {
        // Acquire: pairs with the release in `set_detached`; the number has left the table.
        let entry = self.detached.load(Ordering::Acquire);
        (entry != 0).then(|| (entry.abs() - 1, entry < 0))
    }
    /// Unless another number was detached meanwhile.
    pub fn forget_detached(&self, (fd, replaced): (i32, bool)) {
        let entry = if replaced { -(fd + 1) } else { fd + 1 };
        let _ = self.detached.compare_exchange(entry, 0, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// The next retired description (index plus one), and since when this one is retired, nanoseconds.
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
