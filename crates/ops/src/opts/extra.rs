//! Options beyond the common ones: the placeholder keeps some of them, others move the connection
//! to the kernel.

use super::effect::{self, Effect, If};
use crate::table::{self, Desc, Kind};
use crate::{name, path, user, Cause, Outcome};
use fsocket_abi::arena::Reason;
use fsocket_sys::{self as sys, Result};

fn is_mapped(d: &Desc) -> bool {
    name::is_v4(&d.sock().local().0)
}

/// Called before the option is set on `d`. `v`: its value, if it is a number.
pub fn before(d: &'static Desc, level: i32, name: i32, v: i32) {
    let moves = match effect::of(level, name) {
        Effect::Moves(when) => holds(d, when, v),
        // A connection or listener over shared memory moves to the kernel. (A socket without a
        // path stays: the device is checked when the socket gets a path.)
        Effect::Policy => is_device(level, name) && (d.is_conn() || d.kind() == Kind::Listener),
        _ => false,
    };
    if moves {
        leave(d);
    }
}

fn is_device(level: i32, name: i32) -> bool {
    level == libc::SOL_SOCKET && matches!(name, libc::SO_BINDTODEVICE | libc::SO_BINDTOIFINDEX)
}

/// Does this value move the connection?
fn holds(d: &Desc, when: If, v: i32) -> bool {
    match when {
        If::Always => true,
        If::NotZero => v != 0,
        If::Positive => v > 0,
        If::NotNegative => v >= 0,
        If::Limited => v != -1,
        If::Listening => v > 0 && d.kind() == Kind::Listener,
        If::Unconnected => v != 0 && d.is_unconnected(),
        // The kernel refuses other values, and this one except on an IPv4 connection through an
        // IPv6 socket.
        If::ToIpv4 => v == libc::AF_INET && d.is_conn() && d.family() == libc::AF_INET6 as u32 && is_mapped(d),
    }
}

/// Sets an option that is not in the table. If the kernel accepts the option,
/// only the kernel can implement it.
///
/// # Safety
/// `val` points to `len` bytes, as the program passed it.
pub unsafe fn set_unknown(
    fd: i32,
    d: &'static Desc,
    (level, name): (i32, i32),
    val: *const u8,
    len: u32,
) -> Result<()> {
    let set = || {
        let args = [fd as usize, level as usize, name as usize, val as usize, len as usize, 0];
        // SAFETY: the kernel checks the program's addresses.
        unsafe { sys::raw(libc::SYS_setsockopt, args) }.map(drop)
    };
    set()?;
    d.placeholder().mark_changed();
    let conn = d.is_conn();
    leave(d);
    if conn {
        return set(); // the descriptor refers to another socket now
    }
    Ok(())
}

/// Does the answer depend on the kernel connection?
pub fn answers_below(level: i32, name: i32) -> bool {
    (level, name) != fsocket_proto::agent::SOCKOPT
        && matches!(effect::of(level, name), Effect::SaysBelow | Effect::Unknown)
}

/// Reads such an option of a connection. If the placeholder has an answer, the connection moves
/// to the kernel, where the answer may be another one.
///
/// # Safety
/// `out` and `len` come from the program; they may be bad.
pub unsafe fn get_below(
    fd: i32,
    d: &'static Desc,
    (level, name): (i32, i32),
    out: *mut u8,
    len: *mut u32,
) -> Outcome<Result<()>> {
    // SAFETY: the program says that this is its memory; the copy returns EFAULT where nothing is.
    let before = unsafe { user::get(len) };
    let args = [fd as usize, level as usize, name as usize, out as usize, len as usize, 0];
    // SAFETY: the kernel checks the program's addresses.
    if let Err(e) = unsafe { sys::raw(libc::SYS_getsockopt, args) } {
        return Outcome::Done(Err(e));
    }
    // SAFETY: the program says that this is its memory; the copy returns EFAULT where nothing is.
    if unsafe { user::get(len) } == Ok(0) {
        return Outcome::Done(Ok(())); // an empty answer is right
    }
    leave(d);
    // SAFETY: the program says that this is its memory; the copy returns EFAULT where nothing is.
    match before.and_then(|n| unsafe { user::put(len, n) }) {
        Ok(()) => Outcome::Kernel(Cause::NotOurs),
        Err(e) => Outcome::Done(Err(e)),
    }
}

/// Called before a send with `flags`. MSG_FASTOPEN connects the socket, or fails as `connect`
/// does, so a socket without a path stays with the kernel.
pub fn sends(fd: i32, flags: i32) {
    if flags & libc::MSG_FASTOPEN != 0 {
        if let Some(d) = table::lookup(fd).filter(|d| d.is_unconnected()) {
            fsocket_fdtable::pristine::settle(fd, d);
            leave(d);
        }
    }
}

/// Moves the socket to the kernel, because the program wants something that only a kernel socket
/// can do.
pub fn leave(d: &'static Desc) {
    match d.kind() {
        Kind::Shm => {
            path::materialize_one(d, Reason::Option);
        }
        Kind::Listener => path::abandon(d, Reason::Option),
        Kind::Kernel => crate::upgrade::give_up(d),
        Kind::Fresh | Kind::Bound => d.unconnected().leave_to_kernel(),
        _ => {}
    }
}
