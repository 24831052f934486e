//! How many things have ever come from sources that come and go: a number that never falls, so that "it is what it
//! was" means that nothing came.
//!
//! Each source counts in a word that somebody else writes. It may wrap, and its writer may be hostile: a count that goes
//! back hides what this writer brings, and nothing of another one's. The count of a source that leaves stays in the sum.
//!
//! Other words that are compared with what they were, and why "the same" means that nothing happened:
//!
//! | word | compared by | why it does not come back |
//! | --- | --- | --- |
//! | arrivals of a listener | an item of an epoll instance | this module |
//! | status, flags and edges of a connection | an item | bits are only set; another connection under the same number forgets what was reported |
//! | pulses of an instance, blocked senders | an item | they only grow, and are reset with the item's descriptor |
//! | generation and `touched` of the registry | cached routes | each monitor begins at a number of its own, at random |
//! | closings of a port | cached routes | they only grow; those of another monitor come with another generation |
//! | heads and tails of queues | the monitor's looks | they only grow; a hostile client hides its own connections |
//! | `added` of a zone's queue | the monitor's looks | it only grows; who takes a place is looked at again |
//! | sequence of a want word, `pending` of an arena | threads that sleep | they only grow, for as long as the memory is mapped |

use crate::atomic::{fence, AtomicU32, AtomicU64, Ordering};

/// Looks at sources that others change.
const LOOKS: u32 = 4;

/// How far a source has been seen to count, in 64 bits.
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

    /// It is another one's, which has counted nothing.
    pub fn reset(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    /// Its count, of which `word` is the lower half or was a moment ago.
    pub fn total(&self, word: u32) -> u64 {
        let mut seen = self.0.load(Ordering::Relaxed);
        loop {
            // Another thread may have read a later word, and a hostile writer any.
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
    /// Of sources that have left.
    departed: AtomicU64,
    /// Changes of the set of sources that have begun, and that are done.
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

    /// The sum, with that of the sources which are there. None: they are being changed just now. That is to be taken
    /// for a sum that nobody has seen.
    pub fn sum(&self, present: impl Fn() -> u64) -> Option<u64> {
        (0..LOOKS).find_map(|_| {
            // Acquire: all of the changes that are done.
            let done = self.done.load(Ordering::Acquire);
            let sum = present().wrapping_add(self.departed.load(Ordering::Relaxed));
            // Pairs with the fence in `leave`: a look at a part of a change sees that it has begun.
            fence(Ordering::Acquire);
            (self.begun.load(Ordering::Relaxed) == done).then_some(sum)
        })
    }

    /// Sources leave: `f` takes them out, and says what they have counted.
    pub fn leave(&self, f: impl FnOnce() -> u64) {
        self.begun.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::Release);
        self.departed.fetch_add(f(), Ordering::Relaxed);
        self.done.fetch_add(1, Ordering::Release);
    }

    /// In a forked child: a thread that was changing the sources is not here. A sum that was seen is none from here on.
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
