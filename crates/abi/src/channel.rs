//! The channel: shared memory between one client process and one listener
//! group. Made and sealed by the monitor, zero-filled, fixed size.
//!
//! ```text
//! 0                HEADER      one page
//! SYN_OFF          65 SYN queues (0: any worker; 1 + w: worker w)
//! WAITER_OFF       2 sides x 61 waiters
//! SLOT_OFF         1024 slot controls
//! RING_OFF         1024 x 2 rings of RING_CAP bytes, RING_SLACK behind each, sparse
//! ```
//!
//! Long: one layout, with its assertions.

use fsocket_sync::atomic::{AtomicU16, AtomicU32, AtomicU64, AtomicU8};
use fsocket_sync::doorbell::Want;

/// Connections per channel.
pub const SLOTS: usize = 1024;
/// Bytes of one ring; a power of two. Sparse: untouched pages cost nothing.
/// Twice what the cache of one core holds (L2, 1 MiB as a rule): a sender that is so far ahead has its bytes
/// fetched from the cache that all cores share, at more than twice the speed (docs/performance.md).
/// Under loom so few that a model rewinds and wraps within some messages.
pub const RING_CAP: usize = if cfg!(loom) { 128 } else { 2 << 20 };
/// Bytes behind each ring that no record uses: a record whose place was computed from positions that
/// a hostile process of the fork group keeps changing begins inside the ring and ends here at the latest. So
/// the data path has no positions to check, and no other connection is touched.
pub const RING_SLACK: usize = (record::MAX as usize + 2 * record::HDR as usize).next_multiple_of(4096);
/// From one ring to the next.
const RING_STRIDE: usize = RING_CAP + RING_SLACK;
/// Stream positions start here, so that zero never is one.
pub const POS_START: u64 = RING_CAP as u64;
/// Workers of a listener group that get a SYN queue of their own.
pub const WORKERS: usize = 64;
/// Entries of one SYN queue; a power of two.
pub const SYN_CAP: usize = if cfg!(loom) { 2 } else { 256 };
/// Waiters per side: as many as a want mask has bits for.
pub const WAITERS: usize = fsocket_sync::doorbell::BITS;

pub const MAGIC: u64 = u64::from_le_bytes(*b"fsockCH1");

/// Side of a channel: index into `waiters`.
pub const CLIENT: usize = 0;
pub const SERVER: usize = 1;
/// Direction of a ring: index into [`Slot::dir`]. The side that *sends* into
/// `dir[d]` is side `d`.
pub const TO_SERVER: usize = 0;
pub const TO_CLIENT: usize = 1;

pub const SYN_OFF: usize = 4096;
pub const WAITER_OFF: usize = SYN_OFF + ((1 + WORKERS) * core::mem::size_of::<SynQueue>()).next_multiple_of(4096);
pub const SLOT_OFF: usize = WAITER_OFF + (2 * (WAITERS + 1) * core::mem::size_of::<Waiter>()).next_multiple_of(4096);
pub const RING_OFF: usize = SLOT_OFF + (SLOTS * core::mem::size_of::<Slot>()).next_multiple_of(4096);
/// Size of the memfd of a channel, bytes.
pub const CHANNEL_SIZE: usize = RING_OFF + SLOTS * 2 * RING_STRIDE;

/// Byte offset of ring `dir` of `slot`.
#[inline(always)]
pub const fn ring_off(slot: usize, dir: usize) -> usize {
    RING_OFF + (slot * 2 + dir) * RING_STRIDE
}

/// Slots whose rings are in the first segment, with all that lies before the rings.
pub const FIRST_SLOTS: usize = 4;
/// Segments of a channel. A process maps each when it first uses a slot in it (ADR 64). From the second on each has the
/// rings of as many slots as all before it: few mappings, and no more than twice the addresses that are needed.
pub const SEGMENTS: usize = 1 + (SLOTS / FIRST_SLOTS).ilog2() as usize;
/// Channels take that part of a limited address space (`RLIMIT_AS`) at most.
pub const ADDRESS_SHARE: u64 = 4;

