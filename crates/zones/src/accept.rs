//! `accept` on a listener with local listen sockets: the global queue now and
//! then (else it would starve), the worker's own, the global one, then those of
//! other threads.

pub use super::listener::Peer;
use super::listener::{is_nonblocking, of, state, Local, Zoned};
use crate::table::Desc;
use crate::wait::{self, Deadline};
use crate::{arena, ctl, pool, process, stats, Cause, Outcome};
use core::sync::atomic::{AtomicBool, Ordering};
use fsocket_abi::arena::{zone_accept, Counter, Reason};
use fsocket_reuseport::listener::{self, Shape};
use fsocket_sys::{self as sys, Errno, Result};

/// While both have connections, the own and the global queue take turns: what is in the
/// global one has waited longer. As long as nothing is found there it is looked at ever more
/// seldom, up to every so many connections, or after a while.
const GLOBAL_EVERY: u32 = 2;
const GLOBAL_SELDOM: u32 = 256;
/// A worker that has found its queue empty within so many connections does so again.
const DRAINS: u32 = 8;
/// At most once in so many connections because of the time.
const GLOBAL_LATE: u32 = 4;
const GLOBAL_LATE_US: u64 = 2000;

/// The process has been out of numbers: from then on the kernel is asked by `accept` itself, which
/// says so also where nothing waits.
static SCARCE: AtomicBool = AtomicBool::new(false);

/// Where the kernel puts the peer's address if the program does not want it: cheaper than to ask behind it.
pub struct PeerAddress {
    addr: libc::sockaddr_storage,
    len: u32,
}

impl PeerAddress {
    #[allow(clippy::new_without_default)] // only ever on the stack
    pub fn new() -> PeerAddress {
        // SAFETY: zero is valid.
        PeerAddress { addr: unsafe { core::mem::zeroed() }, len: size_of::<libc::sockaddr_storage>() as u32 }
    }

    /// The program's place, or this one.
    ///
    /// # Safety
    /// Neither is used after this value has gone.
    pub unsafe fn or(&mut self, addr: *mut libc::sockaddr, len: *mut u32) -> (*mut libc::sockaddr, *mut u32) {
        match addr.is_null() {
            true => ((&raw mut self.addr).cast(), &raw mut self.len),
            false => (addr, len),
        }
    }
}

impl Peer {
    /// Would the kernel take these flags?
    fn is_sound(&self) -> bool {
        self.flags & !(libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC) == 0
    }

    pub(super) fn accept(&self, fd: i32) -> Result<i32> {
        let mut own = PeerAddress::new();
        // SAFETY: whoever made this vouches for the two pointers.
        let (addr, len) = unsafe { own.or(self.addr, self.len) };
        // SAFETY: null, the program's as accept4(2) wants them, or room of ours; the kernel checks.
        let r = unsafe { sys::accept4(fd, addr as *mut u8, len, self.flags) };
        if matches!(r, Err(e) if matches!(e.raw(), libc::EMFILE | libc::ENFILE)) {
            SCARCE.store(true, Ordering::Relaxed);
        }
        let n = r?;
        pool::kernel_allocated(n);
        // SAFETY: as the kernel has filled them.
        unsafe { (crate::upcalls::upcalls().accepted)(n, addr, len) };
        Ok(n)
    }
}

/// `accept` on a listener that has no SYN queues.
///
/// # Safety
/// `peer` as accept4(2) wants it.
pub unsafe fn accept(fd: i32, d: &Desc, peer: Peer) -> Outcome<Result<i32>> {
    let Some(z) = of(d).filter(|z| z.state() != state::OFF || z.is_non_worker()) else {
        return Outcome::Kernel(Cause::NotOurs);
    };
    ctl::poll_in_passing();
    super::watch::look_if_asked();
    if let Some(r) = z.take_own(fd, peer) {
        return Outcome::Done(r);
    }
    if z.is_member(fd) {
        return Outcome::Done(z.accept_member(fd, peer));
    }
    let nonblock = is_nonblocking(fd);
    z.come(fd, nonblock);
    if !z.is_active() {
        if z.is_non_worker() {
            return Outcome::Done(match z.take_other(fd, nonblock, peer) {
                Err(Errno::EAGAIN) if !nonblock => z.wait(fd, d, peer),
                r => r,
            });
        }
        if z.state() != state::READY {
            return Outcome::Kernel(Cause::NotOurs);
        }
        // As the kernel does, but we see when it returns.
        return Outcome::Done(peer.accept(fd).inspect(|_| {
            z.dwell.accepted();
            stats::count(Counter::AcceptKernel);
            stats::count(Counter::AcceptGlobal);
        }));
    }
    Outcome::Done(match z.take_other(fd, nonblock, peer) {
        Err(Errno::EAGAIN) if !nonblock => z.wait(fd, d, peer),
        r => r,
    })
}

