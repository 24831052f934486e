//! After how many calls a kernel connection is tried.

use crate::process;
use crate::table::Desc;
use core::sync::atomic::{AtomicU32, Ordering};

/// Calls before the first try; each further one waits four times as long.
pub(super) const CALLS: u32 = 32;
#[link_section = ".data.fsocket_start"]
static FIRST: AtomicU32 = AtomicU32::new(CALLS);

/// FASTSOCKET_UPGRADE: calls before the first try, 0: never.
pub fn init(calls: Option<u32>) {
    FIRST.store(calls.unwrap_or(CALLS), Ordering::Relaxed);
}

/// The number of the call that tries first; 0: none does.
pub(super) fn first() -> u32 {
    FIRST.load(Ordering::Relaxed)
}

/// Has the program not switched it off?
pub(super) fn is_on() -> bool {
    first() != 0
}

pub(super) fn wanted() -> bool {
    is_on() && process::enabled()
}

/// Nothing is decided, and no call has been made.
pub(super) fn restart(d: &Desc) {
    d.using.reset();
    d.calls.store(0, Ordering::Relaxed);
    d.tries.store(0, Ordering::Relaxed);
    d.next_try.store(FIRST.load(Ordering::Relaxed), Ordering::Relaxed);
}
