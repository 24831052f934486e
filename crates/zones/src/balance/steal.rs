//! Selects the workers from which this worker may steal connections, and accepts from their queues.

use super::peers::tell_closed;
use super::{bit, patience_ns, queue, ticks, Waits, SERVES_NS};
use crate::listener::Peer;
use crate::listener::PEERS;
use crate::listener::{Local, Zoned};
use core::sync::atomic::Ordering;
use fsocket_abi::arena::zone_accept;
use fsocket_abi::balance::{Balance, QUEUES, TRUST};
use fsocket_sys::{self as sys, cpu, Result};

/// A worker that may be stolen from.
pub(super) struct Victim {
    pub(super) fd: i32,
    pub(super) place: u32,
    pub(super) gone: bool,
    /// The worker is in this process.
    near: bool,
    /// The kernel wakes this worker for connections in the victim's socket. (False for sockets
    /// that the program itself has made and waits for: there the kernel would wake this worker
    /// for every connection, beside the socket's own worker. For those the monitor sends wake
    /// hints instead.)
    pub(super) wakes: bool,
}

impl Zoned {
    /// The workers from which this one may steal.
    pub(super) fn victims<'a>(&'a self, l: &'a Local) -> impl Iterator<Item = Victim> + 'a {
        let far = self.peers.iter().map(|s| Victim {
            fd: s.fd.load(Ordering::Relaxed),
            place: s.place.load(Ordering::Relaxed),
            gone: s.gone.load(Ordering::Relaxed),
            near: false,
            wakes: !self.is_shared(),
        });
        let of = |o: &Local, wakes| Victim {
            fd: o.fd(),
            place: o.place.load(Ordering::Relaxed),
            gone: false,
            near: true,
            wakes,
        };
        let other = |o: &&Local| !core::ptr::eq(*o, l) && o.shared.load(Ordering::Relaxed);
        let near = self.locals().filter(other).map(move |o| of(o, true));
        let siblings = self.sibling_members(l).map(move |o| of(o, false));
        far.chain(near).chain(siblings).filter(|v| v.fd >= 0)
    }

    /// A connection was accepted from the own queue.
    #[inline]
    pub(crate) fn took_own(&self, l: &Local) {
        if let Some(q) = self.balance_of(l).and_then(|b| queue(b, l.place.load(Ordering::Relaxed))) {
            q.taken.fetch_add(1, Ordering::Relaxed);
            q.looked.store(cpu::ticks(), Ordering::Relaxed);
            l.fair.store(l.fair.load(Ordering::Relaxed).saturating_add(1), Ordering::Relaxed);
        }
    }

    /// Is the own queue empty, as far as the counts tell? None: there are no counts.
    #[inline]
    pub(crate) fn is_counted_empty(&self, l: &Local) -> Option<bool> {
        let q = queue(self.balance_of(l)?, l.place.load(Ordering::Relaxed))?;
        Some(q.length() == 0)
    }

