//! Which workers may be stolen from, and an accept that does so.

use super::peers::tell_closed;
use super::{bit, patience_ns, queue, ticks, Waits};
use crate::listener::Peer;
use crate::listener::PEERS;
use crate::listener::{Local, Zoned};
use core::sync::atomic::Ordering;
use fsocket_abi::arena::zone_accept;
use fsocket_abi::balance::{Balance, QUEUES, TRUST};
use fsocket_sys::{self as sys, cpu, Result};

/// Somebody to steal from.
pub(super) struct Victim {
    pub(super) fd: i32,
    pub(super) place: u32,
    pub(super) gone: bool,
    /// In this process.
    near: bool,
    /// The kernel wakes us for it. (Not for a socket of the program's own, which it waits for
    /// in its own way: we would be woken beside its worker each time. The monitor sends wake hints.)
    pub(super) wakes: bool,
}

impl Zoned {
    /// Whom a worker may steal from.
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

    /// Whether the own queue is empty, as far as the counts tell; None: there are none.
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

    /// At the start of an `accept`: a turn for those whose worker has gone, after each local one,
    /// because they have waited longer; or for a busy zone, after so many local ones.
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

    /// Nothing local: busy zones first, then those whose worker does not look.
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
            // Nothing is left there, so that they can be closed.
            None => _ = self.look_at_peers(l),
        }
        r
    }

    fn steal(&self, b: &Balance, l: &Local, peer: Peer, from: impl Fn(&Victim) -> bool) -> Option<Result<i32>> {
        let last = self.peers.last.load(Ordering::Relaxed);
        // Round-robin by place, beginning behind the last one.
        for behind in [true, false] {
            for v in self.victims(l).filter(|v| (v.place > last) == behind && from(v)) {
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

    /// Asks the kernel whether anything waits at the peers, and closes those that are
    /// gone and empty: the kernel then moves their handshakes.
    pub(super) fn look_at_peers(&self, l: &Local) -> Waits {
        let Some(b) = self.balance_of(l) else { return Waits::Nothing };
        let blank = libc::pollfd { fd: -1, events: libc::POLLIN, revents: 0 };
        let mut p = [blank; PEERS + QUEUES];
        let mut n = 0;
        for v in self.victims(l).take(p.len()) {
            p[n].fd = v.fd;
            n += 1;
        }
        // SAFETY: n entries.
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
            // Also while this worker is busy itself: nobody would tell it again.
            waits = Waits::Later;
        }
        waits
    }
}

/// Has the victim's worker not looked for so long that its connections are better off
/// with us? Nor may we have only just seen them: it may be waking up for them.
fn is_left_alone(b: &Balance, l: &Local, v: &Victim) -> bool {
    let Some(q) = queue(b, v.place) else { return false };
    let overloaded = b.overloaded.load(Ordering::Relaxed) & bit(v.place) != 0;
    let ticks = ticks(patience_ns(b) * if overloaded { 1 } else { TRUST });
    let now = cpu::ticks();
    // Clocks of two CPUs may differ a little: what lies ahead is now.
    let ago = |then: u64| now.saturating_sub(then);
    ago(q.looked.load(Ordering::Relaxed)) > ticks && ago(l.peers_since.load(Ordering::Relaxed)) > ticks
}
