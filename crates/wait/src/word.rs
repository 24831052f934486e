//! A sleep on the futex of one direction of a connection, and the monitor beside it.
//!
//! The peer can write that futex, and move its sleepers to another one. So each sleep has a limit, or a second word that
//! the peer cannot touch ([`Second`]), by which the monitor says that the connection has ended.

use fsocket_abi::arena::{news_of, FUTEX_OWNER_DIED};
use fsocket_fdtable::table::Desc;
use fsocket_fdtable::{arena, ctl, socks};
use fsocket_runtime::signals;
use fsocket_shm::asleep::{self, On};
use fsocket_shm::{chan, peers};
use fsocket_sync::atomic::{AtomicBool, AtomicU32, Ordering};
use fsocket_sync::doorbell::Want;
use fsocket_sys::{self as sys, Errno, Result};

/// A sleep that the monitor's death does not wake looks so often whether it lives, nanoseconds.
const LOOK_NS: u64 = 2_000_000_000;

/// Without a monitor a sleep is at first at most so long. Then it is one that ends with the peer's process;
/// where the kernel has none, all are so long, nanoseconds.
const ALONE_NS: u64 = 80_000_000;

/// A sleep has at first this limit, nanoseconds: that costs half of what it costs
/// to sleep on the monitor's word as well, and most are shorter. See [`mixed_handlers`].
const SHORT_NS: u64 = 100_000_000;

/// A limit that never comes, nanoseconds.
pub const LONG: u64 = u64::MAX / 2;

/// Which handler has ended a sleep cannot be known. So a sleep without a limit gets one of ours only where
/// all handlers agree on whether calls are restarted; looked at now and then, and when it has mattered.
fn mixed_handlers() -> &'static AtomicBool {
    const EVERY: u32 = 1024;
    #[link_section = ".data.fsocket_start"]
    static MIXED: AtomicBool = AtomicBool::new(false);
    #[link_section = ".data.fsocket_start"]
    static SLEEPS: AtomicU32 = AtomicU32::new(0);
    if SLEEPS.fetch_add(1, Ordering::Relaxed).is_multiple_of(EVERY) {
        MIXED.store(sys::signals_disagree(), Ordering::Relaxed);
    }
    &MIXED
}

/// A signal has ended a sleep with this limit of ours, and it has mattered.
pub fn interrupted(cut: Option<u64>) {
    if cut == Some(SHORT_NS) {
        mixed_handlers().store(sys::signals_disagree(), Ordering::Relaxed);
    }
}

/// A limit of ours to a sleep that may have one of its own. `long`: it has reached one already.
pub fn piece(long: bool, limited: bool) -> Option<u64> {
    match ctl::unwatched() {
        Some(ns) => Some(ns.min(ALONE_NS)),
        None if !long && (limited || !mixed_handlers().load(Ordering::Relaxed)) => Some(SHORT_NS),
        // A signal ends this one, and the kernel would restart a sleep on two words.
        None if limited && !signals::none_restarts() => Some(LOOK_NS),
        None => (!has_second()).then_some(LOOK_NS),
    }
}

/// The kernel has no sleep on several words.
static NO_SECOND: AtomicBool = AtomicBool::new(false);

fn has_second() -> bool {
    let _ = socks::arena();
    !NO_SECOND.load(Ordering::Relaxed) && arena::header().is_some()
}

/// A word that the monitor changes, and its value until then. A sleep without a limit waits for it beside the word of
/// its connection. The caller looks once more before it sleeps.
#[derive(Clone, Copy)]
pub struct Second(&'static AtomicU32, u32);

impl Second {
    /// The one of this connection.
    pub fn arm(d: &Desc) -> Option<Second> {
        let channel = chan::of(d)?.id.load(Ordering::Relaxed);
        let news = &arena::header()?.news[news_of(channel, d.conn().slot_index())];
        Some(Second(news.word(), news.arm()))
    }
}

/// Sleeps while the word is `seq`, for as long as `left` and `cut` say; `long`: it has reached a limit of ours already.
/// Without a `cut` there is a second word.
pub fn sleep(
    want: &Want,
    seq: u32,
    left: Option<u64>,
    cut: Option<u64>,
    long: bool,
    second: Option<Second>,
) -> Result<()> {
    let beside = if long && cut.is_some() { peers::beside(&want.seq, seq) } else { None };
    let at_most = |ns: u64| left.unwrap_or(ns).min(ns);
    // By this word a cancelled thread is woken.
    let word = second.map_or(&want.seq, |Second(news, _)| news);
    asleep::sleep(&On { word: Some(word), beside, ..On::default() }, || match (beside, cut) {
        (Some(ring), _) => peers::sleep_beside(ring, at_most(LOOK_NS)),
        (None, Some(ns)) => sys::futex_wait(&want.seq, seq, Some(at_most(ns))),
        (None, None) => sleep_watched(&want.seq, seq, left, second),
    })
}

/// Sleeps on a futex word for as long as it takes, or up to `limit`, nanoseconds. Also the death of the monitor
/// ends it, without the monitor: after that nobody would say that the peer has died (ADR 37).
fn sleep_watched(word: &AtomicU32, expected: u32, limit: Option<u64>, second: Option<Second>) -> Result<()> {
    let alone = || sys::futex_wait(word, expected, Some(limit.unwrap_or(LOOK_NS).min(LOOK_NS)));
    static NOTICED: AtomicBool = AtomicBool::new(false);
    let monitor = arena::header().map(|h| &h.monitor);
    let (Some(monitor), Some(Second(news, armed))) = (monitor, second) else { return alone() };
    let has_died = |value: u32| value & FUTEX_OWNER_DIED != 0;
    let held = monitor.load(Ordering::Acquire);
    if NOTICED.load(Ordering::Relaxed) {
        if has_died(held) {
            return alone();
        }
        // Another monitor has come.
        NOTICED.store(false, Ordering::Relaxed);
    }
    let r = if has_died(held) {
        Ok(())
    } else {
        match sys::futex_wait_any([(word, expected), (monitor, held), (news, armed)], limit) {
            // An older kernel. (From here on each sleep has a limit.)
            Err(Errno::ENOSYS) => {
                NO_SECOND.store(true, Ordering::Relaxed);
                Ok(())
            }
            r => r,
        }
    };
    if has_died(monitor.load(Ordering::Acquire)) && !NOTICED.swap(true, Ordering::AcqRel) {
        ctl::died();
        // The kernel wakes one.
        sys::futex_wake(monitor, i32::MAX);
    }
    r
}
