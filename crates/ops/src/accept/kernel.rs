//! `accept` from the kernel's queue.

use crate::listen::Listener;
use crate::table::{self, Desc};
use crate::zone::{self, accept::Peer};
use crate::{ctl, pool, process, socks, stats, upgrade, wait};
use fsocket_abi::arena::Counter;
use fsocket_sys::{self as sys, Errno, Result};

/// How long [`alone`] waits before it looks at our queues, nanoseconds.
const PIECE_NS: u64 = 10_000_000;

/// From a listener whose connections begin in the kernel (ADR 53). Its process forks for each, and a page that it
/// writes in between is copied, so this writes none for the wait: no waker, no place of a sleeping thread, nothing
/// of the zone. A connection that came over shared memory all the same (its client looked before the listener was
/// marked) is found between two of these, or by the usual way after [`PIECE_NS`]. None: that is to be taken.
///
/// # Safety
/// As [`super::accept`].
pub(super) unsafe fn alone(fd: i32, d: &Desc, l: &Listener, peer: Peer) -> Option<Result<i32>> {
    let usual = l.has_syn(true)
        || d.options().receive_timeout() != 0
        || zone::of(d).is_some_and(|z| !z.is_idle())
        || !process::is_single_threaded();
    if usual {
        return None;
    }
    if !is_ready(fd) {
        if sys::fcntl(fd, libc::F_GETFL, 0).unwrap_or(0) & libc::O_NONBLOCK != 0 {
            return None;
        }
        let control = if ctl::dead() { -1 } else { ctl::fd() };
        let mut p = [fd, control].map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 });
        stats::count(Counter::Sleeps);
        // SAFETY: two pollfds, no mask.
        let r = unsafe { sys::ppoll(p.as_mut_ptr(), p.len(), Some(PIECE_NS), core::ptr::null()) };
        wait::heed(&p);
        match r {
            Err(Errno::EINTR) if !wait::restarts(false) => return Some(Err(Errno::EINTR)),
            _ if p[0].revents == 0 => return None,
            _ => {}
        }
    }
    // SAFETY: the addresses in `Peer` are null or the program's, as accept4(2) wants them; only copies and the kernel
    // reach them.
    Some(unsafe { accept_kernel(fd, peer.addr, peer.len, peer.flags) })
}

/// From a listener whose connections nobody took from our queues in time ([`Listener::is_untaken`]): they are before all
/// others. None: there are no more.
///
/// # Safety
/// As [`super::accept`].
#[cold]
pub(super) unsafe fn first(fd: i32, d: &Desc, l: &Listener, peer: Peer) -> Option<Result<i32>> {
    let zone = || zone::of(d);
    let own = zone().and_then(|z| z.take_own(fd, Peer { addr: peer.addr, len: peer.len, flags: peer.flags }));
    let taken = match own {
        None if is_ready(fd) => {
            // SAFETY: the addresses in `Peer` are null or the program's, as accept4(2) wants them; only copies and
            // the kernel reach them.
            Some(unsafe { from_kernel(fd, peer.addr, peer.len, peer.flags) })
        }
        own => own,
    };
    if !is_ready(fd) && !zone().and_then(|z| z.own_fd()).is_some_and(is_ready) {
        l.is_taken_again();
    }
    taken
}

/// # Safety
/// As [`super::accept`].
pub(super) unsafe fn from_kernel(fd: i32, addr: *mut libc::sockaddr, len: *mut u32, flags: i32) -> Result<i32> {
    // SAFETY: `addr` and `len` are null or the program's, as accept4(2) wants them; only copies and the kernel reach
    // them.
    let r = unsafe { accept_kernel(fd, addr, len, flags) };
    if r.is_ok() {
        if let Some(z) = table::lookup(fd).and_then(zone::of) {
            z.returned();
        }
    }
    r
}

/// # Safety
/// As [`super::accept`].
unsafe fn accept_kernel(fd: i32, addr: *mut libc::sockaddr, len: *mut u32, flags: i32) -> Result<i32> {
    let mut own = zone::accept::PeerAddress::new();
    // SAFETY: `addr` and `len` are null or the program's, as accept4(2) wants them; only copies and the kernel reach
    // them.
    let (addr, len) = unsafe { own.or(addr, len) };
    // SAFETY: `addr` and `len` are null or the program's, as accept4(2) wants them; only copies and the kernel reach
    // them.
    let r = unsafe { sys::accept4(fd, addr as *mut u8, len, flags) };
    if let Ok(n) = r {
        stats::kernel_connection(Counter::AcceptKernel, ctl::alive(), || socks::arena().is_some());
        pool::kernel_allocated(n);
        // SAFETY: `addr` and `len` are as the kernel has filled them.
        unsafe { upgrade::accepted(n, addr, len) };
    }
    r
}

pub(super) fn is_ready(fd: i32) -> bool {
    let mut p = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one pollfd.
    matches!(unsafe { sys::ppoll(&mut p, 1, Some(0), core::ptr::null()) }, Ok(1))
}

/// Accept from the kernel without blocking although the socket would.
///
/// # Safety
/// As [`super::accept`].
pub(super) unsafe fn try_accept(fd: i32, addr: *mut libc::sockaddr, len: *mut u32, flags: i32) -> Result<i32> {
    if !is_ready(fd) {
        return Err(Errno::EAGAIN);
    }
    // SAFETY: `addr` and `len` are null or the program's, as accept4(2) wants them; only copies and the kernel reach
    // them.
    // (A rival that takes the connection in between makes this wait in the kernel for the next one, as any
    // blocking accept may.)
    unsafe { from_kernel(fd, addr, len, flags) }
}
