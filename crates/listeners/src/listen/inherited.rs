//! Listeners of a forked child of which the monitor has not heard (ADR 53).

use core::sync::atomic::{AtomicBool, Ordering};

/// In a forked child of which the monitor has not heard: it does not know either that this process holds them.
#[link_section = ".data.fsocket_start"]
static UNSHOWN: AtomicBool = AtomicBool::new(false);

/// In such a child: nothing that a child changes about listeners and zones is changed yet.
#[link_section = ".data.fsocket_start"]
static DEFERRED: AtomicBool = AtomicBool::new(false);

/// Does the monitor not know that this process holds what it has inherited?
pub(super) fn is_unshown() -> bool {
    UNSHOWN.load(Ordering::Relaxed)
}

pub(super) fn no_longer_deferred() {
    DEFERRED.store(false, Ordering::Relaxed);
}

/// The same for one of which the monitor does not hear until it needs it. Most serve their connection, and
/// close the listener: what else is there to do waits for those that do not.
#[link_section = ".text.fsocket_start"]
pub fn become_silent_child() {
    DEFERRED.store(true, Ordering::Relaxed);
    UNSHOWN.store(true, Ordering::Relaxed);
}

/// Has this process not touched the listeners yet that it has inherited?
#[inline]
pub fn is_deferred() -> bool {
    DEFERRED.load(Ordering::Relaxed)
}

/// True once: the monitor is being told.
pub(super) fn show() -> bool {
    UNSHOWN.swap(false, Ordering::AcqRel)
}
