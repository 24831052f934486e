//! What a connection has in the kernel, behind what its ring still has.

use super::super::answer::guarded;
use super::conn;
use fsocket_abi::path_switch::PathState;
use fsocket_fdtable::table::Desc;
use fsocket_lifecycle::passing;
use fsocket_runtime::{musl, user};
use fsocket_streams::stream;
use fsocket_sys::errno::Saved;
use libc::*;

/// The number of the kernel socket of a connection whose ring still has bytes.
pub fn below(d: &Desc) -> Option<c_int> {
    match d.path_state() {
        PathState::Draining(fd) => Some(fd),
        _ => None,
    }
}

/// Receives from the kernel's socket of a Unix connection, where bytes come with control messages.
#[cold]
pub unsafe fn receive_below(fd: c_int, msg: *mut msghdr, flags: c_int) -> ssize_t {
    let below = conn(fd).and_then(below).unwrap_or(fd);
    let r = real!(recvmsg(below, msg, flags));
    // SAFETY: the kernel has just written there.
    if r >= 0 && unsafe { (*msg).msg_controllen } != 0 {
        came_with(msg, flags);
    }
    r
}

/// Vectors that such a receive fills; if there are more, it is short.
const VECTORS: usize = 8;

/// `n` bytes of the ring are in the buffers of `msg`, whose header was `asked`. The same message goes on in the kernel, with
/// what comes beside its bytes there. Returns the number of all bytes.
#[cold]
#[inline(never)]
pub unsafe fn receive_behind(d: &'static Desc, msg: *mut msghdr, asked: &msghdr, n: ssize_t, flags: c_int) -> ssize_t {
    let asked = musl::header(*asked);
    let mut vectors = [iovec { iov_base: core::ptr::null_mut(), iov_len: 0 }; VECTORS];
    // SAFETY: the program's header.
    let filled = unsafe { rest_of(&asked, n as usize, &mut vectors) };
    // (Without room for what comes beside, the receive has gone on.)
    if asked.msg_controllen == 0 || filled == 0 {
        return n;
    }
    let waits = flags & MSG_WAITALL != 0 && stream::blocks(d, flags);
    let _errno = Saved::errno();
    let from = guarded::<c_int>(|| stream::behind(d, flags, waits).unwrap_or(-1));
    if from < 0 {
        return n;
    }
    let mut more = msghdr { msg_iov: vectors.as_mut_ptr(), msg_iovlen: filled, ..asked };
    let r = real!(recvmsg(from, &raw mut more, if waits { flags } else { flags | MSG_DONTWAIT }));
    if r <= 0 {
        return n;
    }
    // SAFETY: the header is there, as the call has written to it before.
    unsafe {
        let _ = user::put(&raw mut (*msg).msg_namelen, more.msg_namelen);
        let _ = user::put(&raw mut (*msg).msg_flags, more.msg_flags);
        let _ = user::put(&raw mut (*msg).msg_controllen, more.msg_controllen);
    }
    if more.msg_controllen != 0 {
        came_with(msg, flags);
    }
    n + r
}

/// The first buffers of a message behind `n` bytes. Returns their number.
///
/// # Safety
/// `m` has been a header of the program's.
unsafe fn rest_of(m: &msghdr, mut n: usize, to: &mut [iovec; VECTORS]) -> usize {
    let mut filled = 0;
    for i in 0..m.msg_iovlen {
        // SAFETY: any bytes are a vector; where nothing is, the copy says so.
        let Ok(v) = (unsafe { user::get(m.msg_iov.wrapping_add(i)) }) else { break };
        let skip = n.min(v.iov_len);
        n -= skip;
        if v.iov_len > skip && filled < VECTORS {
            let iov_base = v.iov_base.cast::<u8>().wrapping_add(skip).cast();
            to[filled] = iovec { iov_base, iov_len: v.iov_len - skip };
            filled += 1;
        }
    }
    filled
}

/// The kernel has filled `msg`, and its control part.
#[cold]
pub fn came_with(msg: *const msghdr, flags: c_int) {
    let _errno = Saved::errno();
    // SAFETY: the kernel has filled `msg`, and what it points to.
    guarded(|| unsafe { passing::arriving(msg, flags & MSG_PEEK != 0) });
}
