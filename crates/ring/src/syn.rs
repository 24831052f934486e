//! SYN queues: the connecting process adds slot numbers, and any worker of the listener takes
//! them out. There is one producer at a time (it holds the client's lock), and there are many
//! consumers. Either side may be hostile, so a position is only used modulo the capacity, and
//! each entry is checked.

use crate::Hostile;
use fsocket_abi::channel::{SynQueue, SLOTS, SYN_CAP};
use fsocket_sync::atomic::Ordering;

/// Is there room for an entry? Only the producer may ask.
pub fn has_room(q: &SynQueue) -> bool {
    len(q) < SYN_CAP as u32
}

/// Adds `slot` at the end; false: the queue is full. Only the producer may call this. Afterwards
/// it checks [`SynQueue::want`].
pub fn push(q: &SynQueue, slot: usize) -> bool {
    if !has_room(q) {
        return false;
    }
    let t = q.tail.load(Ordering::Relaxed);
    q.entry[t as usize % SYN_CAP].store(slot as u32 + 1, Ordering::Relaxed);
    // Release: publishes slot and entry; pairs with the acquire in `pop`.
    q.tail.store(t.wrapping_add(1), Ordering::Release);
    true
}

/// Number of waiting entries. Impossible positions count as a full queue.
pub fn len(q: &SynQueue) -> u32 {
    // Acquire: pairs with the release in `pop`, so the entries before the head have been read and
    // may be overwritten. A tail that is loaded after the head is not before it, so an empty
    // queue never looks full.
    let h = q.head.load(Ordering::Acquire);
    let n = q.tail.load(Ordering::Acquire).wrapping_sub(h);
    n.min(SYN_CAP as u32)
}

/// Takes the oldest entry, and checks its slot number. [`Hostile`]: the queue contains something
/// that no honest client writes. The worker then must not look at the queue again, because it
/// could find the same thing 2^32 times.
pub fn pop(q: &SynQueue) -> Result<Option<usize>, Hostile> {
    for _ in 0..2 * SYN_CAP {
        // Acquire: pairs with the release of the worker that took the previous entry. That worker
        // had seen a tail beyond the entry, so this thread sees it, too.
        let h = q.head.load(Ordering::Acquire);
        // Acquire: pairs with the release in `push`.
        let t = q.tail.load(Ordering::Acquire);
        if h == t {
            return Ok(None);
        }
        let e = q.entry[h as usize % SYN_CAP].load(Ordering::Relaxed);
        if q.head.compare_exchange(h, h.wrapping_add(1), Ordering::AcqRel, Ordering::Relaxed).is_err() {
            continue; // another worker took it
        }
        // The head was `h` when the tail was read, so an honest client cannot have added more
        // than fits.
        if t.wrapping_sub(h) > SYN_CAP as u32 || e == 0 || e as usize > SLOTS {
            return Err(Hostile);
        }
        return Ok(Some(e as usize - 1));
    }
    Ok(None)
}
