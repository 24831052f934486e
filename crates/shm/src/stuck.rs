//! TCP_USER_TIMEOUT: a connection ends with ETIMEDOUT if its peer reads nothing for this time
//! while more bytes are in flight than the peer's buffer holds.
//!
//! The kernel has a timer for that. The library has none. A sender notes a connection whose peer
//! is behind. Each sleep of any thread asks [`sleep_limit`] and lasts at most until the first of
//! these connections times out. A program that does not sleep calls [`look`] in its calls. A
//! program that does not use the option pays one load.

use crate::conn;
use crate::options::USER_TIMEOUT;
use crate::table::{Desc, DESCS};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use fsocket_abi::channel::status;
use fsocket_abi::flags::FlagSet;
use fsocket_abi::path_switch::{Party, PathState};
use fsocket_ring as ring;
use fsocket_sys as sys;

/// Number of connections that can be noted. (A connection without a place is noted at a later
/// send.)
const PLACES: usize = 256;
/// The kernel sends its first probe of a closed window after this time, in nanoseconds. The user
/// timeout counts from that probe on.
const FIRST_PROBE_NS: u64 = 200_000_000;
/// Value of `NEXT` when no connection is noted.
const NEVER: u64 = u64::MAX;

struct Place {
    /// Index of a descriptor + 1; 0: free.
    desc: AtomicU32,
    /// Identifies the connection, because descriptors are reused.
    which: AtomicU64,
    /// The position up to which the peer had read, and when this process first saw that position,
    /// in nanoseconds.
    head: AtomicU64,
    since: AtomicU64,
}

static BEHIND: [Place; PLACES] = [const {
    Place { desc: AtomicU32::new(0), which: AtomicU64::new(0), head: AtomicU64::new(0), since: AtomicU64::new(0) }
}; PLACES];
/// The earliest possible time-out of a noted connection, in nanoseconds.
#[link_section = ".data.fsocket_start"]
static NEXT: AtomicU64 = AtomicU64::new(NEVER);

/// The user timeout of the connection in nanoseconds; 0: none.
fn limit(d: &Desc) -> u64 {
    d.sock().option(USER_TIMEOUT).max(0) as u64 * 1_000_000
}

fn identity(d: &Desc) -> u64 {
    let place = d.sock().place();
    let generation = d.slot().generation.load(Ordering::Relaxed);
    u64::from(generation) << 32 ^ u64::from(place.channel) << 10 ^ place.slot as u64
}

/// Called after a send that has looked at the consumer, or when the option is set.
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

/// How long a sleep may last now, in nanoseconds. None: without limit.
#[inline]
pub fn sleep_limit() -> Option<u64> {
    match NEXT.load(Ordering::Relaxed) {
        NEVER => None,
        _ => limit_now(),
    }
}

#[cold]
fn limit_now() -> Option<u64> {
    look();
    match NEXT.load(Ordering::Relaxed) {
        NEVER => None,
        next => Some(next.saturating_sub(sys::now_ns()).max(1)),
    }
}

/// Ends connections that have timed out.
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

/// When the connection times out if its peer reads nothing. None: the connection needs no timeout
/// any more.
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
    // As in the kernel, the window opens again when half of the buffer is free.
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
    let path = d.path_state();
    path != PathState::Rings && path != PathState::Moving(Party::Peer)
        || d.sock().flags.get().has(FlagSet::TIMED_OUT)
        || d.peer_status().has(status::RST)
}

/// Ends the connection for this side: the program can still read received bytes, then gets
/// ETIMEDOUT. After its unread bytes the peer gets a reset, as it would when its kernel announces
/// a window again.
fn time_out(d: &'static Desc) {
    const OVER: FlagSet = FlagSet::TIMED_OUT.or(FlagSet::SHUT_RD).or(FlagSet::SHUT_WR).or(FlagSet::RST_REPORTED);
    let s = d.sock();
    if s.flags.set(OVER).has(FlagSet::TIMED_OUT) {
        return;
    }
    s.set_error(libc::ETIMEDOUT);
    // A sender on credit does not check the flags.
    fsocket_sync::token::Words::withdraw(&s.tx);
    s.note_edge();
    conn::end(d, status::RST);
    conn::notify_all(d);
    conn::wake_own(d);
}
