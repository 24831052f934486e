//! `accept` on a listener that has local listen sockets. It tries the queues in this order: now
//! and then the global queue first (which would starve otherwise), the calling worker's own
//! queue, the global queue, then the queues of other workers.

pub use super::listener::Peer;
use super::listener::{is_nonblocking, of, state, Local, Zoned};
use crate::table::Desc;
use crate::wait::{self, Call, Deadline, Mask, Restart, Sleep, Source};
use crate::{arena, ctl, pool, process, stats, Cause, Outcome};
use core::sync::atomic::{AtomicBool, Ordering};
use fsocket_abi::arena::{zone_accept, Counter, Reason};
use fsocket_reuseport::listener::{self, Shape};
use fsocket_sys::{self as sys, Errno, Result};

/// While both queues have connections, the worker alternates between its own queue and the global
/// one, because connections in the global queue have waited longer. Each time the global queue is
/// found empty, the interval between two looks at it doubles, up to [`GLOBAL_SELDOM`]
/// connections.
const GLOBAL_EVERY: u32 = 2;
const GLOBAL_SELDOM: u32 = 256;
/// If the worker found its own queue empty within this many connections, it probably is empty
/// again.
const DRAINS: u32 = 8;
/// After [`GLOBAL_LATE_US`], the worker looks at the global queue even before its interval is
/// over, but at most once in this many connections.
const GLOBAL_LATE: u32 = 4;
const GLOBAL_LATE_US: u64 = 2000;

/// Set once the process or the system has run out of file descriptors. From then on the library
/// calls `accept` without a `poll` before it, because the kernel returns EMFILE even if no
/// connection waits.
static SCARCE: AtomicBool = AtomicBool::new(false);

/// Room for the peer's address if the program does not ask for it. The library needs the address,
/// and `accept` returns it more cheaply than a later `getpeername`.
pub struct PeerAddress {
    addr: libc::sockaddr_storage,
    len: u32,
}

impl PeerAddress {
    #[allow(clippy::new_without_default)] // only ever on the stack
    pub fn new() -> PeerAddress {
        // SAFETY: zero is a valid sockaddr_storage.
        PeerAddress { addr: unsafe { core::mem::zeroed() }, len: size_of::<libc::sockaddr_storage>() as u32 }
    }

    /// The program's buffer for the address, or this one if the program passed none.
    ///
    /// # Safety
    /// Neither pointer is used after this value is dropped.
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
        // SAFETY: `own` outlives the two pointers.
        let (addr, len) = unsafe { own.or(self.addr, self.len) };
        // SAFETY: null, pointers of the program, or `own`. Only the kernel uses them, and it
        // checks them.
        let r = unsafe { sys::accept4(fd, addr as *mut u8, len, self.flags) };
        if matches!(r, Err(e) if matches!(e.raw(), libc::EMFILE | libc::ENFILE)) {
            SCARCE.store(true, Ordering::Relaxed);
        }
        let n = r?;
        pool::kernel_allocated(n);
        // SAFETY: `addr` and `len` are null, or the kernel has just filled them.
        unsafe { (crate::upcalls::upcalls().accepted)(n, addr, len) };
        Ok(n)
    }
}

/// `accept` on a listener that has no SYN queues.
///
/// # Safety
/// `peer` as accept4(2) wants it.
pub unsafe fn accept(fd: i32, d: &Desc, peer: Peer) -> Outcome<Result<i32>> {
    let Some(z) = of(d) else { return Outcome::Kernel(Cause::NotOurs) };
    if z.state() == state::OFF && z.page().is_none() && !z.is_non_worker() {
        return Outcome::Kernel(Cause::NotOurs);
    }
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
        if z.page().is_none() {
            return Outcome::Kernel(Cause::NotOurs);
        }
        return Outcome::Done(match nonblock {
            true => z.accept_global(fd, peer),
            false => z.block(|| z.accept_global(fd, peer)).unwrap_or_else(|| z.wait(fd, d, peer)),
        });
    }
    Outcome::Done(match z.take_other(fd, nonblock, peer) {
        Err(Errno::EAGAIN) if !nonblock => z.wait(fd, d, peer),
        r => r,
    })
}

