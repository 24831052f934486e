//! What is known of the monitor: whether there is one, whether it answers, and whether it is looked for.

use crate::lock::Lock;
use crate::upcalls::upcalls;
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use fsocket_abi::arena::Reason;
use fsocket_sys as sys;

#[link_section = ".data.fsocket_start"]
pub(super) static FD: AtomicI32 = AtomicI32::new(-1);
/// Held by the thread that waits for an answer, or reads what came unasked. The number of the last request.
pub(super) static LOCK: Lock<u32> = Lock::new(0);
#[link_section = ".data.fsocket_start"]
pub(super) static DEAD: AtomicBool = AtomicBool::new(false);
/// There was none yet: [`DEAD`], but nothing is shared that somebody would have to watch over.
#[link_section = ".data.fsocket_start"]
pub(super) static NEVER: AtomicBool = AtomicBool::new(false);
/// The last piece of a sleep that no monitor watches over, nanoseconds.
static UNWATCHED: AtomicU64 = AtomicU64::new(0);
/// A forked child that was not announced to the monitor has no socket until it
/// needs one.
#[link_section = ".data.fsocket_start"]
pub(super) static LATER: AtomicBool = AtomicBool::new(false);
/// When to look for the monitor again, nanoseconds.
#[link_section = ".data.fsocket_start"]
pub(super) static LATER_AT: AtomicU64 = AtomicU64::new(0);
/// The pause between two looks while none has come after the one that has died, nanoseconds.
pub(super) const DIED_PAUSE: u64 = 100_000_000;
/// The monitor has another version.
pub(super) static MISMATCH: AtomicBool = AtomicBool::new(false);
/// Channels of which it does not know both sides; see [`halves`].
static HALVES: AtomicU32 = AtomicU32::new(0);
/// How long an answer may take before the monitor counts as silent, nanoseconds.
pub(super) const PATIENCE: u64 = 1_000_000_000;
/// When it was found silent, nanoseconds; 0: it is not. A silent monitor still counts this process
/// as alive and names it to its peers, so that their wake-ups go on through it; but nothing is
/// asked, no sleep relies on it, and no message waits for room.
#[link_section = ".data.fsocket_start"]
pub(super) static SILENT: AtomicU64 = AtomicU64::new(0);
/// How long an answer may take that the program can do without: the kernel does it then. Also one look
/// for an answer.
pub(super) const SHORT_PATIENCE: u64 = 250_000_000;
/// How much of that is left, nanoseconds: the connection to the monitor, its first answer and the first request
/// share it. An answer in time gives it back.
#[link_section = ".data.fsocket_start"]
static LEFT: AtomicU64 = AtomicU64::new(SHORT_PATIENCE);
/// How long that is for this program, nanoseconds.
#[link_section = ".data.fsocket_start"]
static GIVEN: AtomicU64 = AtomicU64::new(SHORT_PATIENCE);
/// Until when nothing of that kind is asked, nanoseconds, after an answer that took longer.
pub(super) static SLOW_UNTIL: AtomicU64 = AtomicU64::new(0);
/// How long that is, nanoseconds: the first time, doubled with each time in a row up to the longest.
const SLOW_PAUSE: u64 = 1_000_000_000;
const LONGEST_PAUSE: u32 = 5;
/// Times in a row.
static LATE: AtomicU32 = AtomicU32::new(0);
/// A monitor is there, and its queue of new connections was full when this process looked for it.
#[link_section = ".data.fsocket_start"]
pub(super) static FULL: AtomicBool = AtomicBool::new(false);
/// How long nothing is asked of a silent one, nanoseconds.
pub(super) const SILENCE: u64 = 10_000_000_000;
/// When one was found after another had died, or after this process began; nanoseconds.
pub(super) static FOUND_AT: AtomicU64 = AtomicU64::new(0);
/// Thread that is looking for the monitor; 0: none.
#[link_section = ".data.fsocket_start"]
pub(super) static LOOKING: AtomicU64 = AtomicU64::new(0);

/// Has this child not met the monitor yet, and is the monitor not known to have died?
/// (A thread that looks for the monitor stores what it has found before it ends its look.)
pub fn unmet() -> bool {
    !DEAD.load(Ordering::Relaxed) && fd() < 0 && (LATER.load(Ordering::Acquire) || LOOKING.load(Ordering::Acquire) != 0)
}

