//! When the first try of a connection between network namespaces is worth its cost.

use super::calls::CALLS;
use crate::table::Desc;
use core::sync::atomic::{AtomicU64, Ordering};
use fsocket_sys as sys;

/// As how many calls a request behind an answer counts there.
pub(super) const TURN: u32 = CALLS / 2;
/// A try costs both processes and the monitor some 200 us of their time, as eight requests in the kernel do. The third
/// request is worth it if few connections get there; where one follows the other some twentieth is.
const LATER: u32 = 16 * TURN;
/// When the next connection of this process may try before that.
static AGAIN: AtomicU64 = AtomicU64::new(0);
/// A hundred times what it costs one side, nanoseconds.
const PAUSE: u64 = 10_000_000;

/// Whether a try after so many calls is an early one. Err: it is not worth it, but after so many calls.
pub(super) fn first_try(d: &Desc, opener: bool, calls: u32) -> Result<bool, u32> {
    // The accepter is to have offered its end by then.
    let later = if opener { LATER + 2 * TURN } else { LATER };
    let is_early = d.across.load(Ordering::Relaxed) && calls < later;
    if is_early && sys::now_ns() < AGAIN.load(Ordering::Relaxed) {
        return Err(later);
    }
    Ok(is_early)
}

pub(super) fn tried() {
    AGAIN.store(sys::now_ns() + PAUSE, Ordering::Relaxed);
}
