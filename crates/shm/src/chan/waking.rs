//! Waking the threads that wait at a channel, and which worker a new connection goes to.

use super::{all, queue_len, Chan, Client};
use crate::waker::{self, Waker};
use crate::{ctl, pipes, process, stats};
use core::sync::atomic::Ordering;
use fsocket_abi::arena::Counter;
use fsocket_abi::channel::{sleeping, Waiter, SUMMARY_SYN, WAITERS};
use fsocket_proto::{request, values};
use fsocket_ring::dispatch::{self, Workers};
use fsocket_ring::syn;
use fsocket_sync::atomic::{fence, AtomicU32};
use fsocket_sync::doorbell::{Want, FUTEX_BIT};
use fsocket_sys as sys;

impl Waker {
    /// The user is gone for good: leave all channels too.
    pub fn retire(&self) {
        for c in all() {
            c.release_waiter(self);
        }
        self.release();
    }
    /// Say on every channel where this waker has a waiter that nobody sleeps on it. (It looks at all that there are;
    /// a sleep that is over says so where it has said that it begins.)
    pub fn is_abandoned(&self) {
        for c in all() {
            c.slept_on(self);
        }
    }
}

impl Chan {
    /// Wake waiter `w` on the other side. The monitor does it for us until the sleeper has a pipe for
    /// this process: a one-shot client rings when it connects, when it asks and when it closes, and
    /// a pipe costs more than that. False: nobody can wake it.
    pub fn ring_peer(&self, w: usize, key: u64) -> bool {
        let w = w.min(WAITERS - 1);
        if self.peer_pipe[w].to(key).is_some_and(|fd| pipes::ring(fd, self.id.load(Ordering::Relaxed))) {
            return true;
        }
        self.peer_rung[w].store(key, Ordering::Relaxed);
        self.ring_by_monitor(1 - self.my_side(), w, key)
    }

    fn has_pipe(&self, w: usize) -> bool {
        self.peer_pipe[w].to(self.waiter(1 - self.my_side(), w).waker.load(Ordering::Relaxed)).is_some()
    }

    pub fn ring_by_monitor(&self, side: usize, w: usize, key: u64) -> bool {
        let channel = self.id.load(Ordering::Relaxed);
        ctl::tell(request::Ring { key, channel, waiter: values::Waiter { side, number: w } }, None)
    }

    /// A pipe to the thread with `key`, as waiter `w` of the other side. True: `fd` is ours; else
    /// nobody here has rung that.
    pub fn pipe_to(&self, w: usize, key: u64, fd: i32) -> bool {
        if key == 0 || self.peer_rung[w].load(Ordering::Relaxed) != key {
            return false;
        }
        let Some(own) = process::spare_fd(fd) else { return false };
        if !self.peer_pipe[w].put(key, own) {
            process::close_own(own);
        }
        true
    }

    /// Put a slot into a SYN queue: idle workers first, busy ones last.
    pub fn push_syn(&self, c: &mut Client, slot: usize) -> bool {
        let workers = self.header().workers.load(Ordering::Acquire);
        let start = c.next_worker;
        c.next_worker = start.wrapping_add(1);
        let q = |w: u32| self.queue(1 + w as usize);
        let busy = c.busy.mask();
        let h = self.header();
        // (Nobody changes it any more where the monitor has died.)
        let avoid = if ctl::dead() { 0 } else { h.avoid.load(Ordering::Relaxed) };
        let turns = !self.is_balanced();
        let workers = Workers { all: workers, busy, avoid, turns };
        let pick = dispatch::choose(workers, start, q, |want| is_asleep(self, want));
        let queue = match pick {
            Some(w) => q(w),
            None => self.queue(0),
        };
        if !syn::has_room(queue) {
            return false;
        }
        // Before the entry: a worker that finds the connection has seen the count change.
        h.arrived.store(c.next_worker, Ordering::Relaxed);
        if !syn::push(queue, slot) {
            return false;
        }
        if let Some(w) = pick {
            c.busy.added(w, |w| queue_len(q(w)));
            if c.busy.mask() != busy {
                self.header().busy.store(c.busy.mask(), Ordering::Relaxed);
            }
        }
        // The caller looks at `listener_closed` next; the monitor sets it, runs a
        // heavy fence and empties the queues. `is_silent` has the light fence.
        let ring = |want: &Want| wake_syn(self, 1 - self.my_side(), want);
        match pick {
            Some(w) => dispatch::wake(w, workers, q, ring),
            None if queue.want.is_silent() => {}
            None => drop(ring(&queue.want)),
        }
        true
    }
}

/// A sleep on a waker of `limit` (None: for ever): how long it may be now. The first rings of a peer come by
/// way of the monitor, which somebody may have stopped: then the sleeper finds the marks itself.
pub fn cut(limit: Option<u64>) -> Option<u64> {
    const LOOK_NS: u64 = 2_000_000_000;
    if super::none() {
        return limit;
    }
    let limit = crate::stuck::cut(limit);
    super::rest::look_if_due();
    Some(limit.map_or(LOOK_NS, |l| l.min(LOOK_NS)))
}

