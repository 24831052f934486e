//! The second word of a sleep: when the monitor closes a connection, the sleeper wakes even though
//! its peer controls the first word.

use super::{every_way, Futex};
use crate::atomic::{AtomicU32, Ordering};
use crate::news::News;
use loom::sync::Arc;

#[derive(Default)]
struct Connection {
    closed: AtomicU32,
    news: News,
    /// The kernel's queue of the second word. (The peer has moved the sleeper away from the first
    /// word.)
    futex: Futex,
}

impl Connection {
    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed) != 0
    }

    fn sleep_until_closed(&self) {
        while !self.is_closed() {
            let armed = self.news.arm();
            if self.is_closed() {
                return;
            }
            self.futex.wait(self.news.word(), armed);
        }
    }

    /// The value with which the thread would sleep, or None if it has seen the end. `hasty`: it
    /// looks only before it arms.
    fn would_sleep(&self, hasty: bool) -> Option<u32> {
        let before = self.is_closed();
        let armed = self.news.arm();
        (!before && (hasty || !self.is_closed())).then_some(armed)
    }

    fn close(&self) {
        self.closed.store(1, Ordering::Release);
        if self.news.tell() {
            self.futex.wake_all();
        }
    }
}

fn run(sleepers: usize, before: bool) {
    every_way(Some(3), move || {
        let c = Arc::new(Connection::default());
        let threads: Vec<_> = (0..sleepers)
            .map(|_| {
                let c = c.clone();
                loom::thread::spawn(move || c.sleep_until_closed())
            })
            .collect();
        if before {
            // Another connection uses the same word.
            if c.news.tell() {
                c.futex.wake_all();
            }
        }
        c.close();
        threads.into_iter().for_each(|t| t.join().unwrap());
    });
}

#[test]
fn a_sleeper_learns_of_the_end() {
    run(1, false);
    run(1, true);
}

#[test]
fn all_sleepers_learn_of_the_end() {
    run(2, false);
    run(2, true);
}

/// A sleeper and a close at the same time, without the kernel's futex.
fn one_look(hasty: bool) {
    every_way(None, move || {
        let c = Arc::new(Connection::default());
        let sleeper = c.clone();
        let sleeper = loom::thread::spawn(move || sleeper.would_sleep(hasty));
        c.close();
        if let Some(armed) = sleeper.join().unwrap() {
            assert_ne!(c.news.word().load(Ordering::Relaxed), armed, "it sleeps for ever");
        }
    });
}

#[test]
fn a_look_behind_the_armed_word_sees_the_end() {
    one_look(false);
}

#[test]
#[should_panic(expected = "it sleeps for ever")]
fn a_look_before_the_word_is_armed_is_not_enough() {
    one_look(true);
}
