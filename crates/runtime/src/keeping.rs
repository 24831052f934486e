//! Notes whether the process keeps memory for speed that [`crate::idle`] can give back, and since
//! when.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use fsocket_sys::cpu;

/// There is memory to give back.
pub static KEEPING: AtomicBool = AtomicBool::new(false);

/// When memory was last added, in ticks.
pub static SINCE: AtomicU64 = AtomicU64::new(0);

/// Records that the process has just kept memory.
pub fn keeping() {
    SINCE.store(cpu::ticks(), Ordering::Relaxed);
    if !KEEPING.load(Ordering::Relaxed) {
        KEEPING.store(true, Ordering::Relaxed);
    }
}