/// The segment that has the rings of `slot`.
#[inline]
pub const fn segment_of(slot: usize) -> usize {
    match slot / FIRST_SLOTS {
        0 => 0,
        n => 1 + n.ilog2() as usize,
    }
}
/// Byte offsets of a segment's beginning and end.
pub const fn segment(n: usize) -> (usize, usize) {
    let from = if n == 0 { 0 } else { ring_off(FIRST_SLOTS << (n - 1), 0) };
    (from, ring_off(FIRST_SLOTS << n, 0))
}

/// First page. Written by the monitor but for `busy`, `idle` and `arrived`; the sides only read it (either could
/// scribble on it: that hurts this channel alone).
#[repr(C)]
pub struct Header {
    pub magic: u64,
    pub version: u32,
    pub id: u32,
    /// Bit w: worker w of the listener group is there and has queue 1 + w.
    pub workers: AtomicU64,
    /// Not zero: nobody accepts any more; a new connection must use the kernel.
    pub listener_closed: AtomicU32,
    /// Not zero: the client process is gone.
    pub client_gone: AtomicU32,
    /// Written by the client: bit w, worker w's queue has been long lately. A hint of the worker to
    /// steal from first.
    pub busy: AtomicU64,
    /// Bit w: worker w's CPU has no time left, and that of another worker has: new
    /// connections are better off there.
    pub avoid: AtomicU64,
    /// 1: the monitor does not look at this channel. A client that puts something into a queue
    /// swaps it for 0, and tells the monitor.
    pub idle: AtomicU32,
    /// Not 0: no balance. Each connection to the next worker, who alone takes it.
    pub turns: AtomicU32,
    /// Workers that have left connections behind in their queue, which are news to others. It wraps.
    pub left_behind: AtomicU32,
    _pad: [u64; 8],
    /// Connections that the client has put into any of the queues, before each is there. It wraps. A line of its own:
    /// those above are read at each connection, and seldom written.
    pub arrived: AtomicU32,
    _pad1: [u64; 8],
}

/// SYN queue: the client process produces (under its own lock), any worker of
/// the group consumes (its own queue, or another's to steal).
#[cfg_attr(loom, derive(Default))]
#[repr(C, align(64))]
pub struct SynQueue {
    /// Next entry to write; client only.
    pub tail: AtomicU32,
    _pad0: [u32; 15],
    /// Next entry to take; workers, compare-and-swap.
    pub head: AtomicU32,
    _pad1: [u32; 15],
    /// Server waiters to tell of a new entry.
    pub want: Want,
    /// Slot number + 1 of each waiting connection; 0 is empty.
    pub entry: [AtomicU32; SYN_CAP],
}

/// A thread that waits for many things: an epoll instance or one `poll` call.
/// The owner sleeps on a descriptor that nobody else has (its *waker*); the peer sets `ready` bits
/// and rings only when `sleeping` is set: through the monitor at first, then by a pipe that these
/// two processes share with nobody (ADR 38).
#[repr(C, align(64))]
pub struct Waiter {
    /// [`waker_key`] of the owner; 0: free. Allocated by compare-and-swap.
    pub waker: AtomicU64,
    /// Set by the owner before it sleeps, cleared by whoever rings; see [`sleeping`].
    pub sleeping: AtomicU32,
    _pad: u32,
    _pad1: [u64; 6],
    /// Bit i: `ready[i]` may be non-zero. Bit 63: a SYN queue.
    pub summary: AtomicU64,
    _pad2: [u64; 7],
    /// Bit per slot.
    pub ready: [AtomicU64; SLOTS / 64],
}
/// [`Waiter::sleeping`].
pub mod sleeping {
    pub const NO: u32 = 0;
    pub const YES: u32 = 1;
    /// In `accept`, alone: of several that wait so for a connection one is rung. (Any other value is as good as YES.)
    pub const ONE: u32 = 2;
}

