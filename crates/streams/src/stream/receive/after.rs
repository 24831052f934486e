//! After bytes are out of the ring: a sender that waits for room, and what the kernel has behind them.

use super::super::below::{at_mark, in_kernel};
use super::super::{left_rings, notify, path_taken, publish_cpu, ring_has, Hold};
use crate::table::Desc;
use core::sync::atomic::Ordering;
use fsocket_abi::channel::Dir;
use fsocket_abi::half::Half;
use fsocket_sys::{self as sys, Errno};

/// Of a receive that has room for what comes beside the bytes: where the path has been switched it returns [`ELSEWHERE`],
/// and the caller asks the kernel for all of it. (What this flag says to the kernel, nothing in a ring needs.)
pub const WITH_CONTROL: i32 = libc::MSG_CMSG_CLOEXEC;
/// See [`WITH_CONTROL`].
pub const ELSEWHERE: Errno = Errno::new(libc::EREMOTE);

/// After a read: wake a sender that sleeps for space, once there is enough.
#[inline(always)]
pub(in crate::stream) fn consumed(d: &'static Desc, rx: &Dir, h: &Half) {
    if !rx.want_space.is_silent() {
        freed(d, rx, h);
    }
    publish_cpu(h, &rx.cons.cpu);
}

/// Somebody sleeps for space, or did lately.
#[cold]
#[inline(never)]
fn freed(d: &'static Desc, rx: &Dir, h: &Half) {
    if rx.want_space.waiting() != 0 && h.pos() >= rx.prod.space_at.load(Ordering::Relaxed) {
        notify(d, &rx.want_space);
    }
}

/// What a receive that has taken the ring's last bytes finds behind them in the
/// kernel, where the path was switched: how many bytes more.
///
/// # Safety
/// `len` bytes at `buf` are the program's; they need not be there.
#[cold]
pub unsafe fn rest(d: &'static Desc, buf: *mut u8, len: usize, flags: i32) -> usize {
    let _hold = Hold::on(d);
    // (What comes behind in a Unix socket may come with descriptors, for which the hook asks the kernel.)
    match behind(d, flags, false).filter(|_| flags & WITH_CONTROL == 0) {
        // A receive ends before urgent data; begun there it would go over them.
        Some(fd) if at_mark(fd) => 0,
        // SAFETY: `len` bytes at `buf` are the program's: only the kernel, and copies that return EFAULT, reach them.
        Some(fd) => unsafe { sys::recv(fd, buf, len, flags | libc::MSG_DONTWAIT) }.unwrap_or(0),
        None => 0,
    }
}

/// The kernel socket in which a receive goes on that has taken the ring's last bytes, if something is there or the receive
/// `waits` for it. (It leaves an error to the next one.)
#[cold]
pub fn behind(d: &'static Desc, flags: i32, waits: bool) -> Option<i32> {
    if !left_rings(d) || ring_has(d) {
        return None;
    }
    path_taken(d, flags)?.ok().filter(|fd| waits || in_kernel(*fd) > 0)
}

/// As [`rest`], for a look ahead: the ring's bytes stay where they are.
///
/// # Safety
/// `len` bytes at `buf` are the program's; they need not be there.
#[cold]
pub(super) unsafe fn peek_rest(d: &'static Desc, buf: *mut u8, len: usize, flags: i32) -> usize {
    let _hold = Hold::on(d);
    match path_taken(d, flags) {
        Some(Ok(fd)) if d.is_conn() && flags & WITH_CONTROL == 0 && in_kernel(fd) > 0 => {
            // SAFETY: `len` bytes at `buf` are the program's: only the kernel, and copies that return EFAULT, reach them.
            unsafe { sys::recv(fd, buf, len, flags | libc::MSG_DONTWAIT) }.unwrap_or(0)
        }
        _ => 0,
    }
}
