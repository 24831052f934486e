//! Taking from the queues of others: busy zones, connection stealing
//! (Affinity-Accept, 3.3.1; ADR 26).
//!
//! The monitor hands every worker of a group the local listen sockets of the other workers
//! ("peers"). A worker's epoll instance contains them after its own socket. For each new
//! connection the kernel wakes the first sleeping thread in the socket's wait list. The socket's
//! own worker is first in this list, so a peer is woken only if the own worker does not sleep.
//!
//! A peer that is woken does not take the connection at once, because the own worker may be about
//! to take it, and serves it better. The woken peer looks again until one of these happens:
//!
//! - the connection is gone,
//! - the own worker has not looked at its queue for a while (the *patience*),
//! - the own worker's zone is busy.

mod peers;
mod steal;
pub mod unsubscribed;

use super::listener::{close, used, Local, Zoned};
use crate::{ctl, process};
use core::sync::atomic::{AtomicBool, Ordering};
use fsocket_abi::balance::{Balance, Queue, BALANCE_SIZE, TRUST};
use fsocket_proto::request;
use fsocket_sys::{self as sys, cpu};

pub use peers::{came, went};

/// Marks a peer's listen socket in the kernel's epoll instance.
pub const PEER_MARK: u64 = 0xF50C_4E7B_E11A_0003;

/// Some thread of this process has to look at its peers' queues.
static PENDING: AtomicBool = AtomicBool::new(false);

fn queue(b: &Balance, place: u32) -> Option<&Queue> {
    b.queue.get((place as usize).wrapping_sub(1))
}

fn bit(place: u32) -> u64 {
    1u64.checked_shl(place.wrapping_sub(1)).unwrap_or(0)
}

fn patience_ns(b: &Balance) -> u64 {
    b.patience.load(Ordering::Relaxed).clamp(10, 10_000_000) as u64 * 1000
}

/// A worker that waits in `accept`, `poll` or `select` may serve each connection before it comes back. It does if it has
/// not looked for this long. Then an idle worker serves the waiting connections sooner.
const SERVES_NS: u64 = 20_000;

/// How long a worker leaves connections to their own worker: the patience if some worker is
/// overloaded, else [`TRUST`] times as long.
fn usual_patience_ns(b: &Balance) -> u64 {
    patience_ns(b) * if b.overloaded.load(Ordering::Relaxed) == 0 { TRUST } else { 1 }
}

fn ticks(ns: u64) -> u64 {
    ns / 1000 * cpu::ticks_per_us()
}

impl Local {
    /// Notes that the worker looks at its queue.
    fn looks(&self, b: &Balance) {
        if let Some(q) = queue(b, self.place.load(Ordering::Relaxed)) {
            q.looked.store(cpu::ticks(), Ordering::Relaxed);
        }
    }
    fn is_waiting_for_peers(&self) -> bool {
        self.peers_since.load(Ordering::Relaxed) != 0
    }
    /// The longest sleep before the next look at the peers' queues. A worker that serves inline looks soon, and less
    /// and less often as long as their connections are left to them: it would spin beside a worker that is stopped.
    fn looks_again_ns(&self, b: &Balance) -> u64 {
        let usual = usual_patience_ns(b);
        if !self.sleeping.load(Ordering::Relaxed) {
            return usual;
        }
        let waited = cpu::ticks().saturating_sub(self.peers_since.load(Ordering::Relaxed)) / cpu::ticks_per_us() * 1000;
        (waited / 2).max(SERVES_NS).min(usual)
    }
    /// Ends the patience of this worker, so that it looks at its peers' queues at once.
    fn look_at_once(&self) {
        self.peers_since.store(1, Ordering::Relaxed);
        self.peers_looked.store(0, Ordering::Relaxed);
        PENDING.store(true, Ordering::Relaxed);
    }
    fn wait_for_peers(&self, since: u64) {
        let _ = self.peers_since.compare_exchange(0, since.max(1), Ordering::Relaxed, Ordering::Relaxed);
        PENDING.store(true, Ordering::Relaxed);
    }
}

impl Zoned {
    /// The shared counts of the group, if this listener is balanced.
    #[inline]
    pub(super) fn balance(&self) -> Option<&'static Balance> {
        let p = self.peers.map.load(Ordering::Acquire);
        // SAFETY: the pointer leads to a whole mapping that lasts as long as it is visible.
        (!p.is_null()).then(|| unsafe { &*p })
    }

    /// The monitor's BPF program selects among these sockets, so this process maps its counts.
    pub(super) fn map_balance(&self) {
        if self.balance().is_none() {
            self.map_balance_again();
        }
    }

    /// Another monitor may have come, with counts of its own. The former mapping stays valid
    /// until the new one replaces it, because messages about peers may come meanwhile.
    pub(super) fn map_balance_again(&self) {
        if !process::balances() {
            return;
        }
        let ask = request::Balance { group: self.group.load(Ordering::Relaxed) };
        let Ok((_, Some(fd))) = ctl::request(ask, None) else { return };
        if let Ok(p) = sys::mmap(BALANCE_SIZE, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED, fd, 0) {
            self.peers.map.store(p as *mut Balance, Ordering::Release);
        }
        let _ = sys::close(fd);
    }

    /// The worker of the calling thread, if it takes part in balancing.
    fn me(&self) -> Option<&Local> {
        self.own().or_else(|| self.own_member()).or_else(|| self.deputized())
    }

    fn deputized(&self) -> Option<&Local> {
        let me = process::thread();
        self.locals().find(|l| l.delegate.load(Ordering::Relaxed) == me)
    }

    /// All workers of this process.
    fn workers(&self) -> impl Iterator<Item = &Local> {
        self.locals().chain(self.member())
    }

    /// The shared counts, if worker `l` takes part in balancing.
    #[inline]
    pub(super) fn balance_of(&self, l: &Local) -> Option<&'static Balance> {
        if !l.shared.load(Ordering::Relaxed) {
            return None;
        }
        self.balance()
    }

    /// Called after a sleep that included [`Zoned::peers_fd`]; `spoke`: that descriptor was
    /// readable. True: an `accept` would now get a connection from a peer's queue.
    pub fn peers_spoke(&self, spoke: bool) -> bool {
        let Some(l) = self.own() else { return false };
        if spoke {
            l.wait_for_peers(cpu::ticks());
        }
        l.is_waiting_for_peers() && self.settle_peers(l) == Waits::Now
    }

    fn settle_peers(&self, l: &Local) -> Waits {
        let waits = self.look_at_peers(l);
        if waits == Waits::Nothing {
            l.peers_since.store(0, Ordering::Relaxed);
        }
        waits
    }
}

