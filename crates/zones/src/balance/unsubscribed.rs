//! A busy worker takes its peers' listen sockets out of its epoll instance (it *unsubscribes*),
//! so that the kernel does not wake it for other workers' connections.
//!
//! While no worker sleeps, the kernel walks the whole wait list of a listen socket for each
//! connection, and locks every worker's epoll instance. Every worker then looks at the socket
//! from another CPU, only to leave the connection to the socket's own worker. At full, even load
//! this cost some per cent with two workers, and the cost grows with the number of workers.
//!
//! So a worker whose waits are short removes the peers' sockets from its instance, as long as
//! their own workers look after them. It adds them again after a sleep that ended without an
//! event. The kernel then reports waiting connections at once, so none is missed (`fsocket_sync`
//! has a model of stealing). Without this rule the kernel would wake the worker for nearly every
//! connection that another worker is about to take.
//!
//! An unsubscribed worker sleeps at most [`IDLE_NS`]. This is longer than a tick of the kernel:
//! for a shorter sleep the kernel would program the CPU's timer and cancel it again, which costs
//! as much as a useless wake-up.

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

/// A worker unsubscribes if its short waits outnumber the others by this.
const ENOUGH: u32 = 64;
const SLEPT: u32 = 1;
/// A wait up to this long was short, in microseconds.
const SOON_US: u64 = 500;
/// Interval between two checks that the peers' workers still look at their queues, in
/// nanoseconds. It is short compared with the patience.
const LOOK_NS: u64 = 1_000_000;
/// The longest sleep in nanoseconds, which equals the patience.
const IDLE_NS: u64 = 10_000_000;

/// Values of `thread`: several threads wait, or a thread is just being stored.
const MANY: u64 = u64::MAX;
const ABOUT: u64 = u64::MAX - 1;

/// The state of an epoll instance in which local listen sockets are watched.
pub struct Unsubscribed {
    /// Number of waits that ended soon and with events, less the number of other waits.
    soon: AtomicU32,
    /// True while the peers' sockets are removed from the instance.
    out: fsocket_sync::unsubscribed::Unsubscribed,
    /// The thread that waits in the instance.
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

    /// Are the peers' sockets removed from the instance?
    #[inline]
    pub fn is(&self) -> bool {
        self.out.is()
    }

    /// While [`Unsubscribed::is`] is true: the longest sleep, in nanoseconds. If that sleep ends
    /// without an event, the caller calls [`Unsubscribed::attend`].
    #[inline]
    pub fn sleep_limit(&self) -> Option<u64> {
        self.is().then_some(IDLE_NS)
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

    /// The surplus of short waits that makes a worker unsubscribe, or keeps it unsubscribed.
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
            // Release: `waits` reads the thread's number after it has seen the thread.
            self.thread.store(me.thread, Ordering::Release);
            return watch::belongs(ep, me);
        }
        if who != MANY {
            // The first thread may sleep in the instance, and would not be woken for other
            // workers' connections.
            self.thread.store(MANY, Ordering::Relaxed);
            self.attend(ep);
        }
        watch::deputize(ep);
    }

    /// Returns which threads have waited in the instance.
    pub fn waits(&self) -> Waits {
        // Acquire: pairs with `other_thread`.
        match self.thread.load(Ordering::Acquire) {
            0 => Waits::Nobody,
            thread if matches!(thread, ABOUT | MANY) || thread == process::thread() => Waits::Me,
            thread => Waits::Other(Who { thread, tid: self.tid.load(Ordering::Relaxed) }),
        }
    }

    /// The monitor has sent a message, perhaps because connections wait in a queue.
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

    /// Adds the peers' sockets again: from now on the kernel wakes threads that sleep in `ep` for
    /// other workers' connections. The reason is that the calling thread is about to sleep long,
    /// or that a second thread has come while the first may sleep.
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
    /// The worker whose instance `ep` is, if it takes part in balancing. It may be another thread
    /// than the caller.
    fn worker_in(&self, ep: i32) -> Option<&Local> {
        let w = self.watches.active().find(|w| w.ep() == ep)?;
        self.local_of(w.thread()).filter(|l| self.balance_of(l).is_some())
    }

    /// The calling worker, if it watches peers in `ep`.
    fn watched_peers(&self, ep: i32) -> Option<(&Local, &'static Balance)> {
        let l = self.me()?;
        let b = self.balance_of(l)?;
        self.watches.active().any(|w| w.ep() == ep).then_some((l, b))
    }

    /// Have the workers of all peers' sockets looked at their queues lately? None: there are no
    /// peers.
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
        // The worker will see these connections again if it subscribes again.
        l.peers_since.store(0, Ordering::Relaxed);
    }

    fn turn_to_peers(&self, ep: i32) {
        let Some(l) = self.worker_in(ep) else { return };
        for v in self.victims(l).filter(|v| v.wakes) {
            put_peer(ep, v.fd);
        }
    }
}
