//! The kernel socket behind a descriptor number of ours, as far as the library knows its state.

use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use fsocket_runtime::identity;

/// State of a placeholder. A placeholder that is as `socket` returns a new one is *pristine* and can be used again
/// ([`crate::pool`], [`crate::pristine`]).
pub struct Placeholder {
    changed: AtomicBool,
    recycled: AtomicBool,
    watched: AtomicBool,
    nonblock: AtomicBool,
    /// 0: AF_INET.
    family: AtomicU32,
    /// 0: not known; else 1 plus the flag.
    close_on_exec: AtomicU32,
    identity: AtomicU64,
}

impl Placeholder {
    pub(super) fn reset(&self) {
        self.changed.store(false, Relaxed);
        self.recycled.store(false, Relaxed);
        self.watched.store(false, Relaxed);
        self.nonblock.store(false, Relaxed);
        self.family.store(0, Relaxed);
        self.set_close_on_exec(None);
        self.identity.store(identity::UNKNOWN, Relaxed);
    }

    /// The placeholder carries state that a new socket has not: it is closed with its number.
    pub fn mark_changed(&self) {
        self.changed.store(true, Relaxed);
    }
    pub fn is_changed(&self) -> bool {
        self.changed.load(Relaxed)
    }

    /// It was another connection's before, and the kernel has not been asked everything about it.
    pub fn is_recycled(&self) -> bool {
        self.recycled.load(Relaxed)
    }
    pub fn set_recycled(&self, recycled: bool) {
        self.recycled.store(recycled, Relaxed);
    }

    /// An epoll instance of the kernel watches it, and would go on after the number is closed.
    pub fn is_watched(&self) -> bool {
        self.watched.load(Relaxed)
    }
    pub fn set_watched(&self, watched: bool) {
        self.watched.store(watched, Relaxed);
    }

    /// O_NONBLOCK as the kernel has it.
    pub fn nonblock(&self) -> bool {
        self.nonblock.load(Relaxed)
    }
    pub fn set_nonblock(&self, on: bool) {
        self.nonblock.store(on, Relaxed);
    }

    /// AF_INET or AF_INET6.
    pub fn family(&self) -> u32 {
        match self.family.load(Relaxed) {
            0 => libc::AF_INET as u32,
            family => family,
        }
    }
    pub fn set_family(&self, family: u32) {
        self.family.store(family, Relaxed);
    }

    /// Whether the number, the only one, is close-on-exec; None: not known.
    pub fn close_on_exec(&self) -> Option<bool> {
        self.close_on_exec.load(Relaxed).checked_sub(1).map(|on| on != 0)
    }
    pub fn set_close_on_exec(&self, on: Option<bool>) {
        self.close_on_exec.store(on.map_or(0, |on| 1 + u32::from(on)), Relaxed);
    }

    /// The identity of the thread that made the socket ([`fsocket_runtime::identity`]).
    pub fn identity(&self) -> u64 {
        self.identity.load(Relaxed)
    }
    pub fn set_identity(&self, identity: u64) {
        self.identity.store(identity, Relaxed);
    }
}
