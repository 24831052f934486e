//! A socket of which the path is not decided yet: new, or bound.

use core::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// State of kinds Fresh and Bound. What a listener was before stays readable.
pub struct Unconnected {
    nonblock: AtomicBool,
    any_port: AtomicBool,
    kernel_only: AtomicBool,
    forked: AtomicBool,
}

impl Unconnected {
    pub(super) fn reset(&self) {
        for flag in [&self.nonblock, &self.any_port, &self.kernel_only, &self.forked] {
            flag.store(false, Relaxed);
        }
    }

    /// O_NONBLOCK as the program has set it last.
    pub fn nonblock(&self) -> bool {
        self.nonblock.load(Relaxed)
    }
    pub fn set_nonblock(&self, on: bool) {
        self.nonblock.store(on, Relaxed);
    }

    /// Has the kernel chosen the port that it is bound to?
    pub fn has_any_port(&self) -> bool {
        self.any_port.load(Relaxed)
    }
    pub fn set_any_port(&self, any: bool) {
        self.any_port.store(any, Relaxed);
    }

    /// The program has asked for something that only a kernel connection can do.
    pub fn leave_to_kernel(&self) {
        self.kernel_only.store(true, Relaxed);
    }
    pub fn is_for_kernel(&self) -> bool {
        self.kernel_only.load(Relaxed)
    }

    /// The process has forked since it was bound, so that a child may have it, too.
    pub fn was_forked(&self) -> bool {
        self.forked.load(Relaxed)
    }
    pub fn mark_forked(&self) {
        self.forked.store(true, Relaxed);
    }
    /// True: it was forked, and that has been seen to now.
    pub fn take_forked(&self) -> bool {
        self.forked.swap(false, Relaxed)
    }
}
