//! Counts all arrivals from a set of sources (channels) that join and leave. The sum never falls,
//! so an unchanged sum means that nothing came.
//!
//! Each source counts in a word that another process writes. The word may wrap, and its writer may
//! be hostile: a count that goes back hides arrivals of that source only. The count of a source
//! that leaves stays in the sum.
//!
//! Other words are compared with an earlier value, too. This is why an equal value means that
//! nothing happened:
//!
//! | word | compared by | why an old value does not return |
//! | --- | --- | --- |
//! | arrivals of a listener | an item of an epoll instance | this module |
//! | status, flags and edges of a connection | an item | bits are only set; a new connection under the same number resets what was reported |
//! | pulses of an instance, blocked senders | an item | they only grow, and are reset with the item's descriptor |
//! | generation and `touched` of the registry | cached routes | each monitor starts at a random number |
//! | closings of a port | cached routes | they only grow; another monitor has another generation |
//! | heads and tails of queues | the monitor's looks | they only grow; a hostile client hides only its own connections |
//! | `added` of a zone's queue | the monitor's looks | it only grows; the monitor looks again after a place got a new owner |
//! | sequence of a want word, `pending` of an arena | threads that sleep | they only grow, for as long as the memory is mapped |

use crate::atomic::{fence, AtomicU32, AtomicU64, Ordering};

/// Attempts to read the sum while other threads change the set of sources.
const LOOKS: u32 = 4;

/// The count up to which a source was seen, in 64 bits.
#[derive(Debug)]
pub struct Source(AtomicU64);

impl Source {
    #[cfg(not(loom))]
    #[allow(clippy::new_without_default)] // zero is what statics begin with
    pub const fn new() -> Source {
        Source(AtomicU64::new(0))
    }
    #[cfg(loom)]
    #[allow(clippy::new_without_default)]
    pub fn new() -> Source {
        Source(AtomicU64::new(0))
    }

    /// The place is used for another source, which has counted nothing yet.
    pub fn reset(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    /// The full count of the source. `word` is its lower half, read now or a moment ago.
    pub fn total(&self, word: u32) -> u64 {
        let mut seen = self.0.load(Ordering::Relaxed);
        loop {
            // The count may be ahead of `word`: another thread may have read a later word, or a
            // hostile writer may have stored an arbitrary word.
            let ahead = word.wrapping_sub(seen as u32) as i32;
            if ahead <= 0 {
                return seen;
            }
            let now = seen.wrapping_add(ahead as u64);
            match self.0.compare_exchange(seen, now, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return now,
                Err(other) => seen = other,
            }
        }
    }
}

/// The sum over sources that come and go.
#[derive(Debug)]
pub struct Arrivals {
    /// Arrivals at sources that have left.
    departed: AtomicU64,
    /// Numbers of changes of the set of sources that have begun, and that have finished.
    begun: AtomicU32,
    done: AtomicU32,
}

impl Arrivals {
    #[cfg(not(loom))]
    #[allow(clippy::new_without_default)] // only ever in statics
    pub const fn new() -> Arrivals {
        Arrivals { departed: AtomicU64::new(0), begun: AtomicU32::new(0), done: AtomicU32::new(0) }
    }
    #[cfg(loom)]
    #[allow(clippy::new_without_default)]
    pub fn new() -> Arrivals {
        Arrivals { departed: AtomicU64::new(0), begun: AtomicU32::new(0), done: AtomicU32::new(0) }
    }

    /// The sum, including the counts of the present sources. None: another thread is changing the
    /// set of sources. The caller must treat None as a sum it has not seen before.
    pub fn sum(&self, present: impl Fn() -> u64) -> Option<u64> {
        (0..LOOKS).find_map(|_| {
            // Acquire: sees all changes that have finished.
            let done = self.done.load(Ordering::Acquire);
            let sum = present().wrapping_add(self.departed.load(Ordering::Relaxed));
            // Pairs with the fence in `leave`: a reader that sees part of a change also sees that
            // it has begun.
            fence(Ordering::Acquire);
            (self.begun.load(Ordering::Relaxed) == done).then_some(sum)
        })
    }

    /// Removes sources: `f` removes them from the set, and returns their counts.
    pub fn leave(&self, f: impl FnOnce() -> u64) {
        self.begun.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::Release);
        self.departed.fetch_add(f(), Ordering::Relaxed);
        self.done.fetch_add(1, Ordering::Release);
    }

    /// Called in a forked child: a thread that was changing the sources does not exist here. The
    /// sum then jumps, so that it differs from every sum before the fork.
    pub fn become_child(&self) {
        let begun = self.begun.load(Ordering::Relaxed);
        if self.done.load(Ordering::Relaxed) != begun {
            self.departed.fetch_add(1 << 62, Ordering::Relaxed);
            self.done.store(begun, Ordering::Relaxed);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_word_that_wraps_goes_on() {
        let s = Source::new();
        for word in [1 << 30, 1 << 31, 3 << 30, u32::MAX] {
            assert_eq!(s.total(word), u64::from(word));
        }
        assert_eq!(s.total(2), (1 << 32) + 2);
    }

    #[test]
    fn a_word_that_goes_back_hides_nothing_of_others() {
        let (a, b) = (Source::new(), Source::new());
        let sum = |x, y| a.total(x) + b.total(y);
        let mut last = sum(5, 0);
        for (hostile, honest) in [(4, 1), (3, 2), (0, 3), (u32::MAX, 4), (5, 5), (4, 6)] {
            let now = sum(hostile, honest);
            assert!(now > last, "{hostile} {honest}: {now} after {last}");
            last = now;
        }
    }

    #[test]
    fn what_a_source_that_leaves_has_counted_stays() {
        let (arrivals, a, b) = (Arrivals::new(), Source::new(), Source::new());
        let seen = arrivals.sum(|| a.total(1)).unwrap();
        arrivals.leave(|| a.total(1));
        assert_eq!(arrivals.sum(|| 0), Some(seen));
        assert_eq!(arrivals.sum(|| b.total(1)), Some(seen + 1), "as much as the first had brought, and another one");
    }

    #[test]
    fn a_fork_in_the_middle_of_a_change_leaves_no_sum_that_was_seen() {
        let arrivals = Arrivals::new();
        arrivals.begun.fetch_add(1, Ordering::Relaxed);
        assert_eq!(arrivals.sum(|| 3), None);
        arrivals.become_child();
        assert!(arrivals.sum(|| 3).is_some_and(|sum| sum > 3));
    }
}
