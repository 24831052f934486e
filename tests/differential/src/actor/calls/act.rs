//! Effects of options: calls whose results depend on an option, in a form that does not depend on
//! chance.

use super::errno;
use crate::shared::{state, Slot};
use fsocket_sys as sys;
use libc::{c_int, c_void};
use std::cell::Cell;
use std::sync::atomic::Ordering::Release;

/// SO_ORIGINAL_DST. IPv4 and IPv6 use the same number.
pub(super) const ORIGINAL_DST: c_int = 80;
/// Up to this many sent bytes count as little. A bound of 32 KiB lets no more through, and a buffer
/// of its usual size takes at least as many.
const LITTLE: usize = 600 << 10;
/// More bytes than any buffer takes.
const ENOUGH: usize = 64 << 20;
/// If nothing arrives for this long, nothing more will arrive.
const QUIET_MS: c_int = 60;

thread_local! {
    static STARTED: Cell<u64> = const { Cell::new(0) };
}

fn dontwait(fd: c_int, bytes: &[u8]) -> isize {
    // SAFETY: the slice is valid for the call.
    unsafe { libc::send(fd, bytes.as_ptr() as *const c_void, bytes.len(), libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) }
}

fn wait(fd: c_int, events: i16, ms: c_int) -> i16 {
    let mut p = libc::pollfd { fd, events, revents: 0 };
    // SAFETY: the call uses one local `pollfd`.
    unsafe { libc::poll(&mut p, 1, ms) };
    p.revents
}

/// Sends while `poll` and `send` report room. Returns 0 if little fitted, 1 if much.
pub(super) fn fill(s: &Slot, fd: c_int) -> i64 {
    let bytes = [b'f'; 8192];
    let mut sent = 0;
    s.state.store(state::SETTLING, Release);
    while sent < ENOUGH && wait(fd, libc::POLLOUT, QUIET_MS) & libc::POLLOUT != 0 {
        let n = dontwait(fd, &bytes);
        match n {
            0.. => sent += n as usize,
            _ if errno() == libc::EAGAIN => {}
            _ => return -1,
        }
    }
    s.state.store(state::BUSY, Release);
    (sent > LITTLE).into()
}

/// Reads all that arrives. Returns 0, 1 at the end of the stream, or -1 and errno.
pub(super) fn drain(fd: c_int) -> i64 {
    let mut bytes = vec![0u8; 1 << 16];
    loop {
        // SAFETY: the slice is valid for the call.
        match unsafe { libc::recv(fd, bytes.as_mut_ptr() as *mut c_void, bytes.len(), libc::MSG_DONTWAIT) } {
            0 => return 1,
            1.. => {}
            _ if errno() != libc::EAGAIN => return -1,
            _ if wait(fd, libc::POLLIN, QUIET_MS) == 0 => return 0,
            _ => {}
        }
    }
}

/// Sends for `ms` milliseconds or until an error. Returns 0 if there was none, else -1 and errno.
pub(super) fn stuck(fd: c_int, ms: i64, in_send: bool) -> i64 {
    let end = sys::now_ns() + ms as u64 * 1_000_000;
    let bytes = [b's'; 8192];
    if in_send {
        let limit = libc::timeval { tv_sec: ms / 1000, tv_usec: ms % 1000 * 1000 };
        let size = size_of::<libc::timeval>() as libc::socklen_t;
        // SAFETY: the call reads `size` bytes of a local timeval.
        unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_SNDTIMEO, (&raw const limit).cast(), size) };
    }
    while sys::now_ns() < end {
        let n = if in_send {
            // SAFETY: the slice is valid for the call.
            unsafe { libc::send(fd, bytes.as_ptr() as *const c_void, bytes.len(), libc::MSG_NOSIGNAL) }
        } else {
            dontwait(fd, &bytes)
        };
        if n >= 0 {
            continue;
        }
        if errno() != libc::EAGAIN {
            return -1;
        }
        let left = end.saturating_sub(sys::now_ns()) / 1_000_000;
        let ready = if in_send { 0 } else { wait(fd, libc::POLLOUT, left.min(10_000) as c_int) };
        if ready & (libc::POLLERR | libc::POLLHUP) != 0 {
            return failed(fd);
        }
    }
    0
}

/// Returns -1 with the socket's pending error in errno, as if a call had failed with it.
fn failed(fd: c_int) -> i64 {
    let mut error = [0u8; 4];
    let mut len = 4;
    // SAFETY: the call writes four local bytes.
    unsafe {
        libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_ERROR, error.as_mut_ptr().cast(), &mut len);
        *libc::__errno_location() = i32::from_ne_bytes(error);
    }
    -1
}

pub(super) fn start_clock() -> i64 {
    STARTED.set(sys::now_ns());
    0
}

pub(super) fn passed(ms: i64) -> i64 {
    (sys::now_ns() - STARTED.get() >= ms.max(0) as u64 * 1_000_000).into()
}

/// Reports the TCP_INFO of a listener: state, number of waiting connections, and their limit.
pub(super) fn queue(s: &Slot, fd: c_int) -> i64 {
    const WAITING: usize = 24;
    let mut info = [0u8; 104];
    let mut len = info.len() as libc::socklen_t;
    // SAFETY: the call writes at most `len` bytes into a local buffer of that length.
    let r = unsafe { libc::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, info.as_mut_ptr().cast(), &mut len) };
    s.put_aux(info[0].into());
    for at in [WAITING, WAITING + 4] {
        s.put_aux(u32::from_ne_bytes([info[at], info[at + 1], info[at + 2], info[at + 3]]).into());
    }
    r.into()
}
