//! What the kernel says of a socket to which a connection has gone, or that is behind one.

use crate::asleep::{self, On};
use crate::table::{self, Desc};
use crate::{path, stage};
use fsocket_abi::arena::Reason;
use fsocket_sys as sys;

/// Does urgent data come next?
pub(super) fn at_mark(fd: i32) -> bool {
    const SIOCATMARK: usize = 0x8905;
    ioctl(fd, SIOCATMARK) != 0
}

/// Bytes that a kernel socket has to receive.
pub(super) fn in_kernel(fd: i32) -> i32 {
    ioctl(fd, libc::FIONREAD as usize)
}

/// A receive that has something, and waits for more, goes on in the kernel: there it would wait
/// like one that has nothing, across urgent data and signals. False: that has come, or the time is
/// up.
pub(super) fn something_behind(d: &Desc, fd: i32) -> bool {
    let mut p = libc::pollfd { fd, events: libc::POLLIN | libc::POLLPRI, revents: 0 };
    let limit = Some(d.sock().receive_timeout()).filter(|t| *t != 0);
    // SAFETY: one pollfd.
    let r = asleep::sleep(&On::default(), || unsafe { sys::ppoll(&mut p, 1, limit, core::ptr::null()) });
    r == Ok(1) && !at_mark(fd)
}

/// Has the connection become the kernel's, with an error and nothing to read? That is the next call's.
pub fn has_failed_below(d: &Desc) -> bool {
    let Some(fd) = (!d.is_conn()).then(|| stage::went_to(d)).flatten() else { return false };
    let mut p = libc::pollfd { fd, events: 0, revents: 0 };
    // SAFETY: one pollfd.
    let polled = unsafe { sys::ppoll(&mut p, 1, Some(0), core::ptr::null()) };
    polled == Ok(1) && p.revents & libc::POLLERR != 0 && ioctl(fd, libc::FIONREAD as usize) == 0
}

/// The int that an ioctl answers; 0 if it fails.
fn ioctl(fd: i32, what: usize) -> i32 {
    let mut answer = 0i32;
    // SAFETY: an int for the answer.
    match unsafe { sys::raw(libc::SYS_ioctl, [fd as usize, what, &raw mut answer as usize, 0, 0, 0]) } {
        Ok(_) => answer,
        Err(_) => 0,
    }
}

/// MSG_ZEROCOPY counts for sockets with SO_ZEROCOPY, and who sends so waits for the
/// kernel's word that the buffer is free.
pub fn zerocopy(d: &'static Desc) {
    let mut v = [0u8; 4];
    let on = table::fd_of(d)
        .is_some_and(|fd| sys::getsockopt(fd, libc::SOL_SOCKET, libc::SO_ZEROCOPY, &mut v).is_ok() && v != [0; 4]);
    if on && d.is_conn() {
        path::materialize_one(d, Reason::Option);
    }
}
