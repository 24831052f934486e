//! The SYN queues of a listener's channels: looking for a connection, taking one, and waiting for
//! one.

use super::{Listener, FAIR};
use crate::chan::{self, Chan};
use crate::stats;
use core::sync::atomic::Ordering;
use fsocket_abi::arena::Counter;
use fsocket_abi::channel::{sleeping, Waiter, SUMMARY_SYN, WORKERS};
use fsocket_sync::doorbell::Batch;

impl Listener {
    /// The number of this worker's own queue, if any.
    fn own_queue(&self) -> Option<usize> {
        match self.worker.load(Ordering::Relaxed) as usize {
            w @ 1..=WORKERS => Some(w),
            _ => None,
        }
    }

    /// Is there a connection for this worker? With `steal`, also in the queues of other workers.
    pub fn has_syn(&self, steal: bool) -> bool {
        self.chans().any(|c| {
            self.own_queue().is_some_and(|q| fsocket_ring::syn::len(c.queue(q)) > 0)
                || fsocket_ring::syn::len(c.queue(0)) > 0
                || (steal && others(c).any(|q| fsocket_ring::syn::len(c.queue(q)) > 0))
        })
    }

    /// The number of connections that have ever come. It never falls, and grows with each
    /// connection, also with one for another worker. (That worker may be busy, so each arrival is
    /// an edge for every worker that looks.) None: channels are being removed at this moment, so
    /// the number is unknown.
    pub fn arrivals(&self) -> Option<u64> {
        // Channels whose peer broke the protocol count, too, because their connections were seen.
        self.arrivals.sum(|| self.placed().map(Chan::arrivals).sum())
    }

    /// Takes a connection from a busy worker's queue, one after `FAIR` of this worker's own. Busy
    /// workers do not steal.
    pub fn take_busy(&self) -> Option<(&'static Chan, usize)> {
        if self.fair.load(Ordering::Relaxed) < FAIR {
            return None;
        }
        self.fair.store(0, Ordering::Relaxed);
        let own = self.own_queue().map_or(0, |q| 1u64 << (q - 1));
        for c in self.chans().filter(|c| c.is_balanced()) {
            // A client may write anything here, so the bits only choose the queues to look at.
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

    /// Takes a connection. Returns its channel and slot.
    pub fn take(&self, steal: bool) -> Option<(&'static Chan, usize)> {
        let n = self.n.load(Ordering::Acquire).max(1);
        let start = self.next.fetch_add(1, Ordering::Relaxed) % n;
        let rotated = || self.chans().skip(start as usize).chain(self.chans().take(start as usize));
        for c in rotated() {
            // The connections in queue 0 are older: they came before there was a worker.
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

    /// Asks to be woken for new connections.
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
    /// Like [`Listener::arm`], for a thread that is about to sleep on its own waker, for
    /// connections and perhaps other events.
    pub fn sleep_on(&self, b: &crate::waker::Waker, batch: &mut Batch<'static>) {
        self.sleep(b, sleeping::YES, batch);
    }
    /// Like [`Listener::sleep_on`], for a thread in `accept`, which waits only for a connection.
    pub fn sleep_alone_on(&self, b: &crate::waker::Waker, batch: &mut Batch<'static>) {
        // The mark is cleared before the queues are armed. A mark that is set after that is a
        // wake-up, which the peer does not repeat.
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
    /// Has a peer woken this thread for a connection since [`Listener::sleep_alone_on`]? The
    /// connection may be gone already.
    pub fn is_marked(&self, b: &crate::waker::Waker) -> bool {
        let marked = |w: &Waiter| w.summary.load(Ordering::Acquire) & SUMMARY_SYN != 0;
        self.chans().any(|c| c.waiter_of(b).is_some_and(marked))
    }
    /// Called when a thread that may have been woken for a connection leaves `accept` without it:
    /// wakes the next thread.
    pub fn pass_on(&self) {
        if self.has_syn(true) {
            let words = |c: &'static Chan| self.own_queue().into_iter().chain([0]).map(move |q| &c.queue(q).want);
            let _ = self.chans().any(|c| words(c).any(|want| chan::wake_syn(c, c.my_side(), want)));
        }
    }
    /// When the first wake-up for a new connection after `since` was sent, in ticks; 0: there was
    /// none.
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

/// Queues whose connections their workers will perhaps not take. With balance these are all
/// queues, because each worker may be busy or gone. Without balance these are the queues without a
/// worker, where a worker that left may have left connections behind.
fn others(c: &Chan) -> impl Iterator<Item = usize> {
    let mask = c.header().workers.load(Ordering::Acquire);
    let top = (64 - mask.leading_zeros() as usize).clamp(8, WORKERS);
    let taken = if c.is_balanced() { 0 } else { mask };
    (1..=top).filter(move |q| taken >> (q - 1) & 1 == 0)
}
