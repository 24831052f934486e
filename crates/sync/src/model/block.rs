//! Waits: [`block`] with a doorbell and a futex, as a receiver uses them, together with signals
//! and cancellation. A lost wake-up leaves a thread asleep for ever, which loom reports as a
//! deadlock.

use super::{every_way, is_light, membarrier, with_light, without};
use crate::atomic::{fence, AtomicBool, AtomicU32, AtomicU64, Ordering};
use crate::block::{self, block, Asleep, Wait};
use crate::doorbell::{Want, FUTEX_BIT};
use crate::step::Step;
use loom::sync::{Condvar, Mutex};
use loom::thread::{self, JoinHandle};
// Not loom's `Arc`, which cannot be dropped while a deadlock unwinds.
use std::sync::Arc;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Error {
    Interrupted,
    Changed,
}

/// `futex(2)` for one thread. A signal ends the sleep, too, but not if it comes before the sleep.
#[derive(Default)]
struct Futex {
    signalled: Mutex<bool>,
    woken: Condvar,
}

impl Futex {
    fn wait(&self, word: &AtomicU32, expected: u32) -> Result<(), Error> {
        let mut signalled = self.signalled.lock().unwrap();
        if word.load(Ordering::Relaxed) != expected {
            return Err(Error::Changed);
        }
        *signalled = false;
        let signalled = self.woken.wait(signalled).unwrap();
        if *signalled {
            return Err(Error::Interrupted);
        }
        Ok(())
    }
    fn wake(&self) {
        let _bucket = self.signalled.lock().unwrap();
        self.woken.notify_all();
    }
    fn signal(&self) {
        *self.signalled.lock().unwrap() = true;
        self.woken.notify_all();
    }
}

/// A direction of a connection, and the thread that receives there.
#[derive(Default)]
struct Line {
    published: AtomicU64,
    want: Want,
    futex: Futex,
    asleep: Asleep,
    /// `pthread_cancel` was called for the thread.
    requested: AtomicBool,
}

impl Line {
    /// Like `stream::notify`.
    fn publish(&self) {
        self.published.fetch_add(1, Ordering::Release);
        if self.want.take() & FUTEX_BIT != 0 {
            self.want.seq.fetch_add(1, Ordering::Release);
            self.futex.wake();
        }
    }
    fn has(&self, count: u64) -> bool {
        self.published.load(Ordering::Acquire) >= count
    }

    /// Like `asleep::cancelled`. The poke wakes the futex, or sends a signal (`by_signal`).
    fn cancel(&self, by_signal: bool) {
        self.requested.store(true, Ordering::Release);
        let mut first = true;
        let poke = || match by_signal {
            true => self.futex.signal(),
            false => self.futex.wake(),
        };
        while self.asleep.disturb(core::mem::take(&mut first), poke) {
            thread::yield_now();
        }
    }
}

/// What a signal does to the call.
#[derive(Clone, Copy, PartialEq)]
enum Rule {
    Restarts,
    Ends,
}

/// Like the wait of a receiver in the streams crate.
struct Receive<'a> {
    line: &'a Line,
    count: u64,
    rule: Rule,
    /// The thread allows cancellation.
    allows: bool,
    seq: u32,
}

impl Wait for Receive<'_> {
    type Woken = Result<(), Error>;
    type End = Result<(), Error>;

    fn arm(&mut self) {
        self.seq = self.line.want.seq.load(Ordering::Acquire);
        self.line.want.arm_and_fence(FUTEX_BIT, membarrier);
    }
    fn look(&mut self) -> Option<Self::End> {
        self.line.has(self.count).then_some(Ok(()))
    }
    fn sleep(&mut self) -> Self::Woken {
        let line = self.line;
        line.asleep.reset();
        let requested = || self.allows && line.requested.load(Ordering::Acquire);
        let look = || line.futex.wait(&line.want.seq, self.seq);
        let r = block::sleep(Some(&line.asleep), Error::Interrupted, requested, look);
        // From here on, other threads do not find the sleeper.
        line.asleep.reset();
        r
    }
    fn on_wake(&mut self, woken: Self::Woken) -> Option<Self::End> {
        let cancelled = self.allows && self.line.requested.load(Ordering::Acquire);
        match woken {
            _ if self.line.has(self.count) => Some(Ok(())),
            Err(Error::Interrupted) if self.rule == Rule::Ends || cancelled => Some(Err(Error::Interrupted)),
            _ => None,
        }
    }
}

