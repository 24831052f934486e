//! The byte ring: one producer, one consumer, bytes in order, each message one
//! in-band record so that a small one costs a single cache-line transfer.
//!
//! A record is an 8-byte header (length and kind, never zero), the payload,
//! and padding to 8 bytes. The producer zeroes the *next* header before it release-stores this one,
//! so a consumer that polls the header at its position sees zero until there is a record. No record
//! straddles the end of the ring. When the ring is empty and the producer has left its first page,
//! it *rewinds* to offset 0, so that small-message traffic touches one page and stays in cache.
//!
//! Nothing here makes a system call. Both sides keep their positions in a private [`Half`]. The
//! words that the peer writes (`head`, record headers, `rewind_from`) are read once and checked; a
//! value that breaks the protocol gives [`Hostile`].
//!
//! A [`Half`] is private to the processes that share the socket by fork; any of them may write
//! anything into it at any time. That breaks only this connection. Every access begins at an offset
//! that is masked to the ring, and is at most as long as a record ([`record::MAX`]). There is room
//! for a record behind the ring ([`fsocket_abi::channel::RING_SLACK`]).
#![cfg_attr(not(loom), no_std)]

#[cfg(not(loom))]
use fsocket_abi::channel::RING_SLACK;
use fsocket_abi::channel::{record, Dir, POS_START, RING_CAP};
use fsocket_abi::half::Half;
use fsocket_sync::atomic::{AtomicU64, Ordering};
#[cfg(not(loom))]
use fsocket_uaccess as uaccess;

pub use consumer::{available, readable, recv, scan, turned};
pub use credit::{give_credit, on_credit, send_on_credit, send_tiny, slot, Slot};
pub use producer::{
    look, offset, send, send_by, send_small, space_target, unacknowledged, unread, unread_records, writable, Space,
    Unread,
};

#[cfg(not(loom))]
pub use segments::{Segment, Segments};

const CAP: u64 = RING_CAP as u64;
const MASK: u64 = CAP - 1;
/// The peer broke the protocol: only this connection is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hostile;

/// Why nothing was sent or received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failed {
    /// As [`Hostile`].
    Hostile,
    /// The program's memory is not accessible.
    Fault,
}
impl From<Hostile> for Failed {
    fn from(_: Hostile) -> Failed {
        Failed::Hostile
    }
}

/// Where the bytes of a ring lie.
///
/// # Safety
/// `header` must return the aligned word at byte offset `off` (a multiple of 8, below the capacity)
/// of the memory that `write` and `read` copy to and from. That memory must stay mapped while the
/// value lives.
pub unsafe trait Bytes: Copy {
    fn header(&self, off: usize) -> &AtomicU64;
    /// False: `src` is not readable.
    ///
    /// # Safety
    /// `src` points to `n` bytes, as the program passed it; `off` is at most a header behind the
    /// capacity, `n` at most [`record::MAX`] and not 0.
    unsafe fn write(&self, off: usize, src: *const u8, n: usize) -> bool;
    /// Writes `n` bytes behind the header at `off`, the empty header that follows them, and
    /// then that header, released. False: `src` is not readable, and nothing is published.
    ///
    /// # Safety
    /// As `write`; `n` is [`tiny`], and `off` below the capacity.
    #[inline(always)]
    unsafe fn put_tiny(&self, off: usize, src: *const u8, n: usize, header: u64) -> bool {
        // SAFETY: `off` is below the capacity and `n` tiny, so the bytes end within the slack.
        if !unsafe { self.write(off + record::HDR as usize, src, n) } {
            return false;
        }
        self.header(off + (record::HDR + align8(n as u64)) as usize).store(0, Ordering::Relaxed);
        self.header(off).store(header, Ordering::Release);
        true
    }
    /// False: `dst` is not writable.
    ///
    /// # Safety
    /// `dst` points to `n` bytes, as the program passed it; `off` is below the capacity, `n` at most
    /// [`record::MAX`] and not 0.
    unsafe fn read(&self, off: usize, dst: *mut u8, n: usize) -> bool;
}

/// A ring in mapped memory.
#[cfg(not(loom))]
#[derive(Clone, Copy)]
pub struct Mapped(*mut u8);

#[cfg(not(loom))]
impl Mapped {
    /// # Safety
    /// `base` is 8-aligned and mapped, readable and writable, for `RING_CAP + RING_SLACK`
    /// bytes for as long as the value is used.
    #[inline(always)]
    pub const unsafe fn new(base: *mut u8) -> Self {
        Mapped(base)
    }

    /// Where the byte at this offset is. Behind the capacity lie [`RING_SLACK`] more bytes.
    #[inline]
    pub fn place(self, off: usize) -> *mut u8 {
        debug_assert!(off <= RING_CAP + RING_SLACK);
        self.0.wrapping_add(off)
    }
}