pub(super) fn is_ready(fd: i32) -> bool {
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

    /// Was the global queue empty at the last look?
    fn finds_nothing_global(&self) -> bool {
        self.every.load(Ordering::Relaxed) > GLOBAL_EVERY
    }

    /// The worker has taken a connection from its queue (`any`), or found it empty.
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
    /// A connection was accepted from the global socket by other code than this file.
    pub fn returned(&self) {
        self.count_member();
        self.dwell.accepted();
    }

    /// The calling thread is in `accept`: if the conditions hold, it becomes a worker now.
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

    /// Takes a connection from the own queue or, at its turn, from the global one. None: both are
    /// empty.
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
            // Another thread's `shutdown` has closed the local socket meanwhile. The caller then
            // tries the global socket, whose answer is the right one.
            Err(e) if matches!(e.raw(), libc::EAGAIN | libc::EBADF | libc::EINVAL) => {
                l.had(false);
                None
            }
            Err(e) => Some(Err(e)),
        }
    }

    /// Is the worker's queue known to be empty? A failing `accept` costs 3.4 us, because the
    /// kernel makes a file and a socket first; a `poll` costs 0.2 us. Most servers accept until
    /// nothing is left. So if the queue is likely to be empty, the library calls `poll` before
    /// `accept`.
    #[inline]
    pub(super) fn is_found_empty(&self, l: &Local, fd: i32, peer: Peer) -> bool {
        let likely = self.is_counted_empty(l).unwrap_or_else(|| l.since_empty.load(Ordering::Relaxed) < DRAINS);
        let empty = likely && peer.is_sound() && !SCARCE.load(Ordering::Relaxed) && !is_ready(fd);
        if empty {
            l.had(false);
        }
        empty
    }

    /// Takes a connection from any of the kernel's queues. EAGAIN: there is none. Never blocks,
    /// even if the global socket does; `nonblock` says whether the global socket is non-blocking.
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

    /// Accepts from the global socket as the kernel would. The library notes when the worker
    /// leaves with the connection.
    fn accept_global(&self, fd: i32, peer: Peer) -> Result<i32> {
        peer.accept(fd).inspect(|_| {
            self.dwell.accepted();
            stats::count(Counter::AcceptKernel);
            stats::count(Counter::AcceptGlobal);
        })
    }

    fn take_global(&self, fd: i32, nonblock: bool, peer: Peer) -> Result<i32> {
        let r = if nonblock {
            // (As in `is_found_empty`: a `poll` is cheaper than an `accept` that fails.)
            let scarce = SCARCE.load(Ordering::Relaxed);
            if !scarce && self.own().is_some_and(Local::finds_nothing_global) && !is_ready(fd) {
                return Err(Errno::EAGAIN);
            }
            peer.accept(fd)
        } else {
            self.take_if_sure(fd, || peer.accept(fd))
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

    /// Copies options that the application has set on the global socket since the last call.
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

    /// Sleeps until some queue may have a connection, or the monitor a message, and then tries to
    /// accept.
    fn wait(&self, fd: i32, d: &Desc, peer: Peer) -> Result<i32> {
        let timeo = d.options().receive_timeout();
        let deadline = Deadline::of_option(timeo);
        loop {
            let own = self.own().map_or(-1, |l| l.fd());
            super::balance::before_sleep();
            let (global, limit) = self.to_sleep_on(fd);
            let left = limit.into_iter().chain(deadline.left()).min();
            let mut p = [global, own, self.peers_fd(), self.handoff_fd(), -1, -1].map(|fd| libc::pollfd {
                fd,
                events: libc::POLLIN,
                revents: 0,
            });
            let source = Source::Set { fds: &mut p, sleeper: None, mask: Mask::NONE };
            if wait::sleep(source, Sleep::of(Call::Zones, left).restart(Restart::Socket))? == 0 && deadline.is_over() {
                return Err(Errno::EAGAIN);
            }
            self.peers_spoke(p[2].revents != 0);
            wait::heed(&p);
            match self.take(fd, false, peer) {
                Err(Errno::EAGAIN) => {}
                r => return r,
            }
            if p[0].revents & (libc::POLLHUP | libc::POLLERR | libc::POLLNVAL) != 0 {
                // The socket does not listen any more: the kernel returns the right error.
                return peer.accept(fd);
            }
            // A local socket that another thread closes does not end the sleep, so this is
            // checked here.
            if process::nonce() == 0 || self.own().is_none() && !self.is_non_worker() {
                if let Some(r) = self.block(|| peer.accept(fd)) {
                    return r;
                }
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
