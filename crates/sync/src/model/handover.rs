//! A kernel connection moves to the rings: no byte is lost, duplicated or reordered, whatever the
//! threads of both ends do meanwhile.

use super::every_way;
use crate::atomic::{AtomicBool, AtomicU32, Ordering};
use crate::handover::{open, refuse, take, Calls, Entry, Env, Steps};
use loom::sync::Mutex;
use loom::thread::yield_now;
use std::collections::VecDeque;
use std::sync::Arc;

const OPENER: usize = 0;
const ACCEPTER: usize = 1;
const STEPS: Steps = Steps { offered: 1, taken: 2, over: 3, refused: 4 };

/// The TCP connection, per end: bytes under way, bytes that have arrived and are unread, and
/// counts.
#[derive(Default)]
struct Tcp {
    flying: [u32; 2],
    unread: [VecDeque<u32>; 2],
    sent: [u32; 2],
    received: [u32; 2],
}

#[derive(Default)]
struct Side {
    calls: Calls,
    over: AtomicBool,
}

#[derive(Default)]
struct Connection {
    tcp: Mutex<Tcp>,
    rings: Mutex<[VecDeque<u32>; 2]>,
    side: [Side; 2],
    word: AtomicU32,
    /// The byte counts that the opener wrote down: sent and received.
    said: [AtomicU32; 2],
    asked: AtomicBool,
}

/// Waits end soon, because loom has no clock.
struct Soon;
impl Env for Soon {
    fn wait_while(&self, word: &AtomicU32, value: u32) {
        for _ in 0..2 {
            if word.load(Ordering::Acquire) != value {
                return;
            }
            yield_now();
        }
    }
    fn wake(&self, _: &AtomicU32) {}
}

#[derive(Clone, Copy)]
struct Rules {
    /// Calls are counted, and kept out during a decision.
    counted: bool,
    /// Both ends compare their byte counts.
    compared: bool,
}
const RIGHT: Rules = Rules { counted: true, compared: true };

impl Connection {
    /// One call on whichever path is in use.
    fn call<R>(&self, who: usize, rules: Rules, tcp: impl FnOnce() -> R, ring: impl FnOnce() -> R) -> R {
        let side = &self.side[who];
        loop {
            if side.over.load(Ordering::Acquire) {
                return ring();
            }
            if !rules.counted {
                return tcp();
            }
            match side.calls.enter() {
                Entry::Counted => {
                    let over = side.over.load(Ordering::Acquire);
                    let r = if over { ring() } else { tcp() };
                    side.calls.leave();
                    return r;
                }
                Entry::Wait => yield_now(),
                Entry::Never => return tcp(),
            }
        }
    }

    fn send(&self, who: usize, rules: Rules, value: u32) {
        let tcp = || {
            {
                let mut t = self.tcp.lock().unwrap();
                t.sent[who] += 1;
                t.flying[who] += 1;
            }
            // Between the two steps the bytes are in flight. They stay in order, because only one
            // thread sends.
            let mut t = self.tcp.lock().unwrap();
            t.flying[who] -= 1;
            t.received[1 - who] += 1;
            t.unread[1 - who].push_back(value);
        };
        self.call(who, rules, tcp, || self.rings.lock().unwrap()[who].push_back(value));
    }

    fn receive(&self, who: usize, rules: Rules) -> Option<u32> {
        let ring = || self.rings.lock().unwrap()[1 - who].pop_front();
        self.call(who, rules, || self.tcp.lock().unwrap().unread[who].pop_front(), ring)
    }

    /// Counts of sent and received bytes, if no received byte is unread.
    fn at_rest(&self, who: usize) -> Option<(u32, u32)> {
        let t = self.tcp.lock().unwrap();
        t.unread[who].is_empty().then_some((t.sent[who], t.received[who]))
    }

    fn goes_over(&self, who: usize) {
        self.side[who].over.store(true, Ordering::Release);
    }

    fn opener(&self, rules: Rules) -> bool {
        let side = &self.side[OPENER];
        if rules.counted && !side.calls.decide() {
            return false;
        }
        let mut over = false;
        if let Some((sent, received)) = self.at_rest(OPENER) {
            self.said[0].store(sent, Ordering::Relaxed);
            self.said[1].store(received, Ordering::Relaxed);
            let tell = || {
                self.asked.store(true, Ordering::Release);
                true
            };
            let still = || !rules.compared || self.at_rest(OPENER) == Some((sent, received));
            over = open(&self.word, STEPS, &Soon, tell, still);
        }
        if over {
            self.goes_over(OPENER);
        }
        if rules.counted {
            side.calls.decided(false);
        }
        over
    }

    fn accepter(&self, rules: Rules) -> bool {
        if !self.asked.load(Ordering::Acquire) {
            return false;
        }
        let side = &self.side[ACCEPTER];
        if rules.counted && !side.calls.decide() {
            refuse(&self.word, STEPS, &Soon);
            return false;
        }
        let theirs = (self.said[1].load(Ordering::Relaxed), self.said[0].load(Ordering::Relaxed));
        let rests = self.at_rest(ACCEPTER);
        let same = rests == Some(theirs) || !rules.compared && rests.is_some();
        let over = same && take(&self.word, STEPS, &Soon);
        if over {
            self.goes_over(ACCEPTER);
        } else {
            refuse(&self.word, STEPS, &Soon);
        }
        if rules.counted {
            side.calls.decided(false);
        }
        over
    }
}

/// One end sends two values, from another thread than the one that decides; the other end reads.
fn run(sender: usize, rules: Rules) {
    every_way(Some(2), move || {
        let c = Arc::new(Connection::default());
        let sends = c.clone();
        let sending = loom::thread::spawn(move || (1..=2).for_each(|v| sends.send(sender, rules, v)));
        let opens = c.clone();
        let opening = loom::thread::spawn(move || opens.opener(rules));
        // The accepter's thread also reads, if the opener sends.
        let mut got = Vec::new();
        let mut over = false;
        for _ in 0..3 {
            over |= c.accepter(rules);
            if sender == OPENER {
                got.extend(c.receive(ACCEPTER, rules));
            }
        }
        assert_eq!(opening.join().unwrap(), over, "both or neither");
        sending.join().unwrap();
        while let Some(v) = c.receive(1 - sender, rules) {
            got.push(v);
        }
        assert_eq!(got, [1, 2], "over: {over}");
    });
}

#[test]
fn nothing_is_lost_whoever_sends() {
    run(OPENER, RIGHT);
    run(ACCEPTER, RIGHT);
}

#[test]
#[should_panic(expected = "over: true")]
fn calls_that_are_not_counted_lose_bytes() {
    run(ACCEPTER, Rules { counted: false, ..RIGHT });
}

/// Bytes in flight cannot be read anywhere.
#[test]
#[should_panic(expected = "over: true")]
fn nothing_to_read_at_either_end_is_not_rest() {
    run(ACCEPTER, Rules { compared: false, ..RIGHT });
}

#[test]
fn it_does_happen() {
    // In at least one order both ends move, so the other tests do check something.
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
    static HAPPENED: AtomicBool = AtomicBool::new(false);
    every_way(Some(2), || {
        let c = Arc::new(Connection::default());
        let opens = c.clone();
        let opening = loom::thread::spawn(move || opens.opener(RIGHT));
        let over = c.accepter(RIGHT);
        assert_eq!(opening.join().unwrap(), over, "both or neither");
        HAPPENED.fetch_or(over, Relaxed);
    });
    assert!(HAPPENED.load(Relaxed));
}
