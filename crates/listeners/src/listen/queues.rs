//! The SYN queues of a listener's channels: whether there is something, taking it, and waiting for it.

use super::{Listener, FAIR};
use crate::chan::{self, Chan};
use crate::stats;
use core::sync::atomic::Ordering;
use fsocket_abi::arena::Counter;
use fsocket_abi::channel::{sleeping, Waiter, SUMMARY_SYN, WORKERS};
use fsocket_sync::doorbell::Batch;

impl Listener {
    /// Own queue number, if there is one.
    fn own_queue(&self) -> Option<usize> {
        match self.worker.load(Ordering::Relaxed) as usize {
            w @ 1..=WORKERS => Some(w),
            _ => None,
        }
    }

    /// Is there a connection for us? With `steal`, also in others' queues.
    pub fn has_syn(&self, steal: bool) -> bool {
        self.chans().any(|c| {
            self.own_queue().is_some_and(|q| fsocket_ring::syn::len(c.queue(q)) > 0)
                || fsocket_ring::syn::len(c.queue(0)) > 0
                || (steal && others(c).any(|q| fsocket_ring::syn::len(c.queue(q)) > 0))
        })
    }

    /// How many connections have ever come: it never falls, and grows whenever one comes, also for another
    /// worker. That one may be busy, and then the arrival is an edge for any worker that looks. None: channels are going
    /// just now, and it cannot be told.
    pub fn arrivals(&self) -> Option<u64> {
        // (Also of channels that have been broken: what they brought has been seen.)
        self.arrivals.sum(|| self.placed().map(Chan::arrivals).sum())
    }

    /// Its turn: a connection of a busy worker, one for `FAIR` of our own. Busy workers
    /// do not steal.
    pub fn take_busy(&self) -> Option<(&'static Chan, usize)> {
        if self.fair.load(Ordering::Relaxed) < FAIR {
            return None;
        }
        self.fair.store(0, Ordering::Relaxed);
        let own = self.own_queue().map_or(0, |q| 1u64 << (q - 1));
        for c in self.chans().filter(|c| c.is_balanced()) {
            // A client may write anything here: what it names is only looked at.
            let mut busy = c.header().busy.load(Ordering::Relaxed);
            if busy & own != 0 {
                continue;
            }
            while busy != 0 {
                let w = busy.trailing_zeros() as usize;
                busy &= busy - 1;
                if let Some(s) = c.pop_syn(1 + w) {
                    stats::count(Counter::Steals);
                    return Some((c, s));
                }
            }
        }
        None
    }

    /// Take a connection: channel and slot.
    pub fn take(&self, steal: bool) -> Option<(&'static Chan, usize)> {
        let n = self.n.load(Ordering::Acquire).max(1);
        let start = self.next.fetch_add(1, Ordering::Relaxed) % n;
        let rotated = || self.chans().skip(start as usize).chain(self.chans().take(start as usize));
        for c in rotated() {
            // What waits for anybody came before there was a worker.
            if let Some(s) = c.pop_syn(0) {
                return Some((c, s));
            }
            if let Some(s) = self.own_queue().and_then(|q| c.pop_syn(q)) {
                self.fair.store(self.fair.load(Ordering::Relaxed).saturating_add(1), Ordering::Relaxed);
                return Some((c, s));
            }
        }
        if steal {
            for c in rotated() {
                for q in others(c) {
                    if let Some(s) = c.pop_syn(q) {
                        if Some(q) != self.own_queue() {
                            stats::count(Counter::Steals);
                        }
                        return Some((c, s));
                    }
                }
            }
        }
        None
    }

    /// Ask to be told of new connections.
    pub fn arm(&self, b: &crate::waker::Waker, batch: &mut Batch<'static>) {
        for c in self.chans() {
            if let Some(w) = c.waiter_for(b) {
                let bit = 1u64 << w;
                if let Some(q) = self.own_queue() {
                    batch.arm(&c.queue(q).want, bit);
                }
                batch.arm(&c.queue(0).want, bit);
            }
        }
    }
    /// The same for a thread that is about to sleep on a waker of its own, for them and perhaps for more.
    pub fn sleep_on(&self, b: &crate::waker::Waker, batch: &mut Batch<'static>) {
        self.sleep(b, sleeping::YES, batch);
    }
    /// The same for one that is about to sleep for nothing else, to accept one.
    pub fn sleep_alone_on(&self, b: &crate::waker::Waker, batch: &mut Batch<'static>) {
        // Before it is armed: what is marked behind this, peers have told of since, and do not again.
        for w in self.chans().filter_map(|c| c.waiter_of(b)) {
            w.summary.fetch_and(!SUMMARY_SYN, Ordering::Acquire);
        }
        self.sleep(b, sleeping::ONE, batch);
    }
    fn sleep(&self, b: &crate::waker::Waker, how: u32, batch: &mut Batch<'static>) {
        for c in self.chans() {
            c.sleep_on(b, how);
        }
        self.arm(b, batch);
    }
    /// Has a peer told of a connection since [`Listener::sleep_alone_on`], whether or not that one is still there?
    pub fn is_marked(&self, b: &crate::waker::Waker) -> bool {
        let marked = |w: &Waiter| w.summary.load(Ordering::Acquire) & SUMMARY_SYN != 0;
        self.chans().any(|c| c.waiter_of(b).is_some_and(marked))
    }
    /// A thread that may have been rung for a connection leaves `accept` without it: the next is told.
    pub fn pass_on(&self) {
        if self.has_syn(true) {
            let words = |c: &'static Chan| self.own_queue().into_iter().chain([0]).map(move |q| &c.queue(q).want);
            let _ = self.chans().any(|c| words(c).any(|want| chan::wake_syn(c, c.my_side(), want)));
        }
    }
    /// When a peer first told of a new connection after `since`; 0: none has. Ticks.
    pub fn notified_since(&self, since: u64) -> u64 {
        let notified = self.chans().map(|c| c.queue(0).want.notified_at.load(Ordering::Relaxed));
        notified.filter(|at| *at >= since).min().unwrap_or(0)
    }
    pub fn disarm(&self, b: &crate::waker::Waker) {
        for c in self.chans() {
            if let Some(w) = c.slept_on(b) {
                let bit = 1u64 << w;
                if let Some(q) = self.own_queue() {
                    c.queue(q).want.disarm(bit);
                }
                c.queue(0).want.disarm(bit);
            }
        }
    }
}

/// Queues that may hold something a dead or busy worker will not take. All of
/// them are looked at: a worker that left may have left connections behind. Without
/// balance only such ones.
fn others(c: &Chan) -> impl Iterator<Item = usize> {
    let mask = c.header().workers.load(Ordering::Acquire);
    let top = (64 - mask.leading_zeros() as usize).clamp(8, WORKERS);
    let taken = if c.is_balanced() { 0 } else { mask };
    (1..=top).filter(move |q| taken >> (q - 1) & 1 == 0)
}
