//! Options of a Unix connection. The kernel's socket behind the descriptor is one end of the
//! connection, so it stores, checks and returns all options. Only those options have an effect
//! here that limit a wait or the bytes in flight.

use super::extra;
use crate::table::Desc;
use crate::values::{self, size_buffers, size_lowat};
use crate::{conn, ready, user, Cause, Outcome};
use fsocket_sys::{self as sys, Result};

const S: i32 = libc::SOL_SOCKET;

/// From asm-generic/socket.h.
const RCVTIMEO_NEW: i32 = 66;
const SNDTIMEO_NEW: i32 = 67;

/// Options that a Unix socket stores, but that have no effect.
const IDLE: [i32; 12] = [
    libc::SO_DEBUG,
    libc::SO_REUSEADDR,
    libc::SO_DONTROUTE,
    libc::SO_BROADCAST,
    libc::SO_KEEPALIVE,
    libc::SO_OOBINLINE,
    libc::SO_NO_CHECK,
    libc::SO_PRIORITY,
    libc::SO_LINGER,
    libc::SO_REUSEPORT,
    libc::SO_MARK,
    libc::SO_RCVBUF,
];
/// Options that have an effect over shared memory.
const ACT: [i32; 7] = [
    libc::SO_SNDBUF,
    libc::SO_SNDBUFFORCE,
    libc::SO_RCVLOWAT,
    libc::SO_RCVTIMEO,
    libc::SO_SNDTIMEO,
    RCVTIMEO_NEW,
    SNDTIMEO_NEW,
];

/// # Safety
/// The program owns `len` bytes at `val`, or no memory is there.
pub(super) unsafe fn set(
    fd: i32,
    d: &'static Desc,
    level: i32,
    name: i32,
    val: *const u8,
    len: u32,
) -> Outcome<Result<()>> {
    if level != S || IDLE.contains(&name) {
        return Outcome::Kernel(Cause::Below);
    }
    if !ACT.contains(&name) {
        // Most other options change what each message carries, so the connection moves to the
        // kernel. (Unless the peer has closed: then it sends no more.)
        if !ready::state(d).closed {
            extra::leave(d);
        }
        return Outcome::Kernel(Cause::Below);
    }
    let args = [fd as usize, level as usize, name as usize, val as usize, len as usize, 0];
    // SAFETY: the kernel checks the program's addresses.
    if let Err(e) = unsafe { sys::raw(libc::SYS_setsockopt, args) } {
        return Outcome::Done(Err(e));
    }
    learn(fd, d);
    Outcome::Done(Ok(()))
}

/// Reads an option back, because the kernel may have changed the value.
fn learn(fd: i32, d: &'static Desc) {
    values::adopt(fd, d);
    let (s, o) = (d.sock(), d.options());
    s.set_options(o.values());
    s.set_receive_timeout(o.receive_timeout());
    s.set_send_timeout(o.send_timeout());
    size_buffers(d);
    size_lowat(d);
    if ready::wanted(d) {
        s.note_edge();
    }
    conn::wake_own(d);
}

/// # Safety
/// `out` and `len` come from the program; they may be bad.
pub(super) unsafe fn get(d: &'static Desc, level: i32, name: i32, out: *mut u8, len: *mut u32) -> Outcome<Result<()>> {
    // SAFETY: the program says that this is its memory; the copy returns EFAULT where nothing is.
    let room = unsafe { user::get(len) };
    let Some(room) = room.ok().filter(|n| (level, name) == (S, libc::SO_ERROR) && *n as i32 >= 0) else {
        return Outcome::Kernel(Cause::Below);
    };
    let value = ready::take_error(d).to_ne_bytes();
    let n = value.len().min(room as usize);
    // SAFETY: the program says that this is its memory; the copy returns EFAULT where nothing is.
    Outcome::Done(unsafe { user::give(&value[..n], out, len, n as u32) })
}
