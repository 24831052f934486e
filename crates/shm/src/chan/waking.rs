//! Wakes threads that wait on a channel, and chooses the worker for a new connection.

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
    /// Releases the waker and its waiters in all channels, because the user of the waker has gone
    /// for good.
    pub fn retire(&self) {
        for c in all() {
            c.release_waiter(self);
        }
        self.release();
    }
    /// Notes in all channels that no thread sleeps on this waker. (A sleep that ends normally does
    /// that only for the channels where it noted its beginning.)
    pub fn is_abandoned(&self) {
        for c in all() {
            c.slept_on(self);
        }
    }
}

impl Chan {
    /// Wakes waiter `w` on the other side, by a pipe if this process has one for that thread, else
    /// through the monitor. A one-shot client rings only when it connects, asks and closes; a pipe
    /// would cost more than those rings. False: the thread cannot be woken.
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

    /// Stores a pipe to the thread with `key`, which was waiter `w` of the other side when it asked
    /// for the pipe. True: `fd` was taken. False: that thread does not wait in this channel, and
    /// this process has not rung it. (Meanwhile the thread may be another waiter, and `w` another
    /// thread. The monitor sends each pipe once: a refused one would never come again.)
    pub fn pipe_to(&self, w: usize, key: u64, fd: i32) -> bool {
        let side = 1 - self.my_side();
        let is_there = |w: usize| {
            self.peer_rung[w].load(Ordering::Relaxed) == key
                || self.waiter(side, w).waker.load(Ordering::Relaxed) == key
        };
        if key == 0 || !(0..WAITERS).any(is_there) {
            return false;
        }
        let Some(own) = process::spare_fd(fd) else { return false };
        if !self.peer_pipe[w].put(key, own) {
            process::close_own(own);
        }
        true
    }

    /// Puts a slot into a SYN queue. Idle workers get connections first, busy ones last.
    pub fn push_syn(&self, c: &mut Client, slot: usize) -> bool {
        let workers = self.header().workers.load(Ordering::Acquire);
        let start = c.next_worker;
        c.next_worker = start.wrapping_add(1);
        let q = |w: u32| self.queue(1 + w as usize);
        let busy = c.busy.mask();
        let h = self.header();
        // After the monitor's death the value in the header is stale.
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
        // This store comes before the queue entry, so a worker that finds the connection has seen
        // the count change.
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
        // Pairs with the end of a listener: the monitor sets `listener_closed`, runs a heavy fence
        // and empties the queues. `is_silent` has the light fence, and the caller looks at
        // `listener_closed` afterwards.
        let ring = |want: &Want| wake_syn(self, 1 - self.my_side(), want);
        match pick {
            Some(w) => dispatch::wake(w, workers, q, ring),
            None if queue.want.is_silent() => {}
            None => drop(ring(&queue.want)),
        }
        true
    }
}

/// How long a sleep on a waker may last now, in nanoseconds. The first rings of a peer go through
/// the monitor, which may be stopped (for example by a debugger). Then the sleeper finds the marks
/// itself.
pub fn sleep_limit() -> Option<u64> {
    const LOOK_NS: u64 = 2_000_000_000;
    if super::none() {
        return None;
    }
    super::rest::look_if_due();
    Some(LOOK_NS)
}

/// Wakes the other side after a change on `slot`. `mask` came from [`Want::take`].
#[cold]
#[inline(never)]
pub fn wake(c: &Chan, slot: usize, want: &Want, mask: u64) {
    wake_side(c, 1 - c.my_side(), slot, want, mask);
}

/// Like [`wake`], for any side, also the caller's own.
pub fn wake_side(c: &Chan, side: usize, slot: usize, want: &Want, mask: u64) {
    stats::count(Counter::Wakes);
    // Before the marks and the wake-up, whose release publishes this store.
    want.notified_at.store(sys::cpu::ticks(), Ordering::Relaxed);
    if mask & FUTEX_BIT != 0 {
        wake_futex(&want.seq);
    }
    each(c, side, mask & !FUTEX_BIT, |w| {
        w.ready[slot / 64 % 16].fetch_or(1 << (slot % 64), Ordering::Relaxed);
        w.summary.fetch_or(1 << (slot / 64 % 16), Ordering::Release);
    });
}

/// Does any of these waiters of the peer sleep?
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

/// Wakes waiters of this word on a side, because a SYN queue has a connection. As in the kernel,
/// all waiters in `poll` or epoll are woken, but only one of those in `accept`. If that one leaves
/// without the connection, it wakes the next (`Listener::pass_on`; `model/one.rs` of the sync
/// crate). True: a waiter slept, and was rung.
#[cold]
pub fn wake_syn(c: &Chan, side: usize, want: &Want) -> bool {
    let mask = want.waiting() & !FUTEX_BIT;
    if mask == 0 {
        return false;
    }
    stats::count(Counter::Wakes);
    // As in `wake_side`. The word of queue 0 has the time for all queues of the channel.
    c.queue(0).want.notified_at.store(sys::cpu::ticks(), Ordering::Relaxed);
    let (mut any, mut one) = (false, false);
    let alone = |i: usize| c.waiter(side, i).sleeping.load(Ordering::Relaxed) == sleeping::ONE;
    let all = (0..WAITERS).filter(|i| mask >> i & 1 != 0);
    // A waiter with a pipe comes first, because a message of the monitor wakes all threads that
    // sleep in the process.
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

/// Marks waiters, and rings those that sleep.
fn each(c: &Chan, side: usize, mut mask: u64, mark: impl Fn(&Waiter)) {
    while mask != 0 {
        let i = mask.trailing_zeros() as usize;
        mask &= mask - 1;
        if i < WAITERS {
            ring_one(c, side, i, &mark);
        }
    }
}

/// Marks a waiter, and rings it if it sleeps. False: the waiter did not sleep, or could not be
/// rung.
fn ring_one(c: &Chan, side: usize, i: usize, mark: impl Fn(&Waiter)) -> bool {
    let w = c.waiter(side, i);
    mark(w);
    // The mark comes before the look at `sleeping`; the sleeper does these steps in the reverse
    // order.
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
        // This waiter cannot be rung now, but the mark stays. While the monitor is dead, the
        // sleeper looks again after a limited time.
        w.sleeping.store(how, Ordering::Relaxed);
    }
    rung
}

/// Rings a waker of this side, in this process or in another process of the fork group.
fn ring_fork_group(c: &Chan, w: usize, key: u64) -> bool {
    match waker::by_key(key) {
        Some(b) => {
            b.ring_self();
            true
        }
        None => c.ring_by_monitor(c.my_side(), w, key),
    }
}