    /// A connection was accepted from the queue of a worker.
    pub(crate) fn took_from(&self, place: u32) {
        self.map_balance();
        if let Some(q) = self.balance().and_then(|b| queue(b, place)) {
            q.taken.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Called at the start of an `accept`. Queues of workers that have exited get a turn after
    /// each local connection, because their connections have waited longer. A busy zone gets a
    /// turn after several local connections.
    #[inline]
    pub(crate) fn take_for_balance(&self, l: &Local, peer: Peer) -> Option<Result<i32>> {
        let b = self.balance_of(l)?;
        l.looks(b);
        if self.peers.orphans.load(Ordering::Relaxed) && l.fair.load(Ordering::Relaxed) > 0 {
            if let Some(r) = self.take_orphan(b, l, peer) {
                return Some(r);
            }
        }
        let (busy, mine) = (b.busy.load(Ordering::Relaxed), bit(l.place.load(Ordering::Relaxed)));
        if busy & !mine == 0 || busy & mine != 0 || l.fair.load(Ordering::Relaxed) < b.ratio.load(Ordering::Relaxed) {
            return None;
        }
        l.fair.store(0, Ordering::Relaxed);
        self.steal(b, l, peer, |v| busy & bit(v.place) != 0)
    }

    /// Called when the local queue is empty. Takes a connection from a busy zone, else from a
    /// worker that does not look at its queue.
    pub(crate) fn take_from_peers(&self, peer: Peer) -> Option<Result<i32>> {
        let l = self.me()?;
        let b = self.balance_of(l)?;
        let (busy, mine) = (b.busy.load(Ordering::Relaxed), bit(l.place.load(Ordering::Relaxed)));
        let may = busy & mine == 0;
        if busy & !mine != 0 && may {
            if let Some(r) = self.steal(b, l, peer, |v| busy & bit(v.place) != 0) {
                return Some(r);
            }
        }
        if !l.is_waiting_for_peers() {
            return None;
        }
        self.steal(b, l, peer, |v| v.gone || may && is_left_alone(b, l, v))
    }

    #[cold]
    fn take_orphan(&self, b: &Balance, l: &Local, peer: Peer) -> Option<Result<i32>> {
        if !self.peers.any_gone() {
            return None;
        }
        let r = self.steal(b, l, peer, |v| v.gone);
        match r {
            Some(_) => l.fair.store(0, Ordering::Relaxed),
            // No connection is left there, so the sockets of exited workers can be closed.
            None => _ = self.look_at_peers(l),
        }
        r
    }

    fn steal(&self, b: &Balance, l: &Local, peer: Peer, from: impl Fn(&Victim) -> bool) -> Option<Result<i32>> {
        let last = self.peers.last.load(Ordering::Relaxed);
        // The victims are tried round-robin by place, starting after the last victim.
        for behind in [true, false] {
            for v in self.victims(l).filter(|v| (v.place > last) == behind && from(v)) {
                // `accept` on a socket of the program's own may block if its worker is faster.
                if self.is_shared() && !crate::listener::is_nonblocking(v.fd) {
                    continue;
                }
                match peer.accept(v.fd) {
                    Ok(n) => {
                        self.peers.last.store(v.place, Ordering::Relaxed);
                        if let Some(q) = queue(b, v.place) {
                            q.taken.fetch_add(1, Ordering::Relaxed);
                        }
                        let me = l.place.load(Ordering::Relaxed) as usize;
                        let pair = b.stolen.get(me.wrapping_sub(1)).and_then(|row| row.get(v.place as usize - 1));
                        if let Some(pair) = pair.filter(|_| !v.gone) {
                            pair.fetch_add(1, Ordering::Relaxed);
                        }
                        let how = if v.near { zone_accept::REMOTE } else { zone_accept::STOLEN };
                        return Some(self.accepted(n, l.cpu.load(Ordering::Relaxed), how));
                    }
                    Err(e) if matches!(e.raw(), libc::EAGAIN | libc::EBADF | libc::EINVAL | libc::ENOTSOCK) => {}
                    Err(e) => return Some(Err(e)),
                }
            }
        }
        None
    }

    /// Asks the kernel whether connections wait in the peers' queues. Closes empty sockets of
    /// exited workers; the kernel then moves the unfinished handshakes to another socket.
    pub(super) fn look_at_peers(&self, l: &Local) -> Waits {
        let Some(b) = self.balance_of(l) else { return Waits::Nothing };
        let blank = libc::pollfd { fd: -1, events: libc::POLLIN, revents: 0 };
        let mut p = [blank; PEERS + QUEUES];
        let mut n = 0;
        for v in self.victims(l).take(p.len()) {
            p[n].fd = v.fd;
            n += 1;
        }
        // SAFETY: the array has n entries.
        if n == 0 || unsafe { sys::ppoll(p.as_mut_ptr(), n, Some(0), core::ptr::null()) }.is_err() {
            return Waits::Nothing;
        }
        let ready = |fd: i32| p[..n].iter().any(|p| p.fd == fd && p.revents & libc::POLLIN != 0);
        for s in self.peers.iter().filter(|s| s.gone.load(Ordering::Relaxed)) {
            if !ready(s.fd.load(Ordering::Relaxed)) {
                self.drop_peer(s);
                tell_closed(self.group.load(Ordering::Relaxed));
            }
        }
        let busy = b.busy.load(Ordering::Relaxed);
        let may = busy & bit(l.place.load(Ordering::Relaxed)) == 0;
        let mut waits = Waits::Nothing;
        for v in self.victims(l).filter(|v| ready(v.fd)) {
            if v.gone || may && (busy & bit(v.place) != 0 || is_left_alone(b, l, &v)) {
                return Waits::Now;
            }
            // The worker looks again later even if it is busy itself, because no event would
            // remind it.
            waits = Waits::Later;
        }
        waits
    }
}

/// Has the victim's worker not looked at its queue for so long that this worker serves the
/// connections sooner? This worker must also have seen them for a while, because the victim's
/// worker may just be waking up for them.
fn is_left_alone(b: &Balance, l: &Local, v: &Victim) -> bool {
    let Some(q) = queue(b, v.place) else { return false };
    let overloaded = b.overloaded.load(Ordering::Relaxed) & bit(v.place) != 0;
    let ticks = match l.sleeping.load(Ordering::Relaxed) {
        true => ticks(SERVES_NS.min(patience_ns(b))),
        false => ticks(patience_ns(b) * if overloaded { 1 } else { TRUST }),
    };
    let now = cpu::ticks();
    // Clocks of two CPUs may differ a little: a time in the future counts as now.
    let ago = |then: u64| now.saturating_sub(then);
    ago(q.looked.load(Ordering::Relaxed)) > ticks && ago(l.peers_since.load(Ordering::Relaxed)) > ticks
}
