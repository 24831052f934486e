//! Doorbells: no thread sleeps while a publication waits for it. A lost wake-up leaves a thread
//! asleep for ever, which loom reports as a deadlock.
//!
//! Long: one protocol, and a small model for each way to go wrong.

use super::{every_way, is_light, membarrier, with_light, without, Futex};
use crate::atomic::{fence, AtomicU32, AtomicU64, Ordering};
use crate::doorbell::{Batch, Want, FUTEX_BIT};
use crate::step::Step;
use loom::sync::{Arc, Condvar, Mutex};

/// `eventfd(2)` on which one thread waits.
#[derive(Default)]
struct Waker {
    rung: Mutex<bool>,
    heard: Condvar,
}
impl Waker {
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

/// One direction of a connection. A count of publications stands for the ring.
#[derive(Default)]
struct Line {
    published: AtomicU64,
    want: Want,
    futex: Futex,
}

impl Line {
    /// Like `stream::notify` and `waker::wake`.
    fn publish(&self) {
        self.published.fetch_add(1, Ordering::Release);
        if self.want.take() & FUTEX_BIT != 0 {
            self.want.seq.fetch_add(1, Ordering::Release);
            self.futex.wake_all();
        }
    }

    /// Like `stream::sleep`.
    fn sleep_until(&self, count: u64) {
        let ready = || self.published.load(Ordering::Acquire) >= count;
        loop {
            let seq = self.want.seq.load(Ordering::Acquire);
            self.want.arm_and_fence(FUTEX_BIT, membarrier);
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

/// The value of the word when the threads start.
#[derive(Clone, Copy, PartialEq)]
enum Before {
    Silent,
    /// A thread has slept, and all senders know that they must fence.
    Confirmed,
    /// A sleeper was killed before its heavy fence.
    Killed,
}

/// `publishers` threads publish `each` times; each of `sleepers` threads waits for one publication
/// after the other.
fn futexes(before: Before, publishers: u64, each: u64, sleepers: u64, preemptions: impl Into<Option<usize>>) {
    let preemptions = preemptions.into();
    let model = move || {
        let line = Arc::new(Line::default());
        match before {
            Before::Silent => {}
            Before::Confirmed => {
                line.want.arm_and_fence(FUTEX_BIT, || ());
                line.want.disarm(FUTEX_BIT);
            }
            Before::Killed => drop(line.want.arm(FUTEX_BIT)),
        }
        let spawn = |f: Box<dyn FnOnce(&Line)>| {
            let line = line.clone();
            loom::thread::spawn(move || f(&line))
        };
        let mut threads = Vec::new();
        for n in 0..publishers as usize {
            threads.push(spawn(Box::new(move |l| {
                is_light(n);
                (0..each).for_each(|_| l.publish());
            })));
        }
        let wait = move |l: &Line| (1..=publishers * each).for_each(|n| l.sleep_until(n));
        for _ in 1..sleepers {
            threads.push(spawn(Box::new(wait)));
        }
        wait(&line);
        threads.into_iter().for_each(|t| t.join().unwrap());
    };
    with_light(publishers as usize, || every_way(preemptions, model));
}

#[test]
fn one_publication() {
    for before in [Before::Silent, Before::Confirmed, Before::Killed] {
        futexes(before, 1, 1, 1, None);
    }
}

#[test]
fn two_publications() {
    for before in [Before::Silent, Before::Confirmed, Before::Killed] {
        futexes(before, 1, 2, 1, 4);
    }
}

/// The second publication finds no sleeper, and clears the word; so may the third.
#[test]
fn three_publications() {
    futexes(Before::Silent, 1, 3, 1, 3);
    futexes(Before::Confirmed, 1, 3, 1, 3);
}

#[test]
fn two_publishers() {
    futexes(Before::Silent, 2, 1, 1, 2);
    futexes(Before::Confirmed, 2, 1, 1, 2);
}

#[test]
fn two_sleepers() {
    for before in [Before::Silent, Before::Confirmed, Before::Killed] {
        futexes(before, 1, 1, 2, 3);
    }
}

#[test]
fn two_sleepers_and_two_publications() {
    futexes(Before::Silent, 1, 2, 2, 1);
    futexes(Before::Confirmed, 1, 2, 2, 2);
}

#[test]
#[should_panic(expected = "deadlock")]
fn the_first_sleeper_needs_the_heavy_fence() {
    without(Step::SleeperHeavy, || futexes(Before::Silent, 1, 1, 1, None));
}

#[test]
#[should_panic(expected = "deadlock")]
fn who_sees_that_somebody_slept_needs_a_fence() {
    without(Step::SenderFence, || futexes(Before::Confirmed, 1, 1, 1, None));
}

/// A woken sleeper runs its heavy fence late, and then confirms. If it confirms the SLEEPY of a
/// later sleeper, a third one finds CONFIRMED although nobody has run a fence. `steps`: what the
/// late sleeper does to the word.
fn late(steps: fn(&Want)) {
    let model = move || {
        let line = Arc::new(Line::default());
        let [publisher, late] = [0, 1].map(|n| {
            let line = line.clone();
            loom::thread::spawn(move || match n {
                0 => {
                    is_light(0);
                    line.publish();
                }
                _ => {
                    steps(&line.want);
                    line.sleep_until(1);
                }
            })
        });
        line.sleep_until(1);
        publisher.join().unwrap();
        late.join().unwrap();
    };
    with_light(1, || every_way(3, model));
}

#[test]
fn a_late_sleeper_that_does_not_confirm() {
    late(|_| ());
}

#[test]
#[should_panic(expected = "deadlock")]
fn only_the_first_sleeper_may_confirm() {
    late(Want::confirm);
}

/// A connection ends, and another one begins in its slot. If `late`, a sender of the first
/// connection looks for sleepers only now. Meanwhile a thread of the second connection publishes.
fn reused(before: Before, late: bool) {
    let model = move || {
        let line = Arc::new(Line::default());
        match before {
            Before::Silent => {}
            Before::Confirmed => line.want.arm_and_fence(FUTEX_BIT, || ()),
            Before::Killed => drop(line.want.arm(FUTEX_BIT)),
        }
        let spawn = |n: usize, f: fn(&Line)| {
            let line = line.clone();
            loom::thread::spawn(move || {
                is_light(n);
                f(&line);
            })
        };
        let late = late.then(|| {
            spawn(1, |l| {
                if l.want.take() & FUTEX_BIT != 0 {
                    l.want.seq.fetch_add(1, Ordering::Release);
                    l.futex.wake_all();
                }
            })
        });
        line.want.renew();
        let sender = spawn(0, Line::publish);
        line.sleep_until(1);
        sender.join().unwrap();
        late.map(|t| t.join().unwrap());
    };
    with_light(2, || every_way(if late { Some(2) } else { None }, model));
}

#[test]
fn the_next_connection_in_a_slot() {
    for before in [Before::Silent, Before::Confirmed, Before::Killed] {
        reused(before, false);
        reused(before, true);
    }
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_sender_of_the_next_connection_needs_a_fence() {
    without(Step::SenderFence, || reused(Before::Confirmed, false));
}

/// Two slots of a channel, and one waiter on the other side of the channel.
#[derive(Default)]
struct Channel {
    slots: [(AtomicU64, Want); 2],
    summary: AtomicU64,
    ready: AtomicU64,
    sleeping: AtomicU32,
    waker: Waker,
}

impl Channel {
    /// Like `stream::notify` with `waker::each`.
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
            self.waker.ring();
        }
    }

    /// Like `epoll::wait` with one thread: the waiter does not look at a slot that is armed and
    /// not ready until the slot is marked.
    fn wait_for(&self, goal: [u64; 2]) {
        let mut active = [true; 2];
        loop {
            if self.summary.load(Ordering::Relaxed) != 0 {
                // Acquire: sees the marks, and what was published before them.
                self.summary.swap(0, Ordering::Acquire);
                let marks = self.ready.swap(0, Ordering::Acquire);
                for (slot, active) in active.iter_mut().enumerate() {
                    *active |= marks >> slot & 1 != 0;
                }
            }
            let done = |slot: usize| self.slots[slot].0.load(Ordering::Acquire) >= goal[slot];
            for (slot, active) in active.iter_mut().enumerate() {
                // The application has all it wants of this slot, as if an edge had been reported.
                *active &= !done(slot);
            }
            if done(0) && done(1) {
                return;
            }
            let mut batch = Batch::new(membarrier);
            for (slot, _) in active.iter().enumerate().filter(|(_, active)| **active) {
                batch.arm(&self.slots[slot].1, 1);
            }
            batch.fence();
            // The real code uses plain stores. Coherence orders a plain store after an earlier
            // read-modify-write of another thread, but loom does not; a swap has that order in
            // loom, too.
            self.sleeping.swap(1, Ordering::Relaxed);
            if !FORGETS.get() {
                fence(Ordering::SeqCst);
            }
            let marked = self.summary.load(Ordering::Relaxed) != 0;
            if !marked && !(0..2).any(|slot| active[slot] && done(slot)) {
                self.waker.wait();
            }
            if !PARKS.get() {
                self.sleeping.swap(0, Ordering::Relaxed);
            }
            // Armed and not ready: the waiter ignores the slot until it is marked.
            for (slot, active) in active.iter_mut().enumerate() {
                *active &= done(slot);
            }
        }
    }
}

std::thread_local! {
    /// The channel is parked, as in `epoll::links` of the crate `readiness`: the *sleeping* note
    /// of the waiter stays set, and only a wake-up clears it.
    static PARKS: core::cell::Cell<bool> = const { core::cell::Cell::new(false) };
    /// The waiter leaves out the fence after it has set *sleeping*.
    static FORGETS: core::cell::Cell<bool> = const { core::cell::Cell::new(false) };
}

/// Thread `i` publishes on the slots `plan[i]`, in that order.
fn wakers(plan: &'static [&'static [usize]], preemptions: Option<usize>) {
    let model = move || {
        let ch = Arc::new(Channel::default());
        let threads: Vec<_> = plan
            .iter()
            .enumerate()
            .map(|(n, slots)| {
                let ch = ch.clone();
                loom::thread::spawn(move || {
                    is_light(n);
                    slots.iter().for_each(|&s| ch.publish(s));
                })
            })
            .collect();
        let total = |slot| plan.iter().flat_map(|p| p.iter()).filter(|&&s| s == slot).count() as u64;
        ch.wait_for([total(0), total(1)]);
        threads.into_iter().for_each(|t| t.join().unwrap());
    };
    with_light(plan.len(), || every_way(preemptions, model));
}

#[test]
fn bell_for_one_publication() {
    wakers(&[&[0]], Some(5));
}

#[test]
fn bell_for_two_publications_on_one_slot() {
    wakers(&[&[0, 0]], Some(3));
}

#[test]
fn bell_for_two_slots() {
    wakers(&[&[0, 1]], Some(3));
}

#[test]
fn bell_for_two_publishers() {
    wakers(&[&[0], &[1]], Some(2));
}

/// The waiter looks at the marks of a parked channel only after a ring.
#[test]
fn a_parked_channel_rings() {
    PARKS.set(true);
    wakers(&[&[0]], Some(5));
    wakers(&[&[0, 1]], Some(3));
    wakers(&[&[0], &[1]], Some(2));
}

#[test]
#[should_panic(expected = "deadlock")]
fn parking_needs_a_fence() {
    PARKS.set(true);
    FORGETS.set(true);
    wakers(&[&[0]], Some(5));
}

#[test]
#[should_panic(expected = "deadlock")]
fn bell_needs_the_heavy_fence() {
    fn nothing() {}
    let model = || {
        let ch = Arc::new(Channel::default());
        let publisher = {
            let ch = ch.clone();
            loom::thread::spawn(move || {
                is_light(0);
                ch.publish(0);
            })
        };
        let mut batch = Batch::new(nothing);
        batch.arm(&ch.slots[0].1, 1);
        batch.fence();
        if ch.slots[0].0.load(Ordering::Acquire) == 0 {
            ch.sleeping.swap(1, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            if ch.summary.load(Ordering::Relaxed) == 0 {
                ch.waker.wait();
            }
        }
        publisher.join().unwrap();
    };
    with_light(1, || every_way(None, model));
}

#[test]
#[should_panic(expected = "deadlock")]
fn bell_needs_the_fence_behind_sleeping() {
    FORGETS.set(true);
    wakers(&[&[0]], Some(5));
}
