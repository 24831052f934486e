//! `accept` from the kernel's queue.

use crate::listen::Listener;
use crate::table::{self, Desc};
use crate::zone::{self, accept::Peer};
use crate::{ctl, pool, socks, stats, upgrade};
use fsocket_abi::arena::Counter;
use fsocket_sys::{self as sys, Errno, Result};

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
        count();
        pool::kernel_allocated(n);
        // SAFETY: `addr` and `len` are as the kernel has filled them.
        unsafe { upgrade::accepted(n, addr, len) };
    }
    r
}

/// A connection was accepted over kernel TCP.
pub(super) fn count() {
    stats::kernel_connection(Counter::AcceptKernel, ctl::alive(), || socks::arena().is_some());
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
