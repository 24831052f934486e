//! Limits how many threads of a process register a listener at the same time. The others would
//! wait for the monitor one after the other, longer than the rest of their `listen` takes.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use fsocket_sys as sys;

/// At most this many threads register with the monitor at the same time. If there are more, the
/// kernel alone serves their listeners, and all new ones during the pause that follows.
const MOST: u32 = 8;
const PAUSE: u64 = 1_000_000_000;

static UNTIL: AtomicU64 = AtomicU64::new(0);
static THREADS: AtomicU32 = AtomicU32::new(0);

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
}
