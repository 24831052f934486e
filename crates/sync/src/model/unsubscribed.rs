//! Unsubscribed: a thread that gets no wake-ups for the others' sockets is the only one that waits
//! there.

use super::every_way;
use crate::atomic::{AtomicBool, Ordering};
use crate::unsubscribed::Unsubscribed;
use loom::sync::{Arc, Mutex};

struct Instance {
    unsubscribed: Unsubscribed,
    /// Whether the others' sockets are in the instance. A lock, like the kernel's.
    told: Mutex<bool>,
    /// No other thread waits there.
    alone: AtomicBool,
}

impl Instance {
    fn put(&self, told: bool) {
        *self.told.lock().unwrap() = told;
    }
    fn resubscribe(&self) {
        self.unsubscribed.resubscribe(|| self.put(true));
    }
}

/// The worker unsubscribes `turns` times, each time only if it is alone. If `again`, it checks
/// once more afterwards. Meanwhile `callers` other threads come to wait there, too.
fn run(turns: u32, callers: u32, again: bool) {
    every_way(Some(3), move || {
        let i = Arc::new(Instance {
            unsubscribed: Unsubscribed::new(),
            told: Mutex::new(true),
            alone: AtomicBool::new(true),
        });
        let threads: Vec<_> = (0..callers)
            .map(|_| {
                let i = i.clone();
                loom::thread::spawn(move || {
                    i.alone.store(false, Ordering::Relaxed);
                    i.resubscribe();
                })
            })
            .collect();
        for _ in 0..turns {
            let alone = || i.alone.load(Ordering::Relaxed);
            if alone() {
                i.unsubscribed.unsubscribe(|| i.put(false), || !again || alone(), || i.put(true));
            }
        }
        threads.into_iter().for_each(|t| t.join().unwrap());
        assert!(*i.told.lock().unwrap(), "it sleeps, and another one waits");
        assert!(!i.unsubscribed.is());
    });
}

#[test]
fn who_is_not_alone_any_more_is_told() {
    run(1, 1, true);
    run(2, 1, true);
    run(1, 2, true);
}

#[test]
#[should_panic(expected = "another one waits")]
fn asking_before_turning_away_is_not_enough() {
    run(1, 1, false);
}
