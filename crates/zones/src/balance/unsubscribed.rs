//! A worker that has enough to do is not among those that the kernel wakes for others.
//!
//! While nobody sleeps, the kernel goes through the whole list of a listen socket with each
//! connection: it locks every worker's instance, and every worker then asks the socket, from
//! another CPU, only to leave the connection to its worker. At full, even load that cost some per
//! cent with two workers, and grows with their number.
//!
//! So a worker whose waits are short takes the peers' sockets out of its instance, as long as
//! their workers look after them, and puts them in again when a sleep was in vain. What waits in
//! them then is reported at once, so nothing is missed (`fsocket_sync`'s model of stealing). It
//! would be woken for nearly every connection that another worker is about to take.
//!
//! Its sleeps are cut to [`IDLE_NS`]. That is longer than a tick of the kernel, so that no
//! timer of the CPU is set for it and taken back, which costs as much as being woken in vain.

use super::peers::put_peer;
use super::steal::Victim;
use super::usual_patience_ns;
use crate::listener::{used, Local, Zoned};
use crate::process;
use crate::watch::{self, Waits};
use crate::watches::Who;
use core::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};
use fsocket_abi::balance::Balance;
use fsocket_sys::{self as sys, cpu};

/// So many more waits had something to report soon than not.
const ENOUGH: u32 = 64;
const SLEPT: u32 = 1;
/// A wait that took no longer was short, microseconds.
const SOON_US: u64 = 500;
/// Between two looks at the peers' workers, nanoseconds. Short beside the time for which a
/// connection is left to its worker.
const LOOK_NS: u64 = 1_000_000;
/// The longest sleep, nanoseconds: as long as a connection is left to its worker.
const IDLE_NS: u64 = 10_000_000;

/// Instead of a thread: several; one that is just being noted.
const MANY: u64 = u64::MAX;
const ABOUT: u64 = u64::MAX - 1;

/// Of an epoll instance in which local listen sockets are watched.
pub struct Unsubscribed {
    /// Waits that had something soon, less those that had not.
    soon: AtomicU32,
    /// It is without the peers' sockets.
    out: fsocket_sync::unsubscribed::Unsubscribed,
    /// The thread that waits in it.
    thread: AtomicU64,
    tid: AtomicI32,
    looked: AtomicU64,
}

impl Unsubscribed {
    #[allow(clippy::new_without_default)] // only ever in statics
    pub const fn new() -> Unsubscribed {
        Unsubscribed {
            soon: AtomicU32::new(0),
            out: fsocket_sync::unsubscribed::Unsubscribed::new(),
            thread: AtomicU64::new(0),
            tid: AtomicI32::new(0),
            looked: AtomicU64::new(0),
        }
    }

    pub fn reset(&self) {
        self.soon.store(0, Ordering::Relaxed);
        self.out.reset();
        self.thread.store(0, Ordering::Relaxed);
    }

    /// Is the instance without the peers' sockets?
    #[inline]
    pub fn is(&self) -> bool {
        self.out.is()
    }

    /// While that is so, a sleep of `limit` nanoseconds is cut; [`Unsubscribed::attend`] follows if it was
    /// in vain.
    #[inline]
    pub fn cut(&self, limit: Option<u64>) -> Option<u64> {
        match self.is() {
            true => Some(limit.map_or(IDLE_NS, |l| l.min(IDLE_NS))),
            false => limit,
        }
    }

    /// A wait in the instance `ep` that began at `since` (ticks) is over; `found`: with events.
    #[inline]
    pub fn waited(&self, ep: i32, since: u64, found: bool) {
        if !crate::process::balances() {
            return;
        }
        let now = cpu::ticks();
        let was = self.soon.load(Ordering::Relaxed);
        let short = found && now.saturating_sub(since) < SOON_US * cpu::ticks_per_us();
        let soon = if short { (was + 1).min(ENOUGH) } else { was.saturating_sub(SLEPT) };
        self.soon.store(soon, Ordering::Relaxed);
        let looked = || now.saturating_sub(self.looked.load(Ordering::Relaxed));
        if soon >= self.least() && looked() >= super::ticks(LOOK_NS) || self.is() && soon == 0 {
            self.decide(ep, now);
        }
    }

    /// So many of them keep a worker unsubscribed, or make it so.
    fn least(&self) -> u32 {
        if self.is() {
            1
        } else {
            ENOUGH
        }
    }

