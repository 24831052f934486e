//! Memory of rings at the last close, whatever the other side still holds (ADR 73).
//!
//! The kernel charges a ring's pages to the process that touched them first, as long as any process maps the channel.
//! So a side that closes frees them itself:
//!
//! | ring | when |
//! | --- | --- |
//! | the one that it reads | at the close: nobody reads it any more |
//! | the one that it writes, all read | at the close |
//! | the one that it writes, with unread bytes | later, when the other side has read them ([`look`]) |
//!
//! Some MiB are kept for the next connections in the same slots. To free pages and touch them again would cost short
//! connections with much data more than everything else. Short connections with few bytes pay only two comparisons.

use crate::chan::{self, Chan};
use crate::left::{Left, KEPT, LEFT};
use crate::table::Desc;
use core::sync::atomic::{AtomicU64, Ordering};
use fsocket_abi::channel::{status, RING_CAP, RING_SLACK};
use fsocket_ring as ring;
use fsocket_sync::trim;
use fsocket_sys as sys;

/// A connection that has used less of a ring frees nothing.
const LITTLE: u64 = 16 << 10;
/// Bytes that this process keeps in rings of closed connections.
const KEPT_MOST: u64 = 8 << 20;

/// [`LEFT`] after the last look.
static LEFT_BEFORE: AtomicU64 = AtomicU64::new(0);
/// The time of the last look, in ticks.
static LOOKED: AtomicU64 = AtomicU64::new(0);

/// This side is closing for good and has not said so yet, so the slot still belongs to it. The caller has
/// both tokens.
#[inline]
pub fn closing(d: &Desc) {
    let s = d.sock();
    let received = s.rx.bytes();
    if received > LITTLE || d.conn().has_grown() {
        free(d, received);
    }
}

#[cold]
fn free(d: &Desc, received: u64) {
    let Some(c) = chan::of(d) else { return };
    let slot = d.conn().slot_index();
    let (_, tx, h) = d.tx();
    let used = |bytes: u64| bytes.min(RING_CAP as u64);
    let sent = if d.conn().has_grown() { used(h.bytes()) } else { 0 };
    let received = if received > LITTLE { used(received) } else { 0 };
    if sent > 0 && ring::unread(tx, h) != 0 {
        let generation = d.slot().generation.load(Ordering::Relaxed);
        let left = Left { slot: slot as u16, generation, end: h.pos(), bytes: sent as u32 };
        leave(c, left);
        keep_or_punch(c, slot, [0, received]);
    } else {
        keep_or_punch(c, slot, [sent, received]);
    }
}

/// The arguments are bytes in the ring that this side writes, and in the one that it reads.
fn keep_or_punch(c: &Chan, slot: usize, [sent, received]: [u64; 2]) {
    let all = sent + received;
    if all == 0 {
        return;
    }
    if KEPT.load(Ordering::Relaxed) + all <= KEPT_MOST {
        c.kept_memory.keep(slot, all);
        return;
    }
    let own = c.my_side();
    for (bytes, dir) in [(sent, own), (received, 1 - own)] {
        if bytes > 0 {
            punch(c, slot, dir);
        }
    }
}

fn punch(c: &Chan, slot: usize, dir: usize) {
    if let Ok(rings) = c.rings(slot) {
        // SAFETY: the ring belongs to a mapped channel. Its bytes have all been read, or nobody reads them
        // any more. The side that writes it has closed, or is about to.
        let _ = unsafe { sys::madvise(rings.get(dir), RING_CAP + RING_SLACK, libc::MADV_REMOVE) };
    }
}

#[cold]
fn leave(c: &Chan, left: Left) {
    if let Some(mut all) = c.left() {
        all.add(left);
    }
    if LEFT.load(Ordering::Relaxed) > LEFT_BEFORE.load(Ordering::Relaxed) + KEPT_MOST {
        look();
    }
}

/// Called before a sleep in a process that shares memory: have the other sides read what was left?
#[inline]
pub fn look_if_due() {
    if LEFT.load(Ordering::Relaxed) != 0 {
        look_seldom();
    }
}

#[cold]
fn look_seldom() {
    const EVERY_US: u64 = 500_000;
    let now = sys::cpu::ticks();
    if now.wrapping_sub(LOOKED.load(Ordering::Relaxed)) >= EVERY_US * sys::cpu::ticks_per_us() {
        LOOKED.store(now, Ordering::Relaxed);
        look();
    }
}

#[cold]
fn look() {
    chan::all().for_each(look_in);
    LEFT_BEFORE.store(LEFT.load(Ordering::Relaxed), Ordering::Relaxed);
}

fn look_in(c: &'static Chan) {
    {
        // The lock keeps the memory mapped.
        let Some(_client) = c.try_client() else { return };
        let Some(mut all) = c.left().filter(|all| !all.is_empty() && c.id.load(Ordering::Relaxed) != 0) else { return };
        all.retain(|left| !is_over(c, left));
    }
    c.unmap_if_unused();
}

/// Frees the ring if all of it has been read. True: nothing is left to do. The client does not use the slot again
/// meanwhile ([`fsocket_sync::trim`]). When both sides have closed, the other side has freed the ring, because it was
/// the reader.
fn is_over(c: &Chan, left: &Left) -> bool {
    let (slot, own) = (left.slot as usize, c.my_side());
    let s = c.slot(slot);
    let is_free = || {
        s.generation.load(Ordering::Relaxed) != left.generation
            || s.dir[1 - own].prod.status.load(Ordering::Acquire) & status::CLOSED != 0
    };
    let head = &s.dir[own].cons.head;
    if !is_free() && head.load(Ordering::Acquire) != left.end {
        return false;
    }
    let _ = trim::while_in_use(&s.dir[own].cons.trims, is_free, || punch(c, slot, own));
    true
}
