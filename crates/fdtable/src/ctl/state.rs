//! State of the monitor for this process: does it live, does it answer, does a thread look for it?

use crate::lock::Lock;
use crate::upcalls::upcalls;
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use fsocket_abi::arena::Reason;
use fsocket_sys as sys;

#[link_section = ".data.fsocket_start"]
pub(super) static FD: AtomicI32 = AtomicI32::new(-1);
/// Held by the thread that waits for an answer or reads messages. Contains the number of the last
/// request.
pub(super) static LOCK: Lock<u32> = Lock::new(0);
#[link_section = ".data.fsocket_start"]
pub(super) static DEAD: AtomicBool = AtomicBool::new(false);
/// No monitor has been found since the start. [`DEAD`] is set too, but nothing is shared that
/// somebody must watch.
#[link_section = ".data.fsocket_start"]
pub(super) static NEVER: AtomicBool = AtomicBool::new(false);
/// Length of the last piece of a sleep without a monitor, in nanoseconds.
static UNWATCHED: AtomicU64 = AtomicU64::new(0);
/// A forked child was not announced to the monitor. It gets its control socket later.
#[link_section = ".data.fsocket_start"]
pub(super) static LATER: AtomicBool = AtomicBool::new(false);
/// The time of the next attempt to find the monitor, in nanoseconds.
#[link_section = ".data.fsocket_start"]
pub(super) static LATER_AT: AtomicU64 = AtomicU64::new(0);
/// The pause between two attempts after a monitor has died, in nanoseconds.
pub(super) const DIED_PAUSE: u64 = 100_000_000;
/// The monitor has another version than the library.
pub(super) static MISMATCH: AtomicBool = AtomicBool::new(false);
/// Number of channels of which the monitor does not know both sides; see [`halves`].
static HALVES: AtomicU32 = AtomicU32::new(0);
/// If an answer takes longer, the monitor counts as silent. Nanoseconds.
pub(super) const PATIENCE: u64 = 1_000_000_000;
/// The time when the monitor was found silent, in nanoseconds; 0: it answers. A silent monitor
/// still counts this process as alive and names it to its peers, so peers still wake each other
/// through the monitor. But this process sends no requests to it, does not rely on it in a sleep,
/// and does not wait for room to send.
#[link_section = ".data.fsocket_start"]
pub(super) static SILENT: AtomicU64 = AtomicU64::new(0);
/// The longest wait for an answer that the program can do without, because the kernel can serve
/// the call instead. It also limits one attempt to find the monitor.
pub(super) const SHORT_PATIENCE: u64 = 250_000_000;
/// The unused rest of the short patience, in nanoseconds. Connecting to the monitor, its first
/// answer and the first request share this time. An answer in time restores it.
#[link_section = ".data.fsocket_start"]
static LEFT: AtomicU64 = AtomicU64::new(SHORT_PATIENCE);
/// The short patience that the user has set, in nanoseconds.
#[link_section = ".data.fsocket_start"]
static GIVEN: AtomicU64 = AtomicU64::new(SHORT_PATIENCE);
/// After an answer that took too long: until this time, requests that the program can do without
/// are not made. Nanoseconds.
pub(super) static SLOW_UNTIL: AtomicU64 = AtomicU64::new(0);
/// The first pause of this kind in nanoseconds. It doubles with each late answer, this many times
/// at most.
const SLOW_PAUSE: u64 = 1_000_000_000;
const LONGEST_PAUSE: u32 = 5;
/// Number of successive late answers.
static LATE: AtomicU32 = AtomicU32::new(0);
/// A monitor exists, but its queue of new connections was full when this process looked for it.
#[link_section = ".data.fsocket_start"]
pub(super) static FULL: AtomicBool = AtomicBool::new(false);
/// How long a silent monitor gets no requests, in nanoseconds.
pub(super) const SILENCE: u64 = 10_000_000_000;
/// The time when a monitor was found after another had died, or after the start of this process,
/// in nanoseconds.
pub(super) static FOUND_AT: AtomicU64 = AtomicU64::new(0);
/// The thread that is looking for the monitor; 0: none.
#[link_section = ".data.fsocket_start"]
pub(super) static LOOKING: AtomicU64 = AtomicU64::new(0);

/// Has this child not contacted the monitor yet, and is the monitor not known to have died? (A
/// thread that looks for the monitor stores the result before it clears LOOKING.)
pub fn unmet() -> bool {
    !DEAD.load(Ordering::Relaxed) && fd() < 0 && (LATER.load(Ordering::Acquire) || LOOKING.load(Ordering::Acquire) != 0)
}

/// Is there no monitor now, and does the process look for one?
pub fn may_come() -> bool {
    dead() && LATER.load(Ordering::Relaxed)
}

/// Has there been no monitor since this process began?
pub fn never() -> bool {
    NEVER.load(Ordering::Relaxed)
}

/// Does the monitor have another version, so that the two cannot talk?
pub fn mismatch() -> bool {
    MISMATCH.load(Ordering::Relaxed)
}

/// Are requests that the program can do without suspended, because the last answer took too long?
pub fn is_slow() -> bool {
    let now = sys::now_ns();
    let silent = SILENT.load(Ordering::Relaxed);
    now < SLOW_UNTIL.load(Ordering::Relaxed) || silent != 0 && now.saturating_sub(silent) < SILENCE
}