fn is_ready(fd: i32) -> bool {
    let mut p = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one pollfd.
    matches!(unsafe { sys::ppoll(&mut p, 1, Some(0), core::ptr::null()) }, Ok(1))
}

impl Local {
    /// Is it the global socket's turn?
    fn is_global_turn(&self, now: u64) -> bool {
        let n = self.turns.load(Ordering::Relaxed) + 1;
        let every = self.every.load(Ordering::Relaxed).clamp(GLOBAL_EVERY, GLOBAL_SELDOM);
        let late =
            || now.saturating_sub(self.turned.load(Ordering::Relaxed)) > GLOBAL_LATE_US * sys::cpu::ticks_per_us();
        if n < every && (n < GLOBAL_LATE || !late()) {
            self.turns.store(n, Ordering::Relaxed);
            return false;
        }
        self.turns.store(0, Ordering::Relaxed);
        self.turned.store(now, Ordering::Relaxed);
        true
    }

    /// Was the global queue empty whenever it had its turn lately?
    fn finds_nothing_global(&self) -> bool {
        self.every.load(Ordering::Relaxed) > GLOBAL_EVERY
    }

    /// Its queue had one, or was empty.
    pub(super) fn had(&self, any: bool) {
        let n = if any { self.since_empty.load(Ordering::Relaxed).saturating_add(1) } else { 0 };
        self.since_empty.store(n, Ordering::Relaxed);
    }

    fn global_had(&self, any: bool) {
        let every = self.every.load(Ordering::Relaxed).clamp(GLOBAL_EVERY, GLOBAL_SELDOM);
        self.every.store(if any { GLOBAL_EVERY } else { every * 2 }, Ordering::Relaxed);
    }
}

impl Zoned {
    /// A connection was accepted from the global socket, elsewhere.
    pub fn returned(&self) {
        self.count_member();
        self.dwell.accepted();
    }

    /// The calling thread is in `accept`: it may become a worker now.
    pub fn come(&self, fd: i32, nonblock: bool) {
        if self.is_member(fd) {
            return;
        }
        if !nonblock {
            self.worker(fd, super::How::Sleeping);
        } else if self.own().is_none() {
            self.late(fd);
        }
    }

    /// A connection from the own queue, at its turn from the global one. None:
    /// neither has any.
    #[inline]
    pub fn take_own(&self, fd: i32, peer: Peer) -> Option<Result<i32>> {
        let l = self.own()?;
        if self.is_shut() {
            return None;
        }
        self.follow(fd, l);
        if let Some(r) = self.take_for_balance(l, peer) {
            return Some(r);
        }
        if l.is_global_turn(sys::cpu::ticks()) {
            if let Ok(n) = self.take_global(fd, false, peer) {
                l.global_had(true);
                return Some(Ok(n));
            }
            l.global_had(false);
        }
        if self.is_found_empty(l, l.fd(), peer) {
            return None;
        }
        match peer.accept(l.fd()) {
            Ok(n) => {
                l.had(true);
                self.took_own(l);
                Some(self.accepted(n, l.cpu.load(Ordering::Relaxed), zone_accept::LOCAL))
            }
            // Closed on the way, by another thread's shutdown: the global socket
            // says what there is to say.
            Err(e) if matches!(e.raw(), libc::EAGAIN | libc::EBADF | libc::EINVAL) => {
                l.had(false);
                None
            }
            Err(e) => Some(Err(e)),
        }
    }

    /// Is the worker's queue known to be empty? To find that out by `accept` costs 3.4 us where a `poll`
    /// costs 0.2, because the kernel makes a file and a socket first, and most servers accept until
    /// there is nothing. So the kernel is asked first where that is likely.
    #[inline]
    pub(super) fn is_found_empty(&self, l: &Local, fd: i32, peer: Peer) -> bool {
        let likely = self.is_counted_empty(l).unwrap_or_else(|| l.since_empty.load(Ordering::Relaxed) < DRAINS);
        let empty = likely && peer.is_sound() && !SCARCE.load(Ordering::Relaxed) && !is_ready(fd);
        if empty {
            l.had(false);
        }
        empty
    }

    /// A connection from any queue of the kernel; EAGAIN: there is none. Does not
    /// block, whatever the global socket's mode is (`nonblock`).
    pub fn take(&self, fd: i32, nonblock: bool, peer: Peer) -> Result<i32> {
        self.take_own(fd, peer).unwrap_or_else(|| self.take_other(fd, nonblock, peer))
    }