/// Handles [`fsocket_proto::notice::WakeHint`]: connections wait for a worker that does not look.
pub fn wake_hint(group: u64) {
    for z in used().filter(|z| z.group.load(Ordering::Relaxed) == group) {
        for l in z.workers() {
            l.look_at_once();
        }
    }
}

/// The monitor has died, so no notice comes any more when a worker exits. From now on every local
/// socket is used by its own worker only, and is closed when that worker exits.
pub fn alone() {
    for z in used() {
        for l in z.workers() {
            l.shared.store(false, Ordering::Relaxed);
            l.peers_since.store(0, Ordering::Relaxed);
            close(&l.inner);
        }
        for s in z.peers.iter() {
            z.drop_peer(s);
        }
    }
}

/// A peer's socket has become readable in an epoll instance in which the calling thread waits.
#[cold]
pub fn spoke() {
    let now = cpu::ticks();
    for z in used() {
        let Some((l, b)) = z.me().and_then(|l| Some((l, z.balance_of(l)?))) else { continue };
        if !l.is_waiting_for_peers() {
            // Before the own worker's patience is over, only busy zones may be stolen from.
            let others = b.busy.load(Ordering::Relaxed) & !bit(l.place.load(Ordering::Relaxed));
            l.peers_looked.store(if others == 0 { now } else { 0 }, Ordering::Relaxed);
        }
        l.wait_for_peers(now);
    }
}

/// Does the calling thread have to look at its peers' queues now and then?
#[inline]
pub fn pending() -> bool {
    PENDING.load(Ordering::Relaxed) && own_pending()
}

#[cold]
fn own_pending() -> bool {
    let mut any = false;
    for z in used() {
        any |= z.workers().any(Local::is_waiting_for_peers);
        if z.me().is_some_and(Local::is_waiting_for_peers) {
            return true;
        }
    }
    if !any {
        PENDING.store(false, Ordering::Relaxed);
        // Another wait may have begun in between.
        if used().any(|z| z.workers().any(Local::is_waiting_for_peers)) {
            PENDING.store(true, Ordering::Relaxed);
        }
    }
    false
}

/// While [`pending`] is true: the longest allowed sleep, in nanoseconds.
pub fn sleep_limit() -> Option<u64> {
    if !pending() {
        return None;
    }
    let mut ns = u64::MAX;
    for z in used() {
        if let (Some(l), Some(b)) = (z.me(), z.balance()) {
            if l.is_waiting_for_peers() {
                ns = ns.min(l.looks_again_ns(b));
            }
        }
    }
    Some(ns)
}

/// Looks at the peers' queues of the listeners that are watched in `ep`. Reports (events, data)
/// of those listeners for which an `accept` would get a connection from a peer.
pub fn look(ep: i32, mut report: impl FnMut(u32, u64)) {
    for z in used() {
        let Some(l) = z.me().filter(|l| l.is_waiting_for_peers()) else { continue };
        // The limit makes this one system call a millisecond, not one for each turn of a busy
        // loop.
        let now = cpu::ticks();
        let ago = now.saturating_sub(l.peers_looked.load(Ordering::Relaxed));
        if z.balance().is_some_and(|b| ago < ticks(usual_patience_ns(b))) {
            continue;
        }
        let waits = z.settle_peers(l);
        // The report is repeated until the connections are taken.
        l.peers_looked.store(if waits == Waits::Later { now } else { 0 }, Ordering::Relaxed);
        if waits == Waits::Now {
            for w in z.watches.active().filter(|w| w.ep() == ep) {
                report(libc::EPOLLIN as u32, w.data());
            }
        }
    }
}

/// The calling thread is about to wait. Notes in the counts that it has looked at its queues.
#[inline]
pub fn before_sleep() {
    if process::balances() {
        for z in used() {
            if let Some((l, b)) = z.me().and_then(|l| Some((l, z.balance_of(l)?))) {
                l.looks(b);
            }
        }
    }
}

/// The result of a look at the peers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Waits {
    Nothing,
    /// Connections wait, but they are left to their own worker for now.
    Later,
    /// Connections wait, and this worker may take them.
    Now,
}
