//! Memory and descriptors that are kept for speed are given back when nothing happens: pages of
//! rings that carried bulk data, and placeholders. The first sleep after such use is cut once, at
//! `QUIET_NS`. If nothing happened until then, memory and descriptors are released, and the sleep
//! goes on without a limit.

use crate::table::{Desc, DESCS};
use crate::{keeping, pool, token};
use core::sync::atomic::Ordering;
use fsocket_abi::channel::RING_CAP;
use fsocket_abi::half::Half;
use fsocket_ring as ring;
use fsocket_sys::{self as sys, cpu};

/// The time in nanoseconds during which nothing must happen.
const QUIET_NS: u64 = 200_000_000;
const PAGE: usize = 4096;

/// Called before a sleep on a futex. Such a sleep cannot be cut, because a wait with a time-out is
/// not restarted after a signal, where the kernel's `recv` would be. So only memory that was unused
/// for long enough is released.
pub fn before_sleep() {
    if keeping::KEEPING.load(Ordering::Relaxed) {
        let ns = cpu::ticks().wrapping_sub(keeping::SINCE.load(Ordering::Relaxed)) / cpu::ticks_per_us() * 1000;
        if ns > QUIET_NS {
            give_back();
        }
    }
}

/// Makes the pages exist that a long message will touch: one call instead of one fault each. A lack
/// of memory then shows here, and not by a signal.
pub fn populate(d: &Desc, h: &Half, len: usize) {
    const CHUNK: u64 = 128 * 1024;
    const MADV_POPULATE_WRITE: i32 = 23;
    let at = ring::offset(h);
    if len < 8192 && at < 16384 {
        return;
    }
    d.conn().set_grown(true);
    keeping::keeping();
    let base = d.tx_memory();
    let have = h.populated();
    if at + CHUNK / 2 < have || have >= RING_CAP as u64 {
        return;
    }
    let from = have & !4095;
    let n = CHUNK.max(at + CHUNK / 2 - from).min(RING_CAP as u64 - from) & !4095;
    // SAFETY: the range is inside this side's ring, and populating changes no content.
    if unsafe { sys::madvise(base.add(from as usize), n as usize, MADV_POPULATE_WRITE) }.is_ok() {
        h.set_populated(from + n);
    }
}

/// Shortens a sleep of `limit` (None: for ever). If the second value is set, the caller calls
/// [`give_back`] after that time without events.
pub fn cut(limit: Option<u64>) -> (Option<u64>, bool) {
    if !keeping::KEEPING.load(Ordering::Relaxed) || limit.is_some_and(|l| l <= QUIET_NS) {
        return (limit, false);
    }
    (Some(QUIET_NS), true)
}

#[cold]
pub fn give_back() {
    keeping::KEEPING.store(false, Ordering::Relaxed);
    pool::drain();
    for d in (0..DESCS.len()).filter_map(|i| DESCS.get(i)) {
        // A ring with bytes is looked at after its next use.
        if d.is_conn() && d.conn().has_grown() && shrink(d) {
            d.conn().set_grown(false);
        }
    }
}

/// Frees all pages of the sending ring except the one that the peer polls.
fn shrink(d: &Desc) -> bool {
    let (_, tx, h) = d.tx();
    let Ok(_t) = token::enter(h) else { return false };
    if !d.is_conn() || ring::unread(tx, h) != 0 {
        return false;
    }
    let base = d.tx_memory();
    let keep = ring::offset(h) as usize & !(PAGE - 1);
    for (from, to) in [(0, keep), (keep + PAGE, RING_CAP)] {
        if from < to {
            // SAFETY: this side's ring is empty and its token is held, so nobody reads these pages
            // before this side writes them again. The next header is in the page that stays.
            let _ = unsafe { sys::madvise(base.add(from), to - from, libc::MADV_REMOVE) };
        }
    }
    h.set_populated(0);
    true
}
