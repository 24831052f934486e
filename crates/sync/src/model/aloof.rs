//! Aloof: a thread that is not told of others is one that may be, or will be called back.

use super::every_way;
use crate::aloof::Aloof;
use crate::atomic::{AtomicBool, Ordering};
use loom::sync::{Arc, Mutex};

struct Instance {
    aloof: Aloof,
    /// Whether the others' sockets lie in it. A lock, as the kernel's.
    told: Mutex<bool>,
    /// The monitor watches.
    watched: AtomicBool,
}

impl Instance {
    fn put(&self, told: bool) {
        *self.told.lock().unwrap() = told;
    }
    fn back(&self) {
        self.aloof.back(|| self.put(true));
    }
}

/// The worker turns away so many times, if the monitor watches then; `again`: and asks once
/// more when it is out. Meanwhile the monitor ceases to watch, and some thread reads that.
fn run(turns: u32, callers: u32, again: bool) {
    every_way(Some(3), move || {
        let i = Arc::new(Instance { aloof: Aloof::new(), told: Mutex::new(true), watched: AtomicBool::new(true) });
        let threads: Vec<_> = (0..callers)
            .map(|_| {
                let i = i.clone();
                loom::thread::spawn(move || {
                    // The message comes behind it.
                    i.watched.store(false, Ordering::Relaxed);
                    i.back();
                })
            })
            .collect();
        for _ in 0..turns {
            let watched = || i.watched.load(Ordering::Relaxed);
            if watched() {
                i.aloof.away(|| i.put(false), || !again || watched(), || i.put(true));
            }
        }
        threads.into_iter().for_each(|t| t.join().unwrap());
        assert!(*i.told.lock().unwrap(), "it sleeps, and nobody watches");
        assert!(!i.aloof.is());
    });
}

#[test]
fn who_is_called_back_by_another_thread_is_told() {
    run(1, 1, true);
    run(2, 1, true);
    run(1, 2, true);
}

#[test]
#[should_panic(expected = "nobody watches")]
fn asking_before_turning_away_is_not_enough() {
    run(1, 1, false);
}
