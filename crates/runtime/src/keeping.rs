//! Is something kept for speed that [`crate::idle`] gives back?

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use fsocket_sys::cpu;

/// There is something to give back.
pub static KEEPING: AtomicBool = AtomicBool::new(false);

/// When something was last put aside, in ticks.
pub static SINCE: AtomicU64 = AtomicU64::new(0);

/// Something is being kept.
pub fn keeping() {
    SINCE.store(cpu::ticks(), Ordering::Relaxed);
    if !KEEPING.load(Ordering::Relaxed) {
        KEEPING.store(true, Ordering::Relaxed);
    }
}
