//! The balance of one listener group: the length of each zone's accept queue, busy queues, and
//! steals. This is the value of a BPF array that the monitor and the workers of the group map;
//! `balance.h` of the BPF crate repeats the layout. See ADR 26.
//!
//! The workers of a group share a listen socket by fork, so they are one program of one user. A
//! process that writes here can only worsen the balance of its own group: no value here is used as
//! an index or a length.

use fsocket_sync::atomic::{AtomicU32, AtomicU64};

/// Balanced queues have the places 1 to this number, with one bit each in a word.
pub const QUEUES: usize = 64;

/// Other workers wait this many times longer before they take connections from a worker that keeps
/// up. (On a machine with other load every worker is away for a millisecond now and then.)
pub const TRUST: u64 = 10;

/// Average lengths are 16.16 fixed-point numbers. This is 1.
pub const ONE: u32 = 1 << 16;

/// The accept queue of one zone. Each cache line has one kind of writer.
#[repr(C, align(64))]
pub struct Queue {
    /// Connections that the BPF program directed here, counted at their SYN.
    pub added: AtomicU64,
    /// Moving average of the length, in units of 1 / [`ONE`]. The BPF program updates it at each
    /// addition, and the monitor when no addition came for a while.
    pub average: AtomicU32,
    _pad0: [u32; 13],
    /// Connections that any worker has accepted from this queue.
    pub taken: AtomicU64,
    /// When the queue's own worker last looked at it, in ticks of the CPU's counter.
    pub looked: AtomicU64,
    _pad1: [u64; 6],
    /// `added - taken` at a time when the queue was empty: handshakes that have not ended, or
    /// never will. Measured by the monitor.
    pub drift: AtomicU64,
    _pad2: [u64; 7],
}

impl Queue {
    /// The number of waiting connections, according to the counts.
    pub fn length(&self) -> u64 {
        use fsocket_sync::atomic::Ordering::Relaxed;
        let n = self.added.load(Relaxed).wrapping_sub(self.taken.load(Relaxed)).wrapping_sub(self.drift.load(Relaxed));
        // Negative: handshakes that were under way when the drift was measured have ended since.
        if n > i64::MAX as u64 {
            0
        } else {
            n
        }
    }
}

#[repr(C, align(64))]
pub struct Balance {
    /// Bit per queue (place - 1): the queue is busy. Its length has exceeded `high`, and its
    /// average has not yet fallen below `low`.
    pub busy: AtomicU64,
    /// Bit per queue: its worker is gone, so any worker may take what still waits there.
    pub gone: AtomicU64,
    /// Not 0: the monitor does not look, and must be rung when a connection is added.
    pub idle: AtomicU32,
    /// The longest that a queue should be: the backlog divided by the number of zones. 0: no
    /// balance.
    pub limit: AtomicU32,
    /// A queue above this length becomes busy.
    pub high: AtomicU32,
    /// A busy queue with an average below this, in units of 1 / [`ONE`], is not busy any more.
    pub low: AtomicU32,
    /// How many local connections a worker accepts for each one that it steals from a busy zone.
    pub ratio: AtomicU32,
    /// In microseconds. If the worker of a queue that is not busy has looked at it within this
    /// time, other workers leave its connections alone. For a worker that keeps up the time is
    /// [`TRUST`] times longer.
    pub patience: AtomicU32,
    /// Bit per queue: its worker does not keep up. Other workers recently stole a good part of its
    /// connections.
    pub overloaded: AtomicU64,
    _pad: [u32; 4],
    pub queue: [Queue; QUEUES],
    /// Number of connections stolen, by thief and victim.
    pub stolen: [[AtomicU32; QUEUES]; QUEUES],
}

/// Bytes of the mapping.
pub const BALANCE_SIZE: usize = core::mem::size_of::<Balance>().next_multiple_of(4096);

#[cfg(not(loom))]
const _: () = {
    use core::mem::{offset_of, size_of};
    assert!(size_of::<Queue>() == 192);
    assert!(offset_of!(Queue, taken) == 64 && offset_of!(Queue, drift) == 128);
    assert!(offset_of!(Balance, queue) == 64);
    assert!(size_of::<Balance>() == 64 + 64 * 192 + 64 * 64 * 4);
};

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use fsocket_sync::atomic::Ordering::Relaxed;

    #[test]
    fn a_length_is_never_negative() {
        let q = Queue {
            added: AtomicU64::new(10),
            average: AtomicU32::new(0),
            _pad0: [0; 13],
            taken: AtomicU64::new(7),
            looked: AtomicU64::new(0),
            _pad1: [0; 6],
            drift: AtomicU64::new(1),
            _pad2: [0; 7],
        };
        assert_eq!(q.length(), 2);
        q.drift.store(5, Relaxed);
        assert_eq!(q.length(), 0);
        q.drift.store(u64::MAX, Relaxed);
        assert_eq!(q.length(), 4, "more were accepted than were counted");
    }
}