#[cfg(not(loom))]
// SAFETY: `new` has got a mapping of the ring and its slack. `header` masks the offset, and the copies end within the slack.
unsafe impl Bytes for Mapped {
    #[inline(always)]
    fn header(&self, off: usize) -> &AtomicU64 {
        debug_assert!(off.is_multiple_of(8) && off < RING_CAP);
        // SAFETY: masking keeps the word inside the mapping.
        unsafe { &*(self.0.add(off & (MASK as usize & !7)) as *const AtomicU64) }
    }
    #[inline(always)]
    unsafe fn write(&self, off: usize, src: *const u8, n: usize) -> bool {
        debug_assert!(off + n <= RING_CAP + RING_SLACK);
        // SAFETY: `off + n` ends within the slack; application memory and the ring do not
        // overlap (a concurrent write by a hostile peer only garbles its bytes).
        unsafe { uaccess::copy(src, self.0.add(off), n) }
    }
    #[inline(always)]
    unsafe fn put_tiny(&self, off: usize, src: *const u8, n: usize, header: u64) -> bool {
        debug_assert!(off.is_multiple_of(8) && off < RING_CAP && tiny(n));
        // SAFETY: `off` is in the ring, and a tiny record with its empty header ends within the slack. The consumer
        // reads the empty header only after the one before, so it need not be an atomic store. Stores wait until the
        // line comes from the consumer's cache: with fewer stores, more messages can wait at a time.
        unsafe {
            let at = self.0.add(off);
            if !uaccess::tiny::<{ record::HDR as usize }>(src, at, n) {
                return false;
            }
            (*(at as *const AtomicU64)).store(header, Ordering::Release);
        }
        true
    }
    #[inline(always)]
    unsafe fn read(&self, off: usize, dst: *mut u8, n: usize) -> bool {
        debug_assert!(off + n <= RING_CAP + RING_SLACK);
        // SAFETY: `off + n` ends within the slack; application memory and the ring do not overlap.
        unsafe { uaccess::fetch(self.0.add(off), dst, n) }
    }
}

#[inline(always)]
const fn align8(n: u64) -> u64 {
    n.wrapping_add(7) & !7
}

/// Start values of a fresh direction; both sides call it on their own half.
pub fn init_half(h: &Half) {
    h.set_pos(POS_START);
    h.set_base(POS_START);
    h.set_limit(0);
    h.set_credit(0);
    h.set_bytes(0);
    h.set_populated(0);
    h.set_fence(0);
    h.set_cpu(u32::MAX);
    h.set_cap(0);
    h.set_lowat(0);
}

/// The approximate number of records that this half has carried: each has a header, and is filled
/// up to 8 bytes.
pub fn records(h: &Half) -> u64 {
    let spent = h.pos().wrapping_sub(POS_START);
    spent.saturating_sub(h.bytes()) / (record::HDR + 3)
}

/// Start values of the shared lines of a direction, and the first header. The client sets them
/// before it publishes the SYN, while no other party uses the slot.
pub fn init_dir<B: Bytes>(b: B, d: &Dir) {
    d.prod.status.store(0, Ordering::Relaxed);
    d.prod.cpu.store(0, Ordering::Relaxed);
    d.prod.rewind_from.store(0, Ordering::Relaxed);
    d.prod.space_at.store(0, Ordering::Relaxed);
    d.prod.ns.store(0, Ordering::Relaxed);
    d.prod.options.store(0, Ordering::Relaxed);
    d.prod.pids.iter().for_each(|n| n.store(0, Ordering::Relaxed));
    d.cons.head.store(POS_START, Ordering::Relaxed);
    d.cons.cpu.store(0, Ordering::Relaxed);
    d.cons.window.store(0, Ordering::Relaxed);
    d.want_data.renew();
    d.want_space.renew();
    b.header(0).store(0, Ordering::Relaxed);
}

/// Is [`send_tiny`] meant for `len` (8 to 16 bytes)?
#[inline(always)]
pub const fn tiny(len: usize) -> bool {
    len.wrapping_sub(8) <= 8
}

/// Largest message for [`send_small`], bytes.
pub const SMALL: usize = 2048;
/// Is [`send_small`] meant for `len`?
#[inline(always)]
pub const fn small(len: usize) -> bool {
    len.wrapping_sub(1) < SMALL
}

mod consumer;
mod credit;
pub mod dispatch;
mod producer;
#[cfg(not(loom))]
mod segments;
pub mod syn;

#[cfg(all(test, loom))]
mod model;
#[cfg(all(test, not(loom)))]
mod tests;