/// Names a thread that waits, or an epoll instance: the process by its nonce, and which of its wakers.
pub const fn waker_key(nonce: u64, waker: usize) -> u64 {
    nonce & !KEY_WAKER | (waker as u64 + 1) & KEY_WAKER
}
/// The part of a [`waker_key`] that says which waker it is, plus one.
pub const KEY_WAKER: u64 = 0xff;

/// Bit of [`Waiter::summary`] for "a SYN queue has something".
pub const SUMMARY_SYN: u64 = 1 << 63;

/// Slot states, [`Slot::state`].
pub mod slot_state {
    /// Nobody's, or the client fills it in.
    pub const FREE: u32 = 0;
    /// In a SYN queue; the client may already send.
    pub const SYN: u32 = 1;
    /// A worker took it.
    pub const ESTABLISHED: u32 = 2;
    /// For a kernel connection that is to go over, with the slot's generation ([`of`]): its
    /// opener waits for the other side; which has taken it and waits for the opener; one of
    /// them does not want to.
    pub const OFFERED: u32 = 3;
    pub const TAKEN: u32 = 4;
    pub const REFUSED: u32 = 5;
    /// With it a side that comes late does not take the slot's next use for the one that it means.
    pub fn of(state: u32, generation: u32) -> u32 {
        state | generation << 8
    }
}

/// [`Slot::sharing`]: options of the sockets of both ends.
pub mod sharing {
    /// The client's SO_REUSEADDR, SO_REUSEPORT, IPV6_V6ONLY.
    pub const ADDRESS: u8 = 1;
    pub const PORT: u8 = 2;
    pub const V6ONLY: u8 = 4;
    /// The server's, if they have changed since it was accepted: how far the bits of what they are now lie above, and the
    /// bits that say so.
    pub const SERVER_SHIFT: u8 = 3;
    pub const CHANGED_SHIFT: u8 = 5;
}

/// Control block of one connection.
#[repr(C, align(64))]
pub struct Slot {
    /// See [`slot_state`]; SYN is stored (release) by the client after all
    /// else is in place, ESTABLISHED by the worker that accepts.
    pub state: AtomicU32,
    /// Counts uses of the slot.
    pub generation: AtomicU32,
    /// AF_INET or AF_INET6 as the client's socket has it.
    pub family: AtomicU8,
    /// With which other sockets the two ends share their addresses: [`sharing`].
    pub sharing: AtomicU8,
    /// Client's port, host order.
    pub client_port: AtomicU16,
    /// 1: one side switches the path, and the other one follows. Of two that want to, compare-and-swap from 0 decides.
    pub switching: AtomicU32,
    /// Destination as the client named it; IPv4 in v4-mapped form.
    pub dst: [AtomicU8; 16],
    /// By direction; written before one side says MIGRATED: by the consumer, or, with [`status::CARRIED`], by the producer.
    pub migrated: [Migrated; 2],
    pub dir: [Dir; 2],
}

/// Status bits of a sender, [`Prod::status`].
pub mod status {
    /// No more data will be sent.
    pub const FIN: u32 = 1;
    /// Reset: the peer sees ECONNRESET after what it can still read.
    pub const RST: u32 = 2;
    /// This side has closed altogether: it reads no more.
    pub const CLOSED: u32 = 4;
    /// This side has shut down both directions and keeps the socket: data that
    /// comes now is answered with a reset.
    pub const SHUT_BOTH: u32 = 32;
    /// This side is changing the connection's path: it sends nothing more into
    /// the ring, and is about to take what lies in the other one.
    pub const MIGRATING: u32 = 8;
    /// It has: behind the last byte of its ring the stream goes on in a kernel
    /// socket, and what it left unread in the other ring is the peer's to send
    /// again there ([`super::Moved`]).
    pub const MIGRATED: u32 = 16;
    /// With MIGRATED: only as long as an operator wants it.
    pub const FOR_NOW: u32 = 64;
    /// With MIGRATED: what the other side had not read of this ring comes first in its kernel socket, so that it leaves
    /// the ring at once. Of that direction `Migrated` has which byte of the stream is the first (`base`), and how many
    /// there are (`limit`).
    pub const CARRIED: u32 = 128;
}

