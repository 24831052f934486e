//! One side frees the memory of a ring after it has closed the connection, while the other side has not. The client may
//! use the slot for its next connection as soon as both have closed; not while somebody frees.
//!
//! Each side writes one word, and then reads the other's (Dekker): the side that frees says so, and then looks whether
//! the other one has closed; the client closes, and then looks whether somebody frees.

use crate::atomic::{fence, AtomicU32, Ordering};

/// Runs `free` unless the slot `is_free`. False: it was. A process that dies meanwhile leaves the word as it is: the slot
/// is not used again.
pub fn while_in_use(trims: &AtomicU32, is_free: impl Fn() -> bool, free: impl FnOnce()) -> bool {
    trims.fetch_add(1, Ordering::AcqRel);
    fence(Ordering::SeqCst);
    let in_use = !is_free();
    if in_use {
        free();
    }
    // Release: what was freed is free before the slot is used again.
    trims.fetch_sub(1, Ordering::Release);
    in_use
}

/// Client, after it has seen that both sides have closed: does nobody free memory of the slot?
pub fn is_quiet(trims: [&AtomicU32; 2]) -> bool {
    fence(Ordering::SeqCst);
    trims.iter().all(|t| t.load(Ordering::Acquire) == 0)
}
