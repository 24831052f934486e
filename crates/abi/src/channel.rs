//! The channel: shared memory of fixed size between one client process and one listener group. The
//! monitor makes and seals it, filled with zeros.
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

/// The number of connections in a channel.
pub const SLOTS: usize = 1024;
/// Bytes of one ring; a power of two. The memory is sparse: untouched pages cost nothing. The size
/// is twice a core's own cache (L2, usually 1 MiB): when the sender is that far ahead, its bytes
/// come from the cache that all cores share, at more than twice the speed (docs/performance.md).
/// Under loom a ring is so small that a model rewinds and wraps within a few messages.
pub const RING_CAP: usize = if cfg!(loom) { 128 } else { 2 << 20 };
/// Bytes after each ring that no record uses. A hostile process of the fork group may change the
/// positions from which a record's place is computed at any time. Even then a record begins inside
/// the ring and ends within the slack at the latest. So the data path need not check positions,
/// and cannot touch another connection.
pub const RING_SLACK: usize = (record::MAX as usize + 2 * record::HDR as usize).next_multiple_of(4096);
/// Distance from one ring to the next.
const RING_STRIDE: usize = RING_CAP + RING_SLACK;
/// Stream positions start here, so that no position is zero.
pub const POS_START: u64 = RING_CAP as u64;
/// The most workers of a listener group that have their own SYN queue.
pub const WORKERS: usize = 64;
/// Entries of one SYN queue; a power of two.
pub const SYN_CAP: usize = if cfg!(loom) { 2 } else { 256 };
/// Waiters per side: one for each bit of a want mask.
pub const WAITERS: usize = fsocket_sync::doorbell::BITS;

pub const MAGIC: u64 = u64::from_le_bytes(*b"fsockCH1");

/// The side of a channel: an index into its waiters.
pub const CLIENT: usize = 0;
pub const SERVER: usize = 1;
/// The direction of a ring: an index into [`Slot::dir`]. Side `d` *sends* into `dir[d]`.
pub const TO_SERVER: usize = 0;
pub const TO_CLIENT: usize = 1;

pub const SYN_OFF: usize = 4096;
pub const WAITER_OFF: usize = SYN_OFF + ((1 + WORKERS) * core::mem::size_of::<SynQueue>()).next_multiple_of(4096);
pub const SLOT_OFF: usize = WAITER_OFF + (2 * (WAITERS + 1) * core::mem::size_of::<Waiter>()).next_multiple_of(4096);
pub const RING_OFF: usize = SLOT_OFF + (SLOTS * core::mem::size_of::<Slot>()).next_multiple_of(4096);
/// Size of the channel's memfd in bytes.
pub const CHANNEL_SIZE: usize = RING_OFF + SLOTS * 2 * RING_STRIDE;

/// Byte offset of ring `dir` of `slot`.
#[inline(always)]
pub const fn ring_off(slot: usize, dir: usize) -> usize {
    RING_OFF + (slot * 2 + dir) * RING_STRIDE
}

/// The number of slots whose rings are in the first segment. This segment also has everything
/// before the rings.
pub const FIRST_SLOTS: usize = 4;
/// The number of segments of a channel. A process maps a segment when it first uses a slot in it
/// (ADR 64). Each segment after the first has as many slots as all earlier ones together. So there
/// are few mappings, and they take at most twice the address space that is needed.
pub const SEGMENTS: usize = 1 + (SLOTS / FIRST_SLOTS).ilog2() as usize;
/// Channels take at most one part in this many of a limited address space (`RLIMIT_AS`).
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

