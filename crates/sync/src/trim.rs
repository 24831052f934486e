//! One side has closed the connection and frees the memory of a ring, while the other side has not
//! closed yet. The client may use the slot for its next connection only when both sides have
//! closed and neither frees memory.
//!
//! Each side writes one word, and then reads the other side's word (Dekker). The freeing side
//! announces that it frees, and then checks whether the other side has closed. The client closes,
//! and then checks whether a side is freeing.

use crate::atomic::{fence, AtomicU32, Ordering};

/// Runs `free` unless the slot `is_free`. False: the slot was free already. If the process dies in
/// between, the word stays raised, and the slot is never used again.
pub fn while_in_use(trims: &AtomicU32, is_free: impl Fn() -> bool, free: impl FnOnce()) -> bool {
    trims.fetch_add(1, Ordering::AcqRel);
    fence(Ordering::SeqCst);
    let in_use = !is_free();
    if in_use {
        free();
    }
    // Release: the freeing of the memory happens before the next use of the slot.
    trims.fetch_sub(1, Ordering::Release);
    in_use
}

/// Called by the client after both sides have closed: true if neither side is freeing memory.
pub fn is_quiet(trims: [&AtomicU32; 2]) -> bool {
    fence(Ordering::SeqCst);
    trims.iter().all(|t| t.load(Ordering::Acquire) == 0)
}