/// Is there none now, and it is looked for?
pub fn may_come() -> bool {
    dead() && LATER.load(Ordering::Relaxed)
}

/// Was there none since this process began?
pub fn never() -> bool {
    NEVER.load(Ordering::Relaxed)
}

/// Has the monitor another version, so that there is nothing to talk about?
pub fn mismatch() -> bool {
    MISMATCH.load(Ordering::Relaxed)
}

/// Is nothing asked for a while that the program can do without, because the last answer took too long?
pub fn is_slow() -> bool {
    let now = sys::now_ns();
    let silent = SILENT.load(Ordering::Relaxed);
    now < SLOW_UNTIL.load(Ordering::Relaxed) || silent != 0 && now.saturating_sub(silent) < SILENCE
}

/// Why there is no monitor, or none that answers.
pub fn why_none() -> Reason {
    match (MISMATCH.load(Ordering::Relaxed), DEAD.load(Ordering::Relaxed)) {
        (true, _) => Reason::Version,
        (_, true) if !never() => Reason::MonitorGone,
        _ if FULL.load(Ordering::Relaxed) || alive().is_some() => Reason::MonitorBusy,
        _ => Reason::NoMonitor,
    }
}

/// FASTSOCKET_PATIENCE: milliseconds that the program waits for the monitor where the kernel would do.
pub fn init(patience_ms: Option<u32>) {
    if let Some(ms) = patience_ms {
        GIVEN.store(u64::from(ms) * 1_000_000, Ordering::Relaxed);
        LEFT.store(given(), Ordering::Relaxed);
    }
}

pub(super) fn given() -> u64 {
    GIVEN.load(Ordering::Relaxed)
}

/// How long an answer may take that the program needs, nanoseconds.
pub(super) fn long_patience() -> u64 {
    given().max(PATIENCE)
}

/// How long this process may wait now for what it can do without, nanoseconds.
pub(super) fn patience() -> u64 {
    LEFT.load(Ordering::Relaxed)
}

/// It has waited since then.
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

/// The monitor is gone (or never was): no new connections over shared memory,
/// and no monitor notices when a peer dies.
pub fn dead() -> bool {
    DEAD.load(Ordering::Relaxed) || fd() < 0
}

/// The control socket, if the monitor lives.
pub fn alive() -> Option<i32> {
    (!dead()).then(fd)
}

/// Some channels more or less of which the monitor does not know both sides. (It wraps around below zero.)
pub fn halves(more: i32) {
    HALVES.fetch_add(more as u32, Ordering::AcqRel);
}

/// Are there channels of which the monitor does not know both sides?
#[inline]
pub fn any_half() -> bool {
    HALVES.load(Ordering::Relaxed) != 0
}

/// Does a monitor live that answers and knows both sides of every channel?
#[inline]
pub fn is_watched() -> bool {
    !dead() && SILENT.load(Ordering::Relaxed) == 0 && !any_half()
}

/// While no monitor watches over our peers, sleeps are cut into pieces: short ones
/// at first, doubling while nothing happens. None: the monitor lives.
pub fn unwatched() -> Option<u64> {
    const MIN: u64 = 1_000_000;
    const MAX: u64 = 500_000_000;
    const FIRST: u64 = 1_000_000_000;
    if is_watched() {
        return None;
    }
    if never() {
        return may_come().then_some(FIRST);
    }
    let ns = UNWATCHED.load(Ordering::Relaxed).clamp(MIN, MAX);
    UNWATCHED.store((ns * 2).min(MAX), Ordering::Relaxed);
    Some(ns)
}

/// Something happened: look closely again for a while.
pub fn progress() {
    if !is_watched() {
        UNWATCHED.store(0, Ordering::Relaxed);
    }
}

/// As if the monitor had died: nothing is asked, and nothing read.
pub fn detach() {
    died();
    // (Also what that has just set.)
    LATER.store(false, Ordering::Release);
}

/// It is certain that the monitor has died.
pub fn died() {
    if !DEAD.swap(true, Ordering::AcqRel) {
        UNWATCHED.store(0, Ordering::Relaxed);
        if (upcalls().monitor_died)() && !mismatch() {
            LATER_AT.store(sys::now_ns().saturating_add(DIED_PAUSE / 4), Ordering::Relaxed);
            LATER.store(true, Ordering::Release);
        }
    }
}

/// The monitor takes too long. (An answer that comes later is undone or used in [`unasked`].)
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
