//! `accept` from the kernel's queue.

use crate::listen::Listener;
use crate::table::{self, Desc};
use crate::zone::{self, accept::Peer};
use crate::{ctl, pool, socks, stats, upgrade};
use fsocket_abi::arena::Counter;
use fsocket_sys::{self as sys, Errno, Result};

/// Accepts from the kernel first, for a listener whose SYN queues were not emptied in time
/// ([`Listener::is_untaken`]): its waiting connections were moved to the kernel's queue, so they
/// are the oldest. None: there are no more.
#[cold]
pub(super) fn first(fd: i32, d: &Desc, l: &Listener, peer: Peer) -> Option<Result<i32>> {
    let zone = || zone::of(d);
    let taken = match zone().and_then(|z| z.take_own(fd, peer)) {
        None => Some(try_accept(fd, d, l, peer)).filter(|r| *r != Err(Errno::EAGAIN)),
        own => own,
    };
    if !is_ready(fd) && !zone().and_then(|z| z.own_fd()).is_some_and(is_ready) {
        l.is_taken_again();
    }
    taken
}

pub(super) fn from_kernel(fd: i32, peer: Peer) -> Result<i32> {
    let r = accept_kernel(fd, peer);
    if r.is_ok() {
        if let Some(z) = table::lookup(fd).and_then(zone::of) {
            z.returned();
        }
    }
    r
}

fn accept_kernel(fd: i32, peer: Peer) -> Result<i32> {
    let mut own = zone::accept::PeerAddress::new();
    // SAFETY: both are used in this function only.
    let (addr, len) = unsafe { own.or(peer.addr, peer.len) };
    // SAFETY: a buffer of this function, or one of the program as accept4(2) wants it, which only
    // the kernel writes.
    let r = unsafe { sys::accept4(fd, addr as *mut u8, len, peer.flags) };
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

/// Accepts a connection from the kernel without blocking, even if the socket is blocking. EAGAIN:
/// no connection waits, or another thread takes it.
pub(super) fn try_accept(fd: i32, d: &Desc, l: &Listener, peer: Peer) -> Result<i32> {
    if !is_ready(fd) {
        return Err(Errno::EAGAIN);
    }
    let take = || from_kernel(fd, peer);
    match zone::of(d).filter(|z| z.is_shared_by_fork()) {
        _ if zone::listener::is_nonblocking(fd) => take(),
        Some(z) => z.take_if_sure(fd, take),
        // Other threads of this process must not take the connection between look and `accept`.
        None => match l.turn.lock() {
            Ok(_turn) if !is_ready(fd) => Err(Errno::EAGAIN),
            _ => take(),
        },
    }
}

/// As the kernel's `accept`, which may block.
pub(super) fn block(fd: i32, d: &Desc, peer: Peer) -> Option<Result<i32>> {
    match zone::of(d) {
        Some(z) => z.block(|| from_kernel(fd, peer)),
        None => Some(from_kernel(fd, peer)),
    }
}
