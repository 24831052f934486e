//! SYN queues: the connecting process puts slot numbers in, any worker of the
//! listener takes them out. One producer at a time (the client's lock), many
//! consumers. Both sides may be hostile: a position is only ever used modulo
//! the capacity, and an entry is checked.

use crate::Hostile;
use fsocket_abi::channel::{SynQueue, SLOTS, SYN_CAP};
use fsocket_sync::atomic::Ordering;

/// Can the caller, the only one that pushes, put something in?
pub fn has_room(q: &SynQueue) -> bool {
    len(q) < SYN_CAP as u32
}

/// Put `slot` at the end; false: the queue is full. The caller is the only one
/// that pushes, and looks at [`SynQueue::want`] next.
pub fn push(q: &SynQueue, slot: usize) -> bool {
    if !has_room(q) {
        return false;
    }
    let t = q.tail.load(Ordering::Relaxed);
    q.entry[t as usize % SYN_CAP].store(slot as u32 + 1, Ordering::Relaxed);
    // Release: slot and entry, for the acquire in `pop`.
    q.tail.store(t.wrapping_add(1), Ordering::Release);
    true
}

/// Entries waiting; positions that make no sense count as a full queue.
pub fn len(q: &SynQueue) -> u32 {
    // Acquire pairs with the release in `pop`: the entries before it have been
    // read and may be overwritten. And a tail loaded after it is not behind
    // it, so that an empty queue never looks full.
    let h = q.head.load(Ordering::Acquire);
    let n = q.tail.load(Ordering::Acquire).wrapping_sub(h);
    n.min(SYN_CAP as u32)
}

/// Take the oldest entry; its slot number is checked. [`Hostile`]: the queue holds what no client
/// puts there. Whoever finds that does not look at this queue again: it could find the same 2^32 times.
pub fn pop(q: &SynQueue) -> Result<Option<usize>, Hostile> {
    for _ in 0..2 * SYN_CAP {
        // Acquire pairs with the release of the worker that took the entry
        // before: it had seen the tail pass, so have we then.
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
        // The head was `h` when the tail was read, so a client had not gone further than this.
        if t.wrapping_sub(h) > SYN_CAP as u32 || e == 0 || e as usize > SLOTS {
            return Err(Hostile);
        }
        return Ok(Some(e as usize - 1));
    }
    Ok(None)
}
