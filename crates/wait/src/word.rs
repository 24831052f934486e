//! A sleep on the futex word of one direction of a connection, and on the monitor's state.
//!
//! The peer can write that word, and can move its sleepers to another one (FUTEX_REQUEUE). So
//! each sleep has a limit, or a second word that the peer cannot access ([`Second`]), which the
//! monitor changes when the connection has ended.

use crate::teased;
use fsocket_abi::arena::{news_of, FUTEX_OWNER_DIED};
use fsocket_fdtable::table::Desc;
use fsocket_fdtable::{arena, ctl, socks};
use fsocket_runtime::signals;
use fsocket_shm::asleep::{self, On};
use fsocket_shm::{chan, peers};
use fsocket_sync::atomic::{AtomicBool, AtomicU32, Ordering};
use fsocket_sync::doorbell::Want;
use fsocket_sys::{self as sys, Errno, Result};

/// Interval at which a sleep checks for the monitor's death, if that death does not wake it,
/// nanoseconds.
const LOOK_NS: u64 = 2_000_000_000;

/// The first limit of a sleep, nanoseconds. Most sleeps are shorter, and this costs half as much
/// as a sleep that also watches the monitor's word.
const SHORT_NS: u64 = 100_000_000;

/// A limit that is never reached, nanoseconds.
pub const LONG: u64 = u64::MAX / 2;

/// The library's limit for a sleep. `limited`: the program has set one, too; `long`: an earlier
/// sleep reached a limit.
///
/// Where a signal may end the call, limits are few. A signal that arrives after a limit was
/// reached, and before the thread runs again, ends nothing: the library sleeps again after the
/// handler.
pub(crate) fn piece(long: bool, limited: bool) -> Option<u64> {
    let handlers = signals::handlers();
    let goes_on = if limited { handlers.none() } else { !handlers.some_end() };
    if goes_on && !long {
        return Some(SHORT_NS);
    }
    // A signal must end such a sleep, but the kernel would restart a sleep on two words.
    if limited && handlers.some_restart() {
        return Some(LOOK_NS);
    }
    (!has_second()).then_some(LOOK_NS)
}

/// This kernel cannot sleep on several words.
static NO_SECOND: AtomicBool = AtomicBool::new(false);

fn has_second() -> bool {
    let _ = socks::arena();
    !NO_SECOND.load(Ordering::Relaxed) && arena::header().is_some()
}

/// A word that the monitor changes, and its value before that. A sleep without a limit waits for
/// this word together with the word of its connection.
#[derive(Clone, Copy)]
struct Second(&'static AtomicU32, u32);

impl Second {
    /// The word for this connection. The caller must look once more before it sleeps.
    fn arm(d: &Desc) -> Option<Second> {
        let channel = chan::of(d)?.id.load(Ordering::Relaxed);
        let news = &arena::header()?.news[news_of(channel, d.conn().slot_index())];
        Some(Second(news.word(), news.arm()))
    }
}

/// The word of one direction of a connection, on which a call sleeps.
pub struct Word<'a> {
    /// The connection; the caller keeps it alive.
    pub d: &'static Desc,
    pub want: &'a Want,
    /// The value of `want.seq` before the caller looked.
    pub seq: u32,
    /// The peer has ended too many sleeps without a reason, so it must not be able to end this
    /// one.
    pub teased: bool,
    /// An earlier sleep of the same wait has reached a limit. (This module sets it.)
    pub long: &'a mut bool,
    /// Is there something to do?
    pub look: &'a mut dyn FnMut() -> bool,
}

impl Word<'_> {
    /// Sleeps until woken or a limit is over: `left` is the program's, `cut` the library's. 1:
    /// woken; 0: a limit was reached.
    pub(crate) fn sleep(self, left: Option<u64>, cut: Option<u64>) -> Result<usize> {
        if self.teased {
            return teased::pause(left).map(|()| 1);
        }
        let second = if cut.is_none() { Second::arm(self.d) } else { None };
        if second.is_some() && (self.look)() {
            return Err(Errno::EAGAIN);
        }
        match sleep(self.want, self.seq, (left, cut), *self.long, second) {
            Err(Errno::ETIMEDOUT) => {
                *self.long = true;
                Ok(0)
            }
            r => r.map(|()| 1),
        }
    }
}

/// Sleeps while the word is `seq`. If `cut` is None, there is a second word.
fn sleep(
    want: &Want,
    seq: u32,
    (left, cut): (Option<u64>, Option<u64>),
    long: bool,
    second: Option<Second>,
) -> Result<()> {
    let beside = if long && cut.is_some() { peers::beside(&want.seq, seq) } else { None };
    let at_most = |ns: u64| left.unwrap_or(ns).min(ns);
    // The word by which a cancelled thread is woken.
    let word = second.map_or(&want.seq, |Second(news, _)| news);
    asleep::sleep(&On { word: Some(word), beside, ..On::default() }, || match (beside, cut) {
        (Some(ring), _) => peers::sleep_beside(ring, at_most(LOOK_NS)),
        (None, Some(ns)) => sys::futex_wait(&want.seq, seq, Some(at_most(ns))),
        (None, None) => sleep_watched(&want.seq, seq, left, second),
    })
}

/// Sleeps on a futex word without a limit, or up to `limit` nanoseconds. The kernel also ends the
/// sleep when the monitor dies: after that nobody would report that the peer has died (ADR 37).
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
        // A new monitor has come.
        NOTICED.store(false, Ordering::Relaxed);
    }
    let r = if has_died(held) {
        Ok(())
    } else {
        match sys::futex_wait_any([(word, expected), (monitor, held), (news, armed)], limit) {
            // The kernel is too old. (From now on each sleep has a limit.)
            Err(Errno::ENOSYS) => {
                NO_SECOND.store(true, Ordering::Relaxed);
                Ok(())
            }
            r => r,
        }
    };
    if has_died(monitor.load(Ordering::Acquire)) && !NOTICED.swap(true, Ordering::AcqRel) {
        ctl::died();
        // The kernel wakes only one sleeper of the monitor's word, which wakes the others.
        sys::futex_wake(monitor, i32::MAX);
    }
    r
}
