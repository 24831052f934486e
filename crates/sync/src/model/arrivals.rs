//! Arrivals: the sum of a listener's connections never falls, and each arrival is seen, even if channels come and
//! go meanwhile.

use super::every_way;
use crate::arrivals::{Arrivals, Source};
use crate::atomic::{AtomicBool, AtomicU32, Ordering};
use loom::sync::Arc;

/// A channel, as the listener's process sees it.
struct Channel {
    /// The process counts this channel as a source.
    present: AtomicBool,
    /// The number of arrivals, written by the client.
    word: AtomicU32,
    source: Source,
}

impl Channel {
    fn new(present: bool, word: u32) -> Channel {
        Channel { present: AtomicBool::new(present), word: AtomicU32::new(word), source: Source::new() }
    }
    fn arrives(&self) {
        self.word.store(self.word.load(Ordering::Relaxed) + 1, Ordering::Release);
    }
    fn total(&self) -> u64 {
        self.source.total(self.word.load(Ordering::Acquire))
    }
    fn counted(&self) -> u64 {
        match self.present.load(Ordering::Acquire) {
            true => self.total(),
            false => 0,
        }
    }
}

struct Listener {
    arrivals: Arrivals,
    channels: [Channel; 2],
}

impl Listener {
    fn sum(&self) -> Option<u64> {
        self.arrivals.sum(|| self.channels.iter().map(Channel::counted).sum())
    }
    fn leaves(&self, n: usize, how: Leave) {
        let c = &self.channels[n];
        let out = || {
            c.present.store(false, Ordering::Release);
            c.total()
        };
        match how {
            Leave::Counted => self.arrivals.leave(out),
            Leave::Forgotten => _ = out(),
        }
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Leave {
    Counted,
    /// An earlier, incorrect version: the sum only covers the present channels.
    Forgotten,
}

/// The first client has made one connection, and the process has seen it. Then that client leaves
/// and the second client makes a connection, while `lookers` threads read the sum.
fn run(lookers: usize, how: Leave) {
    every_way(Some(3 - lookers), move || {
        let l =
            Arc::new(Listener { arrivals: Arrivals::new(), channels: [Channel::new(true, 1), Channel::new(true, 0)] });
        let seen = l.sum().unwrap();
        let mut threads: Vec<_> = (0..lookers)
            .map(|_| {
                let l = l.clone();
                loom::thread::spawn(move || {
                    let sums = [l.sum(), l.sum()];
                    let mut last = seen;
                    for sum in sums.into_iter().flatten() {
                        assert!(sum >= last, "it has fallen");
                        assert!(sum <= seen + 1, "more than have come");
                        last = sum;
                    }
                })
            })
            .collect();
        threads.push({
            let l = l.clone();
            loom::thread::spawn(move || l.channels[1].arrives())
        });
        l.leaves(0, how);
        threads.into_iter().for_each(|t| t.join().unwrap());
        assert_eq!(l.sum(), Some(seen + 1), "it is what it was, and something has come");
    });
}

#[test]
fn what_comes_while_another_leaves_is_seen() {
    run(0, Leave::Counted);
}

#[test]
fn threads_that_look_meanwhile_see_no_part_of_it() {
    run(1, Leave::Counted);
}

#[test]
#[should_panic(expected = "it is what it was")]
fn a_sum_over_those_that_are_there_is_not_enough() {
    run(0, Leave::Forgotten);
}

/// Two threads that find the same arrival count it only once.
#[test]
fn two_that_look_at_once_count_once() {
    every_way(Some(3), || {
        let c = Arc::new(Channel::new(true, 0));
        let looker = {
            let c = c.clone();
            loom::thread::spawn(move || c.total())
        };
        c.arrives();
        let here = c.total();
        let there = looker.join().unwrap();
        assert!(here == 1 && there <= 1 && c.total() == 1);
    });
}