/// The first page. The monitor writes it, except `busy`, `idle` and `arrived`; the two sides
/// should only read the rest. If a side writes there, it harms only this channel.
#[repr(C)]
pub struct Header {
    pub magic: u64,
    pub version: u32,
    pub id: u32,
    /// Bit w: worker w of the listener group exists and has queue 1 + w.
    pub workers: AtomicU64,
    /// Not zero: no process accepts any more, so new connections must use the kernel.
    pub listener_closed: AtomicU32,
    /// Not zero: the client process has ended.
    pub client_gone: AtomicU32,
    /// Bit w: the queue of worker w was long recently. Written by the client, as a hint from which
    /// worker to steal first.
    pub busy: AtomicU64,
    /// Bit w: the CPU of worker w has no time left, and the CPU of another worker has. The client
    /// should give new connections to other workers.
    pub avoid: AtomicU64,
    /// 1: the monitor does not look at this channel. A client that puts a connection into a queue
    /// sets the word to 0 with a swap. If it was 1, the client tells the monitor.
    pub idle: AtomicU32,
    /// Not 0: no balance. Connections go to the workers in turn, and only that worker accepts
    /// them.
    pub turns: AtomicU32,
    /// How often a worker has left connections behind in its queue, so that they are new to other
    /// workers. The count wraps.
    pub left_behind: AtomicU32,
    _pad: [u64; 8],
    /// Connections that the client has put into any of the queues. Counted before the queue entry
    /// is there; the count wraps. It has its own cache line, because the fields above are read at
    /// each connection and rarely written.
    pub arrived: AtomicU32,
    _pad1: [u64; 8],
}

/// A SYN queue. The client process puts connections in (under its own lock). Any worker of the
/// group takes them out: from its own queue, or as a thief from another one.
#[cfg_attr(loom, derive(Default))]
#[repr(C, align(64))]
pub struct SynQueue {
    /// The next entry to write. Only the client writes this.
    pub tail: AtomicU32,
    _pad0: [u32; 15],
    /// The next entry to take. Workers change this by compare-and-swap.
    pub head: AtomicU32,
    _pad1: [u32; 15],
    /// Waiters of the server that are woken by a new entry.
    pub want: Want,
    /// Slot number + 1 of each waiting connection; 0: empty.
    pub entry: [AtomicU32; SYN_CAP],
}

/// A thread that waits for many things: in an epoll instance or in one `poll` call. The owner
/// sleeps on its own descriptor (its *waker*). The peer sets `ready` bits, and rings the waker
/// only if `sleeping` is set. At first it rings through the monitor, later by a pipe that only
/// these two processes share (ADR 38).
#[repr(C, align(64))]
pub struct Waiter {
    /// [`waker_key`] of the owner; 0: free. Claimed by compare-and-swap.
    pub waker: AtomicU64,
    /// Set by the owner before it sleeps, and cleared by the process that rings; see [`sleeping`].
    pub sleeping: AtomicU32,
    _pad: u32,
    _pad1: [u64; 6],
    /// Bit i: `ready[i]` may be non-zero. Bit 63: a SYN queue may have connections.
    pub summary: AtomicU64,
    _pad2: [u64; 7],
    /// One bit for each slot in which something has changed.
    pub ready: [AtomicU64; SLOTS / 64],
}
/// Values of [`Waiter::sleeping`].
pub mod sleeping {
    pub const NO: u32 = 0;
    pub const YES: u32 = 1;
    /// The owner is in `accept` only. If several owners are, a new connection wakes only one. (A
    /// value that is not listed here counts as YES.)
    pub const ONE: u32 = 2;
}

/// Names a waiting thread or an epoll instance: by the nonce of its process, and the index of its
/// waker there.
pub const fn waker_key(nonce: u64, waker: usize) -> u64 {
    nonce & !KEY_WAKER | (waker as u64 + 1) & KEY_WAKER
}
/// The bits of a [`waker_key`] that have the waker's index + 1.
pub const KEY_WAKER: u64 = 0xff;

/// Bit of [`Waiter::summary`]: a SYN queue may have connections.
pub const SUMMARY_SYN: u64 = 1 << 63;

