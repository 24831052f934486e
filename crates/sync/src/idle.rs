//! A watcher looks from time to time while there is activity, and *parks* when there is none. A
//! thread that causes activity wakes the watcher only if the watcher is parked.
//!
//! One word is 1 while the watcher is parked. Both sides use sequentially consistent accesses,
//! because each writes one word and then reads the word of the other side.

use crate::atomic::{fence, AtomicU32, Ordering};

/// Parks the watcher, unless `something` has happened since its last look. `something` is called
/// after the word is set. True: the watcher is parked, and will be woken.
pub fn park(idle: &AtomicU32, something: impl FnOnce() -> bool) -> bool {
    idle.store(1, Ordering::SeqCst);
    fence(Ordering::SeqCst);
    if something() {
        // A thread that causes activity may have seen the word already. Then it wakes the watcher
        // needlessly.
        idle.store(0, Ordering::SeqCst);
        return false;
    }
    true
}

/// Called after a change (by a read-modify-write that all threads see). True: the caller, and no
/// other thread, must wake the watcher. The BPF program that selects listen sockets does the same
/// (`balance.h`).
pub fn must_ring(idle: &AtomicU32) -> bool {
    fence(Ordering::SeqCst);
    idle.load(Ordering::SeqCst) != 0 && idle.compare_exchange(1, 0, Ordering::SeqCst, Ordering::SeqCst).is_ok()
}
