//! Asks the kernel about a socket to which a connection has moved, or that is behind one.

use crate::path;
use crate::table::{self, Desc};
use crate::wait::{self, Deadline, Mask};
use fsocket_abi::arena::Reason;
use fsocket_sys as sys;

/// Is the next byte urgent?
pub(super) fn at_mark(fd: i32) -> bool {
    const SIOCATMARK: usize = 0x8905;
    ioctl(fd, SIOCATMARK) != 0
}

/// Number of unread bytes in a kernel socket.
pub(super) fn in_kernel(fd: i32) -> i32 {
    ioctl(fd, libc::FIONREAD as usize)
}

/// A receive that has some bytes and waits for more goes on in the kernel. There it would wait like
/// a receive without bytes, across urgent data and signals. False: one of these has come, or the
/// time is up.
pub(super) fn something_behind(d: &Desc, fd: i32) -> bool {
    let mut p = libc::pollfd { fd, events: libc::POLLIN | libc::POLLPRI, revents: 0 };
    let deadline = Deadline::of_option(d.sock().receive_timeout());
    wait::in_kernel(core::slice::from_mut(&mut p), deadline, Mask::NONE) == Ok(1) && !at_mark(fd)
}

/// Has a kernel socket an error, and nothing to read?
pub fn has_failed(fd: i32) -> bool {
    let mut p = libc::pollfd { fd, events: 0, revents: 0 };
    // SAFETY: one pollfd.
    let polled = unsafe { sys::ppoll(&mut p, 1, Some(0), core::ptr::null()) };
    polled == Ok(1) && p.revents & libc::POLLERR != 0 && in_kernel(fd) == 0
}

/// A send that has sent something waits for room in the kernel: can it send more? If not, the next call says why.
pub(super) fn room_behind(d: &Desc, fd: i32, block: bool) -> bool {
    let mut p = libc::pollfd { fd, events: libc::POLLOUT, revents: 0 };
    let limit = if block { Deadline::of_option(d.sock().send_timeout()) } else { Deadline::within(Some(0)) };
    wait::in_kernel(core::slice::from_mut(&mut p), limit, Mask::NONE) == Ok(1)
        && p.revents & (libc::POLLERR | libc::POLLHUP) == 0
}

/// Answer of an ioctl that returns an int; 0 if it fails.
fn ioctl(fd: i32, what: usize) -> i32 {
    let mut answer = 0i32;
    // SAFETY: the kernel writes one local int.
    match unsafe { sys::raw(libc::SYS_ioctl, [fd as usize, what, &raw mut answer as usize, 0, 0, 0]) } {
        Ok(_) => answer,
        Err(_) => 0,
    }
}

/// MSG_ZEROCOPY counts for sockets with SO_ZEROCOPY. Its sender waits for the kernel's notice that
/// the buffer is free.
pub fn zerocopy(d: &'static Desc) {
    let mut v = [0u8; 4];
    let on = table::fd_of(d)
        .is_some_and(|fd| sys::getsockopt(fd, libc::SOL_SOCKET, libc::SO_ZEROCOPY, &mut v).is_ok() && v != [0; 4]);
    if on && d.is_conn() {
        path::materialize_one(d, Reason::Option);
    }
}
