//! Limits which listeners a process registers. To register one and to end it costs about as much as ten connections.
//!
//! - Many threads may register a listener at the same time. Each would wait for those before it, longer than the rest
//!   of its `listen` takes.
//! - A loop may open a listener for each connection. Such listeners end before they have earned their registration.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use fsocket_sys as sys;

/// At most this many threads register with the monitor at the same time. If there are more, the
/// kernel alone serves their listeners, and all new ones during the pause that follows.
const MOST: u32 = 8;
const PAUSE: u64 = 1_000_000_000;

/// A listener that has lived for less than this is short-lived.
const SHORT_LIFE: u64 = 10_000_000;
/// If this many of those end within one pause's time, the kernel alone serves the listeners of the next pause. (Tests
/// of sockets open fewer, and are to see shared memory.)
const ENOUGH: u32 = 128;

static UNTIL: AtomicU64 = AtomicU64::new(0);
static THREADS: AtomicU32 = AtomicU32::new(0);
static SHORT_LIVED: ShortLived = ShortLived { since: AtomicU64::new(0), n: AtomicU32::new(0) };

/// Counts short-lived listeners. Threads count without a lock: a lost count delays the decision.
struct ShortLived {
    /// When the count began.
    since: AtomicU64,
    n: AtomicU32,
}

impl ShortLived {
    /// One more has ended. True: that is enough.
    fn is_enough(&self, now: u64) -> bool {
        if now.saturating_sub(self.since.load(Ordering::Relaxed)) > PAUSE {
            self.since.store(now, Ordering::Relaxed);
            self.n.store(0, Ordering::Relaxed);
        }
        self.n.fetch_add(1, Ordering::Relaxed) + 1 >= ENOUGH
    }
}

/// A registered listener has ended. `since`: when it began, in nanoseconds of [`sys::now_ns`].
pub fn ended(since: u64) {
    let now = sys::now_ns();
    if now.saturating_sub(since) < SHORT_LIFE && SHORT_LIVED.is_enough(now) {
        SHORT_LIVED.since.store(0, Ordering::Relaxed);
        UNTIL.store(now + PAUSE, Ordering::Relaxed);
    }
}

/// A thread that registers a listener with the monitor.
pub struct Telling(());

impl Telling {
    pub fn begin() -> Option<Telling> {
        let now = sys::now_ns();
        if now < UNTIL.load(Ordering::Relaxed) {
            return None;
        }
        let telling = Telling(());
        if THREADS.fetch_add(1, Ordering::Relaxed) < MOST {
            return Some(telling);
        }
        UNTIL.store(now + PAUSE, Ordering::Relaxed);
        None
    }
}

impl Drop for Telling {
    fn drop(&mut self) {
        THREADS.fetch_sub(1, Ordering::Relaxed);
    }
}

/// In a forked child: the other threads do not exist.
pub fn become_child() {
    if !crate::process::was_alone() {
        THREADS.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ninth_ends_it_for_a_while() {
        let most: [_; MOST as usize] = core::array::from_fn(|_| Telling::begin());
        assert!(most.iter().all(Option::is_some));
        assert!(Telling::begin().is_none());
        drop(most);
        assert!(Telling::begin().is_none());
        UNTIL.store(0, Ordering::Relaxed);
        assert!(Telling::begin().is_some());
    }

    /// The number of ends after which the kernel serves the next listeners, if one ends each `ms` milliseconds.
    fn ends(ms: u64) -> Option<u64> {
        let ended = ShortLived { since: AtomicU64::new(0), n: AtomicU32::new(0) };
        (1..=1000).find(|i| ended.is_enough(2 * PAUSE + i * ms * 1_000_000))
    }

    #[test]
    fn many_short_lives_are_enough_and_a_few_in_a_second_are_not() {
        assert_eq!(ends(1), Some(u64::from(ENOUGH)));
        assert_eq!(ends(7), Some(u64::from(ENOUGH)));
        assert_eq!(ends(10), None);
    }
}