/// Values of [`Slot::state`].
pub mod slot_state {
    /// Not in use, or the client is just filling it in.
    pub const FREE: u32 = 0;
    /// In a SYN queue. The client may send already.
    pub const SYN: u32 = 1;
    /// A worker has accepted the connection.
    pub const ESTABLISHED: u32 = 2;
    /// States of a kernel connection that is to move to shared memory, combined with the slot's
    /// generation ([`of`]). OFFERED: the opener waits for the other side. TAKEN: the other side
    /// has taken the offer and waits for the opener. REFUSED: a side has refused.
    pub const OFFERED: u32 = 3;
    pub const TAKEN: u32 = 4;
    pub const REFUSED: u32 = 5;
    /// Adds the generation to a state. So a side that is late does not confuse the next use of the
    /// slot with its own.
    pub fn of(state: u32, generation: u32) -> u32 {
        state | generation << 8
    }
}

/// Bits of [`Slot::sharing`]: options of the sockets of both ends.
pub mod sharing {
    /// SO_REUSEADDR, SO_REUSEPORT and IPV6_V6ONLY of the client's socket.
    pub const ADDRESS: u8 = 1;
    pub const PORT: u8 = 2;
    pub const V6ONLY: u8 = 4;
    /// For the server's socket, if its options have changed since it was accepted: how far to
    /// shift the bits of the present options, and the bits that mark them as changed.
    pub const SERVER_SHIFT: u8 = 3;
    pub const CHANGED_SHIFT: u8 = 5;
}

/// Control block of one connection.
#[repr(C, align(64))]
pub struct Slot {
    /// See [`slot_state`]. The client stores SYN (with release) after all other fields. The worker
    /// that accepts stores ESTABLISHED.
    pub state: AtomicU32,
    /// Counts the uses of the slot.
    pub generation: AtomicU32,
    /// The family of the client's socket: AF_INET or AF_INET6.
    pub family: AtomicU8,
    /// Whether the two ends share their addresses with other sockets: see [`sharing`].
    pub sharing: AtomicU8,
    /// The client's port in host byte order.
    pub client_port: AtomicU16,
    /// 1: one side switches the path, and the other one follows. If both sides want to switch, the
    /// compare-and-swap from 0 to 1 decides.
    pub switching: AtomicU32,
    /// The destination address that the client named; IPv4 in v4-mapped form.
    pub dst: [AtomicU8; 16],
    /// One for each direction, written before a side sets MIGRATED. The writer is the consumer, or
    /// with [`status::CARRIED`] the producer.
    pub migrated: [Migrated; 2],
    pub dir: [Dir; 2],
}

/// Status bits that a sender sets in [`Prod::status`]. The bits of the path switch are private to
/// [`crate::path_switch`].
pub mod status {
    /// The sender will send no more data.
    pub const FIN: u32 = 1;
    /// Reset: after the bytes that it can still read, the peer gets ECONNRESET.
    pub const RST: u32 = 2;
    /// The sender has closed its socket, so it also reads no more.
    pub const CLOSED: u32 = 4;
    /// The sender has shut down both directions and keeps the socket. Data that arrives now is
    /// answered with a reset.
    pub const SHUT_BOTH: u32 = 32;
    /// The sender is changing the connection's path: it writes nothing more into its ring, and is
    /// about to take the unread bytes from the other ring.
    pub(crate) const MIGRATING: u32 = 8;
    /// The sender has changed the path: after the last byte of its ring the stream continues in a
    /// kernel socket. The peer must send the bytes that this side left unread in the other ring
    /// again there ([`super::Migrated`]).
    pub(crate) const MIGRATED: u32 = 16;
    /// With MIGRATED: the connection may return, because an operator has asked for the kernel for
    /// some time.
    pub(crate) const FOR_NOW: u32 = 64;
    /// With MIGRATED: the unread bytes of this ring come first in the other side's kernel socket,
    /// so the other side stops reading the ring at once. In `Migrated` of that direction, `base`
    /// is the position of the first of these bytes in the stream, and `limit` their number.
    pub(crate) const CARRIED: u32 = 128;
}

/// Where the consumer of a ring was when it changed the path. Together with [`Cons::head`] this is
/// the full state of a consumer.
#[cfg_attr(loom, derive(Default))]
#[repr(C)]
pub struct Migrated {
    /// The stream position of offset 0 of the ring.
    pub base: AtomicU64,
    /// Unread bytes of the record at [`Cons::head`].
    pub limit: AtomicU64,
}