/// Where the consumer of a ring was when it changed the path; with
/// [`Cons::head`] the whole state of a consumer.
#[repr(C)]
pub struct Migrated {
    /// Position at offset 0 of the ring.
    pub base: AtomicU64,
    /// Bytes left of the record at [`Cons::head`].
    pub limit: AtomicU64,
}

/// One direction of a connection; each line has one writer.
#[cfg_attr(loom, derive(Default))]
#[repr(C, align(64))]
pub struct Dir {
    pub prod: Prod,
    pub cons: Cons,
    /// Armed by the consumer: wake me when there is data, FIN or RST.
    pub want_data: Want,
    /// Armed by the producer: wake me when there is space (or the peer closed).
    pub want_space: Want,
}

/// Written by the sender, rarely: a receiver that finds no record looks here.
#[cfg_attr(loom, derive(Default))]
#[repr(C, align(64))]
pub struct Prod {
    pub status: AtomicU32,
    /// CPU the sender runs on, plus one; 0 unknown.
    pub cpu: AtomicU32,
    /// Position at which the ring was empty and the sender went back to offset
    /// 0 of the ring.
    pub rewind_from: AtomicU64,
    /// With `want_space` armed: wake the sender once `head` has reached this.
    pub space_at: AtomicU64,
    /// Processes that hold this end, for a peer that no monitor tells when they
    /// die; 0: none, `u32::MAX`: a child that has not entered itself yet.
    pub pids: [AtomicU32; HOLDERS],
    /// The process namespace of those numbers; 0: not known, or there are more.
    pub ns: AtomicU32,
    /// On the server's side, before it accepts: which change of the listener's options
    /// came behind this connection; 0: none.
    pub options: AtomicU32,
}
/// Processes named in [`Prod::pids`].
pub const HOLDERS: usize = 8;

/// Written by the receiver after each read.
#[cfg_attr(loom, derive(Default))]
#[repr(C, align(64))]
pub struct Cons {
    /// Position up to which bytes are consumed.
    pub head: AtomicU64,
    /// CPU the receiver runs on, plus one; 0 unknown.
    pub cpu: AtomicU32,
    /// Bytes the receiver's buffer adds to what a sender with a buffer of its own
    /// choice may have under way ([`crate::half::Half::cap`]).
    pub window: AtomicU32,
    /// How many processes of the sender's side free memory of the ring ([`fsocket_sync::trim`]). Written by them.
    pub trims: AtomicU32,
}

/// Record header, never zero. Low 32 bits length in bytes, high 32 bits kind; that is all, unless the
/// sender has turned to this connection from another one. Then *when* is said in what length and
/// kind leave free: 8 bits above the length's 24, 30 bits above the kind's 2.
pub mod record {
    pub const DATA: u64 = 1;
    /// Skip to the end of the ring.
    pub const PAD: u64 = 2;
    /// Bytes of a header.
    pub const HDR: u64 = 8;
    /// Longest record: published piece by piece, so that the receiver copies
    /// while the sender does.
    pub const MAX: u64 = 32 * 1024;

    const LEN: u64 = (1 << 24) - 1;
    /// Ticks of the CPU's counter in a unit of `when`, as a power of two: finer than it takes to turn,
    /// and only after minutes the same again.
    const UNIT: u32 = 2;
    const MODULO: u64 = 1 << 38;

