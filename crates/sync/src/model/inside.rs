//! One queue with several threads: some block in it, and one must never block.

use super::every_way;
use crate::atomic::{fence, AtomicU32, Ordering};
use crate::inside::Inside;
use loom::sync::{Arc, Mutex};

struct Queue {
    waiting: AtomicU32,
    /// The lock, and a word that says whether the lock is held.
    lock: Mutex<()>,
    held: AtomicU32,
    inside: Inside<2>,
}

impl Queue {
    fn new(waiting: u32) -> Arc<Queue> {
        let (waiting, held) = (AtomicU32::new(waiting), AtomicU32::new(0));
        Arc::new(Queue { waiting, lock: Mutex::new(()), held, inside: Inside::default() })
    }

    /// Takes one connection; like the kernel, it gives each connection to one caller only.
    fn take(&self) -> bool {
        let mut now = self.waiting.load(Ordering::Acquire);
        while now > 0 {
            match self.waiting.compare_exchange(now, now - 1, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return true,
                Err(other) => now = other,
            }
        }
        false
    }

    /// Goes inside and takes one connection, if there is one.
    fn block(&self, me: u32, looks: bool) {
        let until_free = || {
            if looks && self.held.load(Ordering::SeqCst) != 0 {
                drop(self.lock.lock());
            }
        };
        let place = self.inside.enter(me, until_free).expect("a place");
        if self.take() {
            self.inside.leave(place);
        }
    }

    /// Must not block: a connection that this thread sees is still there when it takes it.
    fn take_without_blocking(&self) -> bool {
        let _turn = self.lock.lock();
        self.held.store(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let takes = self.inside.is_empty(|_| true) && self.waiting.load(Ordering::Acquire) > 0;
        let blocks = takes && !self.take();
        self.held.store(0, Ordering::Release);
        assert!(!blocks, "it blocks");
        takes
    }
}

fn run(looks: bool) {
    every_way(Some(3), move || {
        let queue = Queue::new(1);
        let others: Vec<_> = (1..=2)
            .map(|me| {
                let queue = queue.clone();
                loom::thread::spawn(move || queue.block(me, looks))
            })
            .collect();
        queue.take_without_blocking();
        others.into_iter().for_each(|t| t.join().unwrap());
        assert_eq!(queue.waiting.load(Ordering::Relaxed), 0, "nobody takes it");
    });
}

#[test]
fn a_taker_never_blocks_in_a_queue_that_others_block_in() {
    run(true);
}

/// The model detects blocking takers that do not check the lock.
#[test]
#[should_panic(expected = "it blocks")]
fn who_goes_inside_has_to_look_at_the_lock() {
    run(false);
}
