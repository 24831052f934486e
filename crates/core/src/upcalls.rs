//! What the lower layers need of the higher ones: one table of functions, set at the start.
//!
//! A lower layer never names a higher one. Where something below must make the layers above act (a
//! message of the monitor's, the last reference to a description, readiness that somebody watches), it
//! calls through this table. Before the start, and in unit tests, nothing happens.

use core::sync::atomic::{AtomicPtr, Ordering};
use fsocket_proto::Msg;

/// See the module's description.
pub struct Upcalls {
    /// A message of the monitor's that was not an answer. True: its descriptor was kept.
    pub message: fn(&Msg, Option<i32>) -> bool,
    /// Does what messages have left to do where nothing is locked.
    pub settle: fn(),
    /// The monitor has died. True: another one is to be looked for.
    pub monitor_died: fn() -> bool,
    /// Another monitor was found after that.
    pub monitor_found: fn(),
    /// Does this process share no memory with a peer?
    pub shares_nothing: fn() -> bool,
}

static NONE: Upcalls = Upcalls {
    message: |_, _| false,
    settle: || {},
    monitor_died: || false,
    monitor_found: || {},
    shares_nothing: || true,
};

#[link_section = ".data.fsocket_start"]
static NOW: AtomicPtr<Upcalls> = AtomicPtr::new((&raw const NONE).cast_mut());

/// Once, at the start.
pub fn connect(table: &'static Upcalls) {
    NOW.store(core::ptr::from_ref(table).cast_mut(), Ordering::Release);
}

#[inline]
pub fn upcalls() -> &'static Upcalls {
    // SAFETY: only references to statics are stored.
    unsafe { &*NOW.load(Ordering::Acquire) }
}
