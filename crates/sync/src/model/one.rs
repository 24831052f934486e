//! Several threads are in `accept`: a connection wakes one of them, and no connection waits while
//! one of them sleeps.

use super::{every_way, is_light, membarrier, with_light};
use crate::atomic::{fence, AtomicU32, AtomicU64, Ordering};
use crate::doorbell::Want;
use loom::sync::{Arc, Condvar, Mutex};

/// A thread in `accept`, as a waiter of the channel.
#[derive(Default)]
struct Sleeper {
    sleeping: AtomicU32,
    marked: AtomicU32,
    rung: Mutex<bool>,
    heard: Condvar,
}

/// A SYN queue. Only its length matters here.
#[derive(Default)]
struct Queue {
    waiting: AtomicU64,
    want: Want,
    sleepers: [Sleeper; 2],
}

impl Queue {
    /// Like `wake_syn` of the shm crate, when all waiters are in `accept` only.
    fn wake_one(&self) {
        let mask = self.want.waiting();
        for (i, s) in self.sleepers.iter().enumerate().filter(|(i, _)| mask >> i & 1 != 0) {
            if !self.want.claim(1 << i) {
                continue;
            }
            s.marked.store(1, Ordering::Release);
            fence(Ordering::SeqCst);
            if s.sleeping.load(Ordering::Relaxed) != 0 && s.sleeping.swap(0, Ordering::AcqRel) != 0 {
                *s.rung.lock().unwrap() = true;
                s.heard.notify_all();
                return;
            }
        }
    }

    fn connect(&self) {
        self.waiting.fetch_add(1, Ordering::Release);
        if !self.want.is_silent() {
            self.wake_one();
        }
    }

    fn take(&self) -> bool {
        self.waiting.fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| n.checked_sub(1)).is_ok()
    }

    /// Like `wait` and `sleep` of `accept` in the ops crate.
    fn accept(&self, i: usize) {
        let s = &self.sleepers[i];
        while !self.take() {
            self.arm(i);
            if s.marked.load(Ordering::Acquire) == 0 && self.waiting.load(Ordering::Acquire) == 0 {
                let mut rung = s.rung.lock().unwrap();
                while !*rung {
                    rung = s.heard.wait(rung).unwrap();
                }
            }
            self.disarm(i);
        }
    }

    fn arm(&self, i: usize) {
        let s = &self.sleepers[i];
        s.marked.swap(0, Ordering::Acquire);
        let armed = self.want.arm(1 << i);
        // The real code uses a plain store; see `model/doorbell.rs`.
        s.sleeping.swap(1, Ordering::Relaxed);
        if armed == crate::doorbell::Armed::Confirmed {
            fence(Ordering::SeqCst);
        } else {
            membarrier();
        }
        if armed == crate::doorbell::Armed::First {
            self.want.confirm();
        }
    }

    fn disarm(&self, i: usize) {
        let s = &self.sleepers[i];
        s.sleeping.swap(0, Ordering::AcqRel);
        self.want.disarm(1 << i);
        *s.rung.lock().unwrap() = false;
    }

    /// The thread wakes for another reason, and leaves without taking a connection.
    fn leave(&self, i: usize, passes_on: bool) {
        self.arm(i);
        self.disarm(i);
        if passes_on && self.waiting.load(Ordering::Acquire) != 0 {
            self.wake_one();
        }
    }
}

fn run([first, second]: [fn(&Queue); 2], connections: usize) {
    let model = move || {
        let queue = Arc::new(Queue::default());
        let [client, first] = [0, 1].map(|n| {
            let queue = queue.clone();
            loom::thread::spawn(move || match n {
                0 => {
                    is_light(0);
                    (0..connections).for_each(|_| queue.connect());
                }
                _ => first(&queue),
            })
        });
        second(&queue);
        client.join().unwrap();
        first.join().unwrap();
    };
    with_light(1, || every_way(2, model));
}

#[test]
fn each_of_two_connections_finds_a_thread() {
    run([|q| q.accept(0), |q| q.accept(1)], 2);
}

#[test]
fn who_leaves_without_it_passes_it_on() {
    run([|q| q.leave(0, true), |q| q.accept(1)], 1);
}

#[test]
#[should_panic(expected = "deadlock")]
fn who_leaves_without_it_must() {
    run([|q| q.leave(0, false), |q| q.accept(1)], 1);
}
