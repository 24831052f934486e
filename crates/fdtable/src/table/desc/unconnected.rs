//! A socket whose path is not decided yet: new, or bound.

use core::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// State of descriptions of kinds Fresh and Bound. It stays readable after the socket has become
/// a listener.
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

    /// O_NONBLOCK as the program last set it.
    pub fn nonblock(&self) -> bool {
        self.nonblock.load(Relaxed)
    }
    pub fn set_nonblock(&self, on: bool) {
        self.nonblock.store(on, Relaxed);
    }

    /// Is the socket bound to a port that the kernel has chosen?
    pub fn has_any_port(&self) -> bool {
        self.any_port.load(Relaxed)
    }
    pub fn set_any_port(&self, any: bool) {
        self.any_port.store(any, Relaxed);
    }

    /// The program has asked for something that only a kernel connection supports.
    pub fn leave_to_kernel(&self) {
        self.kernel_only.store(true, Relaxed);
    }
    pub fn is_for_kernel(&self) -> bool {
        self.kernel_only.load(Relaxed)
    }

    /// Has the process forked since the socket was bound, so that a child may have it, too?
    pub fn was_forked(&self) -> bool {
        self.forked.load(Relaxed)
    }
    pub fn mark_forked(&self) {
        self.forked.store(true, Relaxed);
    }
    /// Takes the note of a fork. True: the process has forked, and the caller handles that now.
    pub fn take_forked(&self) -> bool {
        self.forked.swap(false, Relaxed)
    }
}