    /// The calling thread begins to wait in the instance `ep`.
    #[inline]
    pub fn enter(&self, ep: i32) {
        let (me, who) = (process::thread(), self.thread.load(Ordering::Acquire));
        if who != me {
            self.other_thread(ep, who);
        }
    }

    #[cold]
    fn other_thread(&self, ep: i32, who: u64) {
        if who == 0 && self.thread.compare_exchange(0, ABOUT, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            let me = Who::me();
            self.tid.store(me.tid, Ordering::Relaxed);
            // Release: `waiter` finds the number that belongs to it.
            self.thread.store(me.thread, Ordering::Release);
            return watch::belongs(ep, me);
        }
        if who != MANY {
            // One that sleeps in it would not be woken for others.
            self.thread.store(MANY, Ordering::Relaxed);
            self.attend(ep);
        }
        watch::deputize(ep);
    }

    /// Threads that have waited in the instance.
    pub fn waits(&self) -> Waits {
        // Acquire: pairs with `other_thread`.
        match self.thread.load(Ordering::Acquire) {
            0 => Waits::Nobody,
            thread if matches!(thread, ABOUT | MANY) || thread == process::thread() => Waits::Me,
            thread => Waits::Other(Who { thread, tid: self.tid.load(Ordering::Relaxed) }),
        }
    }

    /// The monitor has spoken in it: perhaps of a queue that waits.
    pub fn woken(&self, ep: i32) {
        self.attend(ep);
        if self.thread.load(Ordering::Relaxed) == MANY {
            watch::deputize(ep);
        }
    }

    #[cold]
    fn decide(&self, ep: i32, now: u64) {
        self.looked.store(now, Ordering::Relaxed);
        let peers = || used().filter_map(|z| z.looked_after(ep, now));
        let alone = self.thread.load(Ordering::Relaxed) == process::thread();
        if self.soon.load(Ordering::Relaxed) >= self.least()
            && alone
            && peers().all(|looked| looked)
            && peers().next().is_some()
        {
            let still_alone = || self.thread.load(Ordering::Relaxed) == process::thread();
            self.out.unsubscribe(|| turn_from_peers(ep), still_alone, || turn_to_peers(ep));
        } else {
            self.attend(ep);
        }
    }

    /// Threads that sleep in `ep` are woken for others from now on: the calling thread is about to sleep there,
    /// for long; or a second one has come, and the first may sleep.
    pub fn attend(&self, ep: i32) {
        self.soon.store(0, Ordering::Relaxed);
        self.out.resubscribe(|| turn_to_peers(ep));
    }
}

fn turn_from_peers(ep: i32) {
    used().for_each(|z| z.turn_from_peers(ep));
}

fn turn_to_peers(ep: i32) {
    used().for_each(|z| z.turn_to_peers(ep));
}

impl Zoned {
    /// The worker whose instance `ep` is, if it takes part: perhaps not the calling thread's.
    fn worker_in(&self, ep: i32) -> Option<&Local> {
        let w = self.watches.active().find(|w| w.ep() == ep)?;
        self.local_of(w.thread()).filter(|l| self.balance_of(l).is_some())
    }

    /// What the calling worker watches of others in `ep`.
    fn watched_peers(&self, ep: i32) -> Option<(&Local, &'static Balance)> {
        let l = self.me()?;
        let b = self.balance_of(l)?;
        self.watches.active().any(|w| w.ep() == ep).then_some((l, b))
    }

    /// Have the workers of all these looked lately? None: there are none.
    fn looked_after(&self, ep: i32, now: u64) -> Option<bool> {
        let (l, b) = self.watched_peers(ep)?;
        let lately = super::ticks(usual_patience_ns(b) / 2);
        let looked = |v: Victim| {
            let q = super::queue(b, v.place);
            !v.gone && q.is_some_and(|q| now.saturating_sub(q.looked.load(Ordering::Relaxed)) < lately)
        };
        self.victims(l).filter(|v| v.wakes).map(looked).reduce(|a, b| a && b)
    }

    fn turn_from_peers(&self, ep: i32) {
        let Some(l) = self.worker_in(ep) else { return };
        for v in self.victims(l).filter(|v| v.wakes) {
            let _ = sys::epoll_ctl(ep, libc::EPOLL_CTL_DEL, v.fd, None);
        }
        // What it has seen there it will see again.
        l.peers_since.store(0, Ordering::Relaxed);
    }

    fn turn_to_peers(&self, ep: i32) {
        let Some(l) = self.worker_in(ep) else { return };
        for v in self.victims(l).filter(|v| v.wakes) {
            put_peer(ep, v.fd);
        }
    }
}
