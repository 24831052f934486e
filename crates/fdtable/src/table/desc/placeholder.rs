//! The kernel socket behind a descriptor of the library, as far as the library knows its state.

use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use fsocket_runtime::identity;

/// State of a placeholder. A placeholder that is equal to a new socket is *pristine* and can be used again
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

    /// The placeholder has state that a new socket lacks, so it is closed together with its
    /// descriptor.
    pub fn mark_changed(&self) {
        self.changed.store(true, Relaxed);
    }
    pub fn is_changed(&self) -> bool {
        self.changed.load(Relaxed)
    }

    /// Did the placeholder belong to another connection before, without the kernel being asked
    /// everything about it?
    pub fn is_recycled(&self) -> bool {
        self.recycled.load(Relaxed)
    }
    pub fn set_recycled(&self, recycled: bool) {
        self.recycled.store(recycled, Relaxed);
    }

    /// Does a kernel epoll instance watch the placeholder? (The entry would survive the close of
    /// the descriptor.)
    pub fn is_watched(&self) -> bool {
        self.watched.load(Relaxed)
    }
    pub fn set_watched(&self, watched: bool) {
        self.watched.store(watched, Relaxed);
    }

    /// Is O_NONBLOCK set in the kernel?
    pub fn nonblock(&self) -> bool {
        self.nonblock.load(Relaxed)
    }
    pub fn set_nonblock(&self, on: bool) {
        self.nonblock.store(on, Relaxed);
    }

    /// The placeholder's family: AF_INET or AF_INET6.
    pub fn family(&self) -> u32 {
        match self.family.load(Relaxed) {
            0 => libc::AF_INET as u32,
            family => family,
        }
    }
    pub fn set_family(&self, family: u32) {
        self.family.store(family, Relaxed);
    }

    /// Is the placeholder's only descriptor close-on-exec? None: unknown.
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
