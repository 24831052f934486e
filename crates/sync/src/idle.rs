//! A watcher that looks from time to time while something happens, and lies down
//! when nothing does; who makes something happen rings only a watcher that lies.
//!
//! One word: 1 while the watcher lies. Sequentially consistent on both sides,
//! because each writes one word and then reads the other's.

use crate::atomic::{fence, AtomicU32, Ordering};

/// The watcher lies down, unless `something` has happened since it last looked, which
/// is asked after the word is set. True: it will be rung.
pub fn park(idle: &AtomicU32, something: impl FnOnce() -> bool) -> bool {
    idle.store(1, Ordering::SeqCst);
    fence(Ordering::SeqCst);
    if something() {
        // Who made it happen may have seen the word already, and ring in vain.
        idle.store(0, Ordering::SeqCst);
        return false;
    }
    true
}

/// Something has happened (a read-modify-write that everybody sees came before). True:
/// the watcher must be rung, by the caller and nobody else. The BPF program that selects
/// listen sockets does the same (`balance.h`).
pub fn must_ring(idle: &AtomicU32) -> bool {
    fence(Ordering::SeqCst);
    idle.load(Ordering::SeqCst) != 0 && idle.compare_exchange(1, 0, Ordering::SeqCst, Ordering::SeqCst).is_ok()
}
