//! The balance of one listener group: how long the accept queue of each zone is,
//! who is busy, who steals from whom. The value of a BPF array that is mapped by
//! the monitor and by the workers of the group; `balance.h` of the BPF crate
//! repeats it. See ADR 26.
//!
//! The workers of a group share a listen socket by fork: they are one user's one
//! program. What one of them writes here can make the balance of its own group
//! worse, and nothing else: no value in here is ever an index or a length.

use fsocket_sync::atomic::{AtomicU32, AtomicU64};

/// Queues that are balanced: places 1 to this one. A bit each in a word.
pub const QUEUES: usize = 64;

/// So much more patience others have with a worker that keeps up: on a machine with
/// other work everybody is away for a millisecond now and then.
pub const TRUST: u64 = 10;

/// Lengths are kept as 16.16 fixed point where they are averages.
pub const ONE: u32 = 1 << 16;

/// One zone's accept queue. Each line has one kind of writer.
#[repr(C, align(64))]
pub struct Queue {
    /// Connections that were directed here, counted at their SYN by the BPF program.
    pub added: AtomicU64,
    /// Moving average of the length, in units of 1 / [`ONE`]: BPF program, at each
    /// addition; the monitor, when nothing was added for a while.
    pub average: AtomicU32,
    _pad0: [u32; 13],
    /// Connections that were accepted from it, by whomever.
    pub taken: AtomicU64,
    /// When its worker last looked at it, in ticks of the CPU's counter.
    pub looked: AtomicU64,
    _pad1: [u64; 6],
    /// `added - taken` when the queue was empty: handshakes that never ended, or have not
    /// yet. Measured by the monitor.
    pub drift: AtomicU64,
    _pad2: [u64; 7],
}

impl Queue {
    /// Connections that wait, as far as the counts tell.
    pub fn length(&self) -> u64 {
        use fsocket_sync::atomic::Ordering::Relaxed;
        let n = self.added.load(Relaxed).wrapping_sub(self.taken.load(Relaxed)).wrapping_sub(self.drift.load(Relaxed));
        // Below zero: what was under way when the drift was measured has arrived.
        if n > i64::MAX as u64 {
            0
        } else {
            n
        }
    }
}

#[repr(C, align(64))]
pub struct Balance {
    /// Bit per queue (place - 1): its length has exceeded `high`, and its average has not
    /// yet fallen below `low`.
    pub busy: AtomicU64,
    /// Bit per queue: its worker is gone; what still waits in it is anybody's.
    pub gone: AtomicU64,
    /// Not 0: the monitor is not looking, and wants to be rung when something is added.
    pub idle: AtomicU32,
    /// Longest that a queue should be: the backlog over the zones. 0: no balance.
    pub limit: AtomicU32,
    /// Busy above this length.
    pub high: AtomicU32,
    /// Not busy any more below this average, in units of 1 / [`ONE`].
    pub low: AtomicU32,
    /// Local connections that are accepted for one stolen from a busy zone.
    pub ratio: AtomicU32,
    /// A connection in a queue that is not busy is left alone while the queue's worker has
    /// looked within this, microseconds; [`TRUST`] times as long if it keeps up.
    pub patience: AtomicU32,
    /// Bit per queue: its worker does not keep up, of late a good part of what came was
    /// stolen.
    pub overloaded: AtomicU64,
    _pad: [u32; 4],
    pub queue: [Queue; QUEUES],
    /// Connections stolen, by thief and victim.
    pub stolen: [[AtomicU32; QUEUES]; QUEUES],
}

/// Bytes of a mapping.
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