/// Tell the other side that something changed on `slot`: `mask` came from
/// [`Want::take`].
#[cold]
#[inline(never)]
pub fn wake(c: &Chan, slot: usize, want: &Want, mask: u64) {
    wake_side(c, 1 - c.my_side(), slot, want, mask);
}

/// Tell one side, also the caller's own.
pub fn wake_side(c: &Chan, side: usize, slot: usize, want: &Want, mask: u64) {
    stats::count(Counter::Wakes);
    // Before the marks and the wake-up, whose release publishes it.
    want.notified_at.store(sys::cpu::ticks(), Ordering::Relaxed);
    if mask & FUTEX_BIT != 0 {
        wake_futex(&want.seq);
    }
    each(c, side, mask & !FUTEX_BIT, |w| {
        w.ready[slot / 64 % 16].fetch_or(1 << (slot % 64), Ordering::Relaxed);
        w.summary.fetch_or(1 << (slot / 64 % 16), Ordering::Release);
    });
}

/// Does one of the peer's waiters sleep?
pub fn is_asleep(c: &Chan, mut mask: u64) -> bool {
    mask &= !FUTEX_BIT;
    while mask != 0 {
        let i = mask.trailing_zeros() as usize;
        mask &= mask - 1;
        if i < WAITERS && c.waiter(1 - c.my_side(), i).sleeping.load(Ordering::Relaxed) != 0 {
            return true;
        }
    }
    false
}

/// Tell a side's waiters of this word that a SYN queue has something; true: one of them slept, and was rung. As in the
/// kernel all hear of a connection but those that only wait to accept it, of which one does. Should that one leave
/// without it, it tells the next (`Listener::pass_on`; `model/one.rs` of the sync crate).
#[cold]
pub fn wake_syn(c: &Chan, side: usize, want: &Want) -> bool {
    let mask = want.waiting() & !FUTEX_BIT;
    if mask == 0 {
        return false;
    }
    stats::count(Counter::Wakes);
    // As in `wake_side`; for all queues of the channel.
    c.queue(0).want.notified_at.store(sys::cpu::ticks(), Ordering::Relaxed);
    let (mut any, mut one) = (false, false);
    let alone = |i: usize| c.waiter(side, i).sleeping.load(Ordering::Relaxed) == sleeping::ONE;
    let all = (0..WAITERS).filter(|i| mask >> i & 1 != 0);
    // One with a pipe first: a message of the monitor's wakes all that sleep in the process.
    let near = all.clone().find(|i| alone(*i) && side != c.my_side() && c.has_pipe(*i));
    for i in near.into_iter().chain(all) {
        let alone = alone(i);
        if one && alone || !want.claim(1 << i) {
            continue;
        }
        let rung = ring_one(c, side, i, |w| _ = w.summary.fetch_or(SUMMARY_SYN, Ordering::Release));
        any |= rung;
        one |= rung && alone;
    }
    any
}

fn wake_futex(seq: &AtomicU32) {
    seq.fetch_add(1, Ordering::Release);
    sys::futex_wake(seq, i32::MAX);
}

/// Mark waiters, and ring those that sleep.
fn each(c: &Chan, side: usize, mut mask: u64, mark: impl Fn(&Waiter)) {
    while mask != 0 {
        let i = mask.trailing_zeros() as usize;
        mask &= mask - 1;
        if i < WAITERS {
            ring_one(c, side, i, &mark);
        }
    }
}

/// Mark a waiter, and ring it if it sleeps; false: there was none to ring.
fn ring_one(c: &Chan, side: usize, i: usize, mark: impl Fn(&Waiter)) -> bool {
    let w = c.waiter(side, i);
    mark(w);
    // The mark before the look at `sleeping`; the sleeper does the reverse.
    fence(Ordering::SeqCst);
    if w.sleeping.load(Ordering::Relaxed) == sleeping::NO {
        return false;
    }
    let how = w.sleeping.swap(sleeping::NO, Ordering::AcqRel);
    if how == sleeping::NO {
        return false;
    }
    let key = w.waker.load(Ordering::Acquire);
    let rung = key != 0 && if side == c.my_side() { ring_fork_group(c, i, key) } else { c.ring_peer(i, key) };
    if !rung {
        // Nobody can ring it now; sleeps are bounded when the monitor
        // is dead, and the mark stays.
        w.sleeping.store(how, Ordering::Relaxed);
    }
    rung
}

/// Ring a waker on our own side: this process's, or that of one related by fork.
fn ring_fork_group(c: &Chan, w: usize, key: u64) -> bool {
    match waker::by_key(key) {
        Some(b) => {
            b.ring_self();
            true
        }
        None => c.ring_by_monitor(c.my_side(), w, key),
    }
}