/// One direction of a connection. Each cache line has one writer.
#[cfg_attr(loom, derive(Default))]
#[repr(C, align(64))]
pub struct Dir {
    pub prod: Prod,
    pub cons: Cons,
    /// Armed by the consumer, to be woken by data, FIN or RST.
    pub want_data: Want,
    /// Armed by the producer, to be woken by space or the peer's close.
    pub want_space: Want,
}

/// Fields that the sender writes rarely. A receiver that finds no record looks here.
#[cfg_attr(loom, derive(Default))]
#[repr(C, align(64))]
pub struct Prod {
    pub status: AtomicU32,
    /// The CPU on which the sender runs, plus one; 0: unknown.
    pub cpu: AtomicU32,
    /// The position at which the ring was empty and the sender went back to offset 0 of the ring.
    pub rewind_from: AtomicU64,
    /// When `want_space` is armed: the receiver wakes the sender once `head` has reached this
    /// position.
    pub space_at: AtomicU64,
    /// Numbers of the processes that hold this end, for a peer to which no monitor would report
    /// their death. 0: none; `u32::MAX`: a forked child that has not entered its own number yet.
    pub pids: [AtomicU32; HOLDERS],
    /// The PID namespace of those numbers. 0: unknown, or there are more processes.
    pub ns: AtomicU32,
    /// On the server's side, before it accepts: marks the first change of the listener's options
    /// that came after this connection; 0: none.
    pub options: AtomicU32,
}
/// The most processes named in [`Prod::pids`].
pub const HOLDERS: usize = 8;

/// Written by the receiver after each read.
#[cfg_attr(loom, derive(Default))]
#[repr(C, align(64))]
pub struct Cons {
    /// The position up to which the receiver has consumed bytes.
    pub head: AtomicU64,
    /// The CPU on which the receiver runs, plus one; 0: unknown.
    pub cpu: AtomicU32,
    /// How many bytes the receiver's buffer allows under way beyond the sender's own buffer, if
    /// the program has set the latter ([`crate::half::Half::cap`]).
    pub window: AtomicU32,
    /// The number of processes of the sender's side that free memory of this ring now
    /// ([`fsocket_sync::trim`]). Written by these processes.
    pub trims: AtomicU32,
}

/// A record header, which is never zero. The low 32 bits are the length in bytes, the high 32 bits
/// the kind. If the sender has turned to this connection from another one, the header also has a time
/// (*when*), in the bits that length and kind do not need: 8 bits above the 24 of the length, and
/// 30 bits above the 2 of the kind.
pub mod record {
    pub const DATA: u64 = 1;
    /// The record skips to the end of the ring.
    pub const PAD: u64 = 2;
    /// Bytes of a record header.
    pub const HDR: u64 = 8;
    /// The longest record. A longer message is published in several records, so that the receiver
    /// copies one while the sender copies the next.
    pub const MAX: u64 = 32 * 1024;

    const LEN: u64 = (1 << 24) - 1;
    /// A unit of `when` is 2 to this power ticks of the CPU's counter. That is less than the time
    /// of a turn, and a value repeats only after minutes.
    const UNIT: u32 = 2;
    const MODULO: u64 = 1 << 38;

    /// Makes a header. `when`: 0, or a [`stamp`].
    #[inline(always)]
    pub const fn pack(kind: u64, len: u64, when: u64) -> u64 {
        len | (when & 0xff) << 24 | kind << 32 | when >> 8 << 34
    }
    /// Returns kind and length.
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
    /// Converts a time in ticks for `when`. The result never fits into the 8 bits beside the
    /// length alone, because a header whose upper half is just [`DATA`] has no time.
    pub const fn stamp(ticks: u64) -> u64 {
        match (ticks >> UNIT) % MODULO {
            n @ 0..=0xff => n | 0x100,
            n => n,
        }
    }
    /// The time in ticks that has this stamp and is nearest to `now`.
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