    /// As [`Zoned::take`], but not from the own queue, which was just found empty.
    pub fn take_other(&self, fd: i32, nonblock: bool, peer: Peer) -> Result<i32> {
        match self.take_global(fd, nonblock, peer) {
            Err(Errno::EAGAIN) => {}
            r => return r,
        }
        if let Ok(n) = self.take_handed_off(peer) {
            return self.accepted(n, sys::cpu::current().saturating_sub(1), zone_accept::STOLEN);
        }
        if let Some(r) = self.take_from_peers(peer) {
            return r;
        }
        let own = self.own();
        if own.is_some_and(|l| self.balance_of(l).is_some()) {
            return Err(Errno::EAGAIN);
        }
        for l in self.locals().filter(|l| own.is_none_or(|o| !core::ptr::eq(*l, o)) && is_ready(l.fd())) {
            if let Ok(n) = peer.accept(l.fd()) {
                self.took_own(l);
                return self.accepted(n, l.cpu.load(Ordering::Relaxed), zone_accept::REMOTE);
            }
        }
        self.take_waiting(fd, !nonblock, peer).unwrap_or(Err(Errno::EAGAIN))
    }

    fn take_global(&self, fd: i32, nonblock: bool, peer: Peer) -> Result<i32> {
        let r = if nonblock {
            // As in `is_found_empty`.
            let scarce = SCARCE.load(Ordering::Relaxed);
            if !scarce && self.own().is_some_and(Local::finds_nothing_global) && !is_ready(fd) {
                return Err(Errno::EAGAIN);
            }
            peer.accept(fd)
        } else {
            if !is_ready(fd) {
                return Err(Errno::EAGAIN);
            }
            // A rival would leave us asleep in the kernel with our own queue
            // filling up: one at a time.
            let _turn = self.page().map(|p| p.lock());
            if is_ready(fd) {
                peer.accept(fd)
            } else {
                Err(Errno::EAGAIN)
            }
        };
        let zone = self.own().map_or_else(|| sys::cpu::current().saturating_sub(1), |l| l.cpu.load(Ordering::Relaxed));
        self.accepted(r?, zone, zone_accept::GLOBAL)
    }

    pub(super) fn accepted(&self, n: i32, zone: u32, from: usize) -> Result<i32> {
        self.dwell.accepted();
        stats::count(Counter::AcceptKernel);
        stats::count(
            [Counter::AcceptLocal, Counter::AcceptGlobal, Counter::AcceptRemote, Counter::AcceptStolen][from.min(3)],
        );
        arena::count_accept(zone, from);
        Ok(n)
    }

    /// Options that the application has set since.
    fn follow(&self, fd: i32, l: &Local) {
        let Some(page) = self.page() else { return };
        if page.turns.load(Ordering::Acquire) != 0 {
            return self.off(Reason::ZoneTurns);
        }
        let now = page.options.load(Ordering::Acquire);
        if now == l.options.load(Ordering::Relaxed) {
            return;
        }
        l.options.store(now, Ordering::Relaxed);
        if Shape::of(fd).and_then(|shape| listener::refresh(fd, l.fd(), &shape)).is_err() {
            self.off(Reason::ZoneOption);
        }
    }

    /// Sleep on the global socket, the own one, and the monitor.
    fn wait(&self, fd: i32, d: &Desc, peer: Peer) -> Result<i32> {
        let timeo = d.options().receive_timeout();
        let deadline = Deadline::of_option(timeo);
        loop {
            let own = self.own().map_or(-1, |l| l.fd());
            super::balance::before_sleep();
            let mut p = [fd, own, self.peers_fd(), self.handoff_fd(), -1, -1].map(|fd| libc::pollfd {
                fd,
                events: libc::POLLIN,
                revents: 0,
            });
            // SAFETY: no mask.
            match unsafe { wait::sleep(&mut p, None, super::balance::cut(deadline.left()), core::ptr::null()) } {
                Err(Errno::EINTR) if wait::restarts(deadline.is_limited()) => continue,
                Err(e) => return Err(e),
                Ok(0) if deadline.is_over() => return Err(Errno::EAGAIN),
                Ok(_) => {}
            }
            self.peers_spoke(p[2].revents != 0);
            wait::heed(&p);
            match self.take(fd, false, peer) {
                Err(Errno::EAGAIN) => {}
                r => return r,
            }
            if p[0].revents & (libc::POLLHUP | libc::POLLERR | libc::POLLNVAL) != 0 {
                // It does not listen any more: the kernel says how.
                return peer.accept(fd);
            }
            // Descriptors that another thread closes do not wake us.
            if process::nonce() == 0 || self.own().is_none() && !self.is_non_worker() {
                return peer.accept(fd);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_global_queue_gets_its_turn() {
        let l = Local::new();
        let until = |l: &Local, now| (1..10_000).find(|_| l.is_global_turn(now)).unwrap();
        let now = 5 * GLOBAL_LATE_US * sys::cpu::ticks_per_us();
        assert_eq!(until(&l, now), GLOBAL_EVERY);
        for every in [4, 8, 16, 32, 64, 128, 256, 256, 256] {
            l.global_had(false);
            assert_eq!(until(&l, now), every);
        }
        assert_eq!(until(&l, 2 * now), GLOBAL_LATE, "also where there are few connections");
        l.global_had(true);
        assert_eq!(until(&l, 2 * now), GLOBAL_EVERY, "they take turns once there is something");
    }
}
