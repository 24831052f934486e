//! Doorbells: nobody sleeps on what has been published. A lost wake-up is a
//! thread that sleeps for ever, which loom reports as a deadlock.

use super::{every_way, membarrier, Futex};
use crate::atomic::{fence, AtomicU32, AtomicU64, Ordering};
use crate::doorbell::{Want, FUTEX_BIT};
use loom::sync::{Arc, Condvar, Mutex};

/// The sleeper's half: `membarrier`, or nothing.
type Heavy = fn();
fn nothing() {}

/// `eventfd(2)` that one thread waits on.
#[derive(Default)]
struct Bell {
    rung: Mutex<bool>,
    heard: Condvar,
}
impl Bell {
    fn ring(&self) {
        *self.rung.lock().unwrap() = true;
        self.heard.notify_all();
    }
    fn wait(&self) {
        let mut rung = self.rung.lock().unwrap();
        while !*rung {
            rung = self.heard.wait(rung).unwrap();
        }
        *rung = false;
    }
}

/// A direction: a count of publications stands for the ring.
#[derive(Default)]
struct Line {
    published: AtomicU64,
    want: Want,
    futex: Futex,
}

impl Line {
    /// As `stream::notify` and `bell::wake` of the core crate.
    fn publish(&self) {
        self.published.fetch_add(1, Ordering::Release);
        if self.want.take() & FUTEX_BIT != 0 {
            self.want.seq.fetch_add(1, Ordering::Release);
            self.futex.wake_all();
        }
    }

    /// As `stream::sleep` of the core crate.
    fn sleep_until(&self, count: u64, heavy: Heavy) {
        let ready = || self.published.load(Ordering::Acquire) >= count;
        loop {
            let seq = self.want.seq.load(Ordering::Acquire);
            self.want.arm(FUTEX_BIT);
            heavy();
            if ready() {
                break;
            }
            self.futex.wait(&self.want.seq, seq);
            if ready() {
                break;
            }
        }
    }
}

/// `publishers` threads publish `each` times; `sleepers` threads wait for one
/// publication after the other.
fn futexes(publishers: u64, each: u64, sleepers: u64, heavy: Heavy, preemptions: Option<usize>) {
    every_way(preemptions, move || {
        let line = Arc::new(Line::default());
        let spawn = |f: Box<dyn FnOnce(&Line)>| {
            let line = line.clone();
            loom::thread::spawn(move || f(&line))
        };
        let mut threads = Vec::new();
        for _ in 0..publishers {
            threads.push(spawn(Box::new(move |l| (0..each).for_each(|_| l.publish()))));
        }
        let wait = move |l: &Line| (1..=publishers * each).for_each(|n| l.sleep_until(n, heavy));
        for _ in 1..sleepers {
            threads.push(spawn(Box::new(wait)));
        }
        wait(&line);
        threads.into_iter().for_each(|t| t.join().unwrap());
    });
}

#[test]
fn one_publication() {
    futexes(1, 1, 1, membarrier, None);
}

#[test]
fn two_publications() {
    futexes(1, 2, 1, membarrier, None);
}

#[test]
fn two_publishers() {
    futexes(2, 1, 1, membarrier, Some(3));
}

#[test]
fn two_sleepers() {
    futexes(1, 1, 2, membarrier, Some(3));
}

#[test]
#[should_panic(expected = "deadlock")]
fn needs_the_heavy_fence() {
    futexes(1, 1, 1, nothing, None);
}

/// Two slots of a channel and one waiter on its other side.
#[derive(Default)]
struct Channel {
    slots: [(AtomicU64, Want); 2],
    summary: AtomicU64,
    ready: AtomicU64,
    sleeping: AtomicU32,
    bell: Bell,
}

impl Channel {
    /// As `stream::notify` with `bell::each` of the core crate.
    fn publish(&self, slot: usize) {
        let (published, want) = &self.slots[slot];
        published.fetch_add(1, Ordering::Release);
        if want.take() == 0 {
            return;
        }
        self.ready.fetch_or(1 << slot, Ordering::Relaxed);
        self.summary.fetch_or(1, Ordering::Release);
        fence(Ordering::SeqCst);
        if self.sleeping.load(Ordering::Relaxed) != 0 && self.sleeping.swap(0, Ordering::AcqRel) != 0 {
            self.bell.ring();
        }
    }

    /// As `epoll::wait` of the core crate with one thread: slots that are armed
    /// and not ready are not looked at until they are marked.
    fn wait_for(&self, goal: [u64; 2], heavy: Heavy) {
        let mut hot = [true; 2];
        loop {
            if self.summary.load(Ordering::Relaxed) != 0 {
                // Acquire: the marks, and what was published before them.
                self.summary.swap(0, Ordering::Acquire);
                let marks = self.ready.swap(0, Ordering::Acquire);
                for (slot, hot) in hot.iter_mut().enumerate() {
                    *hot |= marks >> slot & 1 != 0;
                }
            }
            let done = |slot: usize| self.slots[slot].0.load(Ordering::Acquire) >= goal[slot];
            for (slot, hot) in hot.iter_mut().enumerate() {
                // The application has what it wants of this one: like an edge
                // that was reported.
                *hot &= !done(slot);
            }
            if done(0) && done(1) {
                return;
            }
            for (slot, _) in hot.iter().enumerate().filter(|(_, hot)| **hot) {
                self.slots[slot].1.arm(1);
            }
            // Plain stores in the core crate. Loom does not order a plain store
            // after the read-modify-write of another thread that came first,
            // which coherence does; a swap says it.
            self.sleeping.swap(1, Ordering::Relaxed);
            heavy();
            let marked = self.summary.load(Ordering::Relaxed) != 0;
            if !marked && !(0..2).any(|slot| hot[slot] && done(slot)) {
                self.bell.wait();
            }
            self.sleeping.swap(0, Ordering::Relaxed);
            // Armed and not ready: cold until marked.
            for (slot, hot) in hot.iter_mut().enumerate() {
                *hot &= done(slot);
            }
        }
    }
}

/// Thread `i` publishes on the slots of `plan[i]`, in that order.
fn bells(plan: &'static [&'static [usize]], heavy: Heavy, preemptions: Option<usize>) {
    every_way(preemptions, move || {
        let ch = Arc::new(Channel::default());
        let threads: Vec<_> = plan
            .iter()
            .map(|slots| {
                let ch = ch.clone();
                loom::thread::spawn(move || slots.iter().for_each(|&s| ch.publish(s)))
            })
            .collect();
        let total = |slot| plan.iter().flat_map(|p| p.iter()).filter(|&&s| s == slot).count() as u64;
        ch.wait_for([total(0), total(1)], heavy);
        threads.into_iter().for_each(|t| t.join().unwrap());
    });
}

#[test]
fn bell_for_one_publication() {
    bells(&[&[0]], membarrier, None);
}

#[test]
fn bell_for_two_publications_on_one_slot() {
    bells(&[&[0, 0]], membarrier, Some(3));
}

#[test]
fn bell_for_two_slots() {
    bells(&[&[0, 1]], membarrier, Some(4));
}

#[test]
fn bell_for_two_publishers() {
    bells(&[&[0], &[1]], membarrier, Some(3));
}

#[test]
#[should_panic(expected = "deadlock")]
fn bell_needs_the_heavy_fence() {
    bells(&[&[0]], nothing, None);
}