/// Why there is no monitor, or why it does not answer.
pub fn why_none() -> Reason {
    match (MISMATCH.load(Ordering::Relaxed), DEAD.load(Ordering::Relaxed)) {
        (true, _) => Reason::Version,
        (_, true) if !never() => Reason::MonitorGone,
        _ if FULL.load(Ordering::Relaxed) || alive().is_some() => Reason::MonitorBusy,
        _ => Reason::NoMonitor,
    }
}

/// FASTSOCKET_PATIENCE: how many milliseconds the program waits for the monitor in calls that the
/// kernel could serve instead.
pub fn init(patience_ms: Option<u32>) {
    if let Some(ms) = patience_ms {
        GIVEN.store(u64::from(ms) * 1_000_000, Ordering::Relaxed);
        LEFT.store(given(), Ordering::Relaxed);
    }
}

pub(super) fn given() -> u64 {
    GIVEN.load(Ordering::Relaxed)
}

/// The longest wait for an answer that the program needs, in nanoseconds.
pub(super) fn long_patience() -> u64 {
    given().max(PATIENCE)
}

/// The longest wait now for an answer that the program can do without, in nanoseconds.
pub(super) fn patience() -> u64 {
    LEFT.load(Ordering::Relaxed)
}

/// Subtracts the time since `since` from the patience that is left.
pub(super) fn waited(since: u64) {
    let spent = sys::now_ns().saturating_sub(since);
    LEFT.store(patience().saturating_sub(spent), Ordering::Relaxed);
}

/// The monitor has answered in time.
pub(super) fn in_time() {
    LEFT.store(given(), Ordering::Relaxed);
    if LATE.load(Ordering::Relaxed) != 0 {
        LATE.store(0, Ordering::Relaxed);
    }
}

pub fn fd() -> i32 {
    FD.load(Ordering::Relaxed)
}

/// The monitor is gone, or there never was one. No new connections use shared memory, and no
/// monitor notices the death of peers.
pub fn dead() -> bool {
    DEAD.load(Ordering::Relaxed) || fd() < 0
}

/// The control socket, if the monitor lives.
pub fn alive() -> Option<i32> {
    (!dead()).then(fd)
}

/// Changes the number of channels of which the monitor does not know both sides. (The number
/// wraps around below zero.)
pub fn halves(more: i32) {
    HALVES.fetch_add(more as u32, Ordering::AcqRel);
}

/// Are there channels of which the monitor does not know both sides?
#[inline]
pub fn any_half() -> bool {
    HALVES.load(Ordering::Relaxed) != 0
}

/// Is there a live monitor that answers and knows both sides of every channel?
#[inline]
pub fn is_watched() -> bool {
    !dead() && SILENT.load(Ordering::Relaxed) == 0 && !any_half()
}

/// Is there no monitor that watches the peers, so that this process must check them itself?
/// (False if there never was a monitor and none can come.)
pub fn is_unwatched() -> bool {
    !is_watched() && (!never() || may_come())
}

/// While [`is_unwatched`] is true, a sleep is cut into pieces. Returns the length of the next
/// piece: short at first, doubling while nothing happens.
pub fn unwatched() -> Option<u64> {
    const MIN: u64 = 1_000_000;
    const MAX: u64 = 500_000_000;
    const FIRST: u64 = 1_000_000_000;
    if !is_unwatched() {
        return None;
    }
    if never() {
        return Some(FIRST);
    }
    let ns = UNWATCHED.load(Ordering::Relaxed).clamp(MIN, MAX);
    UNWATCHED.store((ns * 2).min(MAX), Ordering::Relaxed);
    Some(ns)
}

/// Something has happened, so the pieces of a sleep become short again.
pub fn progress() {
    if !is_watched() {
        UNWATCHED.store(0, Ordering::Relaxed);
    }
}

/// Detaches this process from the monitor for good. As after the monitor's death, it makes no
/// request and reads nothing.
pub fn detach() {
    died();
    // (`died` may have set this, to look for another monitor.)
    LATER.store(false, Ordering::Release);
}

/// The monitor has certainly died.
pub fn died() {
    if !DEAD.swap(true, Ordering::AcqRel) {
        UNWATCHED.store(0, Ordering::Relaxed);
        if (upcalls().monitor_died)() && !mismatch() {
            LATER_AT.store(sys::now_ns().saturating_add(DIED_PAUSE / 4), Ordering::Relaxed);
            LATER.store(true, Ordering::Release);
        }
    }
}

/// The monitor takes too long. (If the answer comes later, [`unasked`] uses it or undoes its
/// effect.)
#[cold]
pub(super) fn is_late(short: bool) {
    let now = sys::now_ns();
    match short {
        true => {
            let times = LATE.fetch_add(1, Ordering::Relaxed).min(LONGEST_PAUSE);
            SLOW_UNTIL.store(now + (SLOW_PAUSE << times), Ordering::Relaxed);
            LEFT.store(given(), Ordering::Relaxed);
        }
        false => SILENT.store(now, Ordering::Relaxed),
    }
}