fn receive(line: &Line, count: u64, rule: Rule, allows: bool) -> Result<(), Error> {
    block(&mut Receive { line, count, rule, allows, seq: 0 })
}

fn beside(line: &Arc<Line>, f: impl FnOnce(&Line) + 'static) -> JoinHandle<()> {
    let line = line.clone();
    thread::spawn(move || f(&line))
}

/// One sender that publishes `times` times, and one receiver. If `signals`, a signal comes at any
/// time.
fn sender(times: u64, signals: bool, preemptions: impl Into<Option<usize>>) {
    let preemptions = preemptions.into();
    let model = move || {
        let line = Arc::new(Line::default());
        let sender = beside(&line, move |l| {
            is_light(0);
            (0..times).for_each(|_| l.publish());
        });
        let signal = signals.then(|| beside(&line, |l| l.futex.signal()));
        for n in 1..=times {
            assert_eq!(receive(&line, n, Rule::Restarts, true), Ok(()));
        }
        sender.join().unwrap();
        signal.map(|s| s.join().unwrap());
    };
    with_light(1, || every_way(preemptions, model));
}

#[test]
fn a_receiver_is_woken() {
    sender(1, false, None);
    sender(2, false, 3);
}

#[test]
fn a_signal_that_restarts_the_call_ends_no_wait() {
    sender(1, true, 3);
}

#[test]
#[should_panic(expected = "deadlock")]
fn the_second_look_is_needed() {
    without(Step::SecondLook, || sender(1, false, None));
}

/// One thread waits twice. What the first wait leaves armed does not keep the second one from
/// sleeping.
#[test]
fn a_wait_that_is_over_leaves_nothing_behind() {
    let model = || {
        let line = Arc::new(Line::default());
        let sender = beside(&line, |l| {
            is_light(0);
            l.publish();
        });
        assert_eq!(receive(&line, 1, Rule::Ends, true), Ok(()));
        let signal = beside(&line, |l| {
            // Waits until the receiver sleeps.
            while !l.asleep.is() {
                thread::yield_now();
            }
            l.publish();
        });
        assert_eq!(receive(&line, 2, Rule::Ends, true), Ok(()));
        sender.join().unwrap();
        signal.join().unwrap();
    };
    with_light(1, || every_way(2, model));
}

/// Only a request to cancel comes, no data.
fn cancelled(by_signal: bool) {
    let model = move || {
        let line = Arc::new(Line::default());
        let canceller = beside(&line, move |l| l.cancel(by_signal));
        assert_eq!(receive(&line, 1, Rule::Restarts, true), Err(Error::Interrupted));
        canceller.join().unwrap();
    };
    every_way(4, model);
}

#[test]
fn a_thread_that_is_cancelled_leaves_its_sleep() {
    cancelled(false);
    cancelled(true);
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_sleeper_looks_for_requests_behind_a_fence() {
    without(Step::SleepsFence, || cancelled(false));
}

/// The thread does not allow cancellation, so the poke must have no effect. (A poke by signal that
/// is sent just when the thread has answered ends the next sleep. A call that restarts does not
/// notice.)
#[test]
fn a_thread_that_is_not_to_be_cancelled_goes_on() {
    let model = |by_signal, rule| {
        move || {
            let line = Arc::new(Line::default());
            let canceller = beside(&line, move |l| {
                l.cancel(by_signal);
                is_light(0);
                l.publish();
            });
            assert_eq!(receive(&line, 1, rule, false), Ok(()));
            canceller.join().unwrap();
        }
    };
    with_light(1, || {
        every_way(3, model(false, Rule::Ends));
        every_way(3, model(true, Rule::Restarts));
    });
}

/// A request and a message come at the same time: either may end the wait.
#[test]
fn a_request_beside_a_message() {
    let model = || {
        let line = Arc::new(Line::default());
        let canceller = beside(&line, |l| l.cancel(false));
        let sender = beside(&line, |l| {
            is_light(0);
            l.publish();
        });
        let _ = receive(&line, 1, Rule::Restarts, true);
        canceller.join().unwrap();
        sender.join().unwrap();
        fence(Ordering::SeqCst);
        assert!(line.has(1));
    };
    with_light(1, || every_way(2, model));
}