    /// `when`: 0, or a [`stamp`].
    #[inline(always)]
    pub const fn pack(kind: u64, len: u64, when: u64) -> u64 {
        len | (when & 0xff) << 24 | kind << 32 | when >> 8 << 34
    }
    /// Kind and length.
    #[inline(always)]
    pub const fn unpack(header: u64) -> (u64, u64) {
        match header >> 32 {
            DATA => (DATA, header as u32 as u64),
            kind => (kind & 3, header & LEN),
        }
    }
    #[inline(always)]
    pub const fn when(header: u64) -> u64 {
        header >> 34 << 8 | header >> 24 & 0xff
    }
    /// `when` for a time in ticks. Never only in the length's part: a header whose upper half is
    /// [`DATA`] has none.
    pub const fn stamp(ticks: u64) -> u64 {
        match (ticks >> UNIT) % MODULO {
            n @ 0..=0xff => n | 0x100,
            n => n,
        }
    }
    /// The time in ticks with this stamp that is nearest to `now`.
    pub const fn time(stamp: u64, now: u64) -> u64 {
        let ahead = stamp.wrapping_sub(now >> UNIT) % MODULO;
        let ahead = if ahead < MODULO / 2 { ahead } else { ahead.wrapping_sub(MODULO) };
        (now >> UNIT).wrapping_add(ahead) << UNIT
    }
}

#[cfg(not(loom))]
const _: () = {
    use core::mem::{offset_of, size_of};
    assert!(size_of::<Header>() <= 4096);
    assert!(size_of::<SynQueue>() == 3 * 64 + SYN_CAP * 4);
    assert!(offset_of!(SynQueue, want) == 128);
    assert!(size_of::<Waiter>() == 256);
    assert!(offset_of!(Waiter, summary) == 64 && offset_of!(Waiter, ready) == 128);
    assert!(size_of::<Dir>() == 256 && size_of::<Prod>() == 64);
    assert!(size_of::<Slot>() == 64 + 512);
    assert!(RING_CAP.is_power_of_two() && SYN_CAP.is_power_of_two());
    assert!(RING_CAP < 1 << 24);
    assert!(RING_OFF.is_multiple_of(4096));
    assert!(segment(SEGMENTS - 1).1 == CHANNEL_SIZE);
};

#[cfg(all(test, not(loom)))]
mod tests {
    use super::record::*;

    #[test]
    fn a_header_holds_kind_length_and_time() {
        for kind in [DATA, PAD] {
            for len in [1, 8, MAX, super::RING_CAP as u64] {
                assert_eq!(pack(kind, len, 0), kind << 32 | len, "as short as it was");
                assert_eq!(when(pack(kind, len, 0)), 0);
                for ticks in [0, 1, 0x3ff, 0x400, 1 << 39, u64::MAX] {
                    let header = pack(kind, len, stamp(ticks));
                    assert_eq!((unpack(header), when(header)), ((kind, len), stamp(ticks)));
                    assert_ne!(header >> 32, DATA);
                }
            }
        }
    }

    #[test]
    fn each_ring_lies_in_the_segment_of_its_slot() {
        use super::*;
        for slot in 0..SLOTS {
            let (from, to) = segment(segment_of(slot));
            assert!(from <= ring_off(slot, 0) && ring_off(slot, 1) + RING_STRIDE <= to, "{slot}");
        }
        for n in 1..SEGMENTS {
            assert_eq!(segment(n).0, segment(n - 1).1);
            assert!(segment(n).1 <= 2 * segment(n - 1).1, "no more than twice what is needed");
        }
    }

    #[test]
    fn a_time_is_found_again_on_both_sides_of_now() {
        const MINUTE: u64 = 60 * 3_000_000_000;
        for now in [5 * MINUTE, (1 << 40) + 8_000, (1 << 62) - 8_000] {
            for at in [now - MINUTE, now - 4, now, now + 4, now + MINUTE] {
                assert_eq!(time(stamp(at), now), at & !3, "{at} seen at {now}");
            }
        }
    }
}
