//! TCP_USER_TIMEOUT: a connection whose peer reads nothing for that long, while more is under way than the peer's buffer
//! holds, ends with ETIMEDOUT.
//!
//! The kernel has a timer. Here a sender notes the connection when it is behind, and whoever sleeps next sleeps no
//! longer than until the first of them is over: each sleep asks [`cut`]. A program that does not sleep asks
//! [`look`] by its calls. A program without the option pays one load.

use crate::conn;
use crate::options::USER_TIMEOUT;
use crate::table::{Desc, DESCS};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use fsocket_abi::channel::status;
use fsocket_abi::flags::FlagSet;
use fsocket_ring as ring;
use fsocket_sys as sys;

/// Connections that are behind. (A connection that finds no place is noted at its next send.)
const PLACES: usize = 256;
/// The kernel's first probe of a window that is closed comes so late, and from then on it counts, nanoseconds.
const FIRST_PROBE_NS: u64 = 200_000_000;
/// No connection is behind.
const NEVER: u64 = u64::MAX;

struct Place {
    /// Index of a descriptor + 1; 0: free.
    desc: AtomicU32,
    /// Which connection of that descriptor.
    which: AtomicU64,
    /// How far the peer had read, and when that was seen first, nanoseconds of the clock.
    head: AtomicU64,
    since: AtomicU64,
}

static BEHIND: [Place; PLACES] = [const {
    Place { desc: AtomicU32::new(0), which: AtomicU64::new(0), head: AtomicU64::new(0), since: AtomicU64::new(0) }
}; PLACES];
/// Nanoseconds of the clock at which the first of them may be over.
#[link_section = ".data.fsocket_start"]
static NEXT: AtomicU64 = AtomicU64::new(NEVER);

/// The time-out, nanoseconds; 0: none.
fn limit(d: &Desc) -> u64 {
    d.sock().option(USER_TIMEOUT).max(0) as u64 * 1_000_000
}

fn identity(d: &Desc) -> u64 {
    let place = d.sock().place();
    let generation = d.slot().generation.load(Ordering::Relaxed);
    u64::from(generation) << 32 ^ u64::from(place.channel) << 10 ^ place.slot as u64
}

/// After a send that has looked at the consumer, or when the option is set.
#[inline]
pub fn sent(d: &Desc) {
    if d.sock().option(USER_TIMEOUT) != 0 {
        note(d);
    }
}

#[cold]
fn note(d: &Desc) {
    let (_, tx, h) = d.tx();
    if ring::unacknowledged(tx, h) == 0 || limit(d) == 0 {
        return;
    }
    let (me, which) = (d.index() + 1, identity(d));
    let mine = BEHIND.iter().find(|p| p.desc.load(Ordering::Relaxed) == me);
    if mine.is_some_and(|p| p.which.load(Ordering::Relaxed) == which) {
        return;
    }
    let take = |p: &&Place| p.desc.compare_exchange(0, me, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    let Some(p) = mine.or_else(|| BEHIND.iter().find(take)) else { return };
    let now = sys::now_ns();
    p.head.store(tx.cons.head.load(Ordering::Relaxed), Ordering::Relaxed);
    p.since.store(now, Ordering::Relaxed);
    p.which.store(which, Ordering::Release);
    NEXT.fetch_min(now + limit(d) + FIRST_PROBE_NS, Ordering::AcqRel);
}

/// A sleep of `limit` (None: for ever): how long it may be now.
#[inline]
pub fn cut(limit: Option<u64>) -> Option<u64> {
    match NEXT.load(Ordering::Relaxed) {
        NEVER => limit,
        _ => cut_now(limit),
    }
}

#[cold]
fn cut_now(limit: Option<u64>) -> Option<u64> {
    look();
    let left = match NEXT.load(Ordering::Relaxed) {
        NEVER => return limit,
        next => next.saturating_sub(sys::now_ns()).max(1),
    };
    Some(limit.map_or(left, |l| l.min(left)))
}

/// Ends what is over.
#[inline]
pub fn look() {
    let next = NEXT.load(Ordering::Relaxed);
    if next != NEVER && sys::now_ns() >= next {
        look_at_all();
    }
}

#[cold]
fn look_at_all() {
    let now = sys::now_ns();
    NEXT.store(NEVER, Ordering::Release);
    for p in &BEHIND {
        let Some(d) = p.desc.load(Ordering::Acquire).checked_sub(1).and_then(|i| DESCS.get(i)) else { continue };
        match look_at(d, p, now) {
            Some(next) => _ = NEXT.fetch_min(next, Ordering::AcqRel),
            None => p.desc.store(0, Ordering::Release),
        }
    }
}

/// When it is over, if nothing happens; None: it is not behind any more.
fn look_at(d: &'static Desc, p: &Place, now: u64) -> Option<u64> {
    let _hold = conn::Hold::unless_gone(d)?;
    let timeout = if d.is_conn() { limit(d) } else { 0 };
    if timeout == 0 || p.which.load(Ordering::Acquire) != identity(d) || has_ended(d) {
        return None;
    }
    let (_, tx, h) = d.tx();
    if ring::unacknowledged(tx, h) == 0 {
        return None;
    }
    let head = tx.cons.head.load(Ordering::Relaxed);
    // The kernel's window opens again once half of the buffer is free.
    if head.wrapping_sub(p.head.load(Ordering::Relaxed)) >= u64::from(tx.cons.window.load(Ordering::Relaxed)) / 2 {
        p.head.store(head, Ordering::Relaxed);
        p.since.store(now, Ordering::Relaxed);
    }
    let end = p.since.load(Ordering::Relaxed) + timeout + FIRST_PROBE_NS;
    if now < end {
        return Some(end);
    }
    time_out(d);
    None
}

fn has_ended(d: &Desc) -> bool {
    let f = d.sock().flags.get();
    f.is_poisoned()
        || f.has_left()
        || f.has(FlagSet::TIMED_OUT)
        || d.rx_dir().prod.status.load(Ordering::Acquire) & (status::RST | status::MIGRATED) != 0
}

/// The connection is over for this side: what it has received can still be read, then comes ETIMEDOUT. The peer finds
/// a reset behind what it has not read, as it would find one when its kernel says that there is room again.
fn time_out(d: &'static Desc) {
    const OVER: FlagSet = FlagSet::TIMED_OUT.or(FlagSet::SHUT_RD).or(FlagSet::SHUT_WR).or(FlagSet::RST_REPORTED);
    let s = d.sock();
    if s.flags.set(OVER).has(FlagSet::TIMED_OUT) {
        return;
    }
    s.set_error(libc::ETIMEDOUT);
    // A sender on credit does not look at the flags.
    fsocket_sync::token::Words::withdraw(&s.tx);
    s.note_edge();
    conn::end(d, status::RST);
    conn::notify_all(d);
    conn::wake_own(d);
}
