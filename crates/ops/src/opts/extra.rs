//! Options beyond the common ones: those that the kernel's placeholder keeps, and
//! those that only a kernel connection can have.

use super::effect::{self, Effect, If};
use crate::table::{self, Desc, Kind};
use crate::{name, path, user, Cause, Outcome};
use fsocket_abi::arena::Reason;
use fsocket_sys::{self as sys, Result};

fn is_mapped(d: &Desc) -> bool {
    name::is_v4(&d.sock().local().0)
}

/// Before the option is set on `d`. `v`: its value, if it is a number.
pub fn before(d: &'static Desc, level: i32, name: i32, v: i32) {
    let moves = match effect::of(level, name) {
        Effect::Moves(when) => holds(d, when, v),
        // A socket that has a path leaves it. (Before, the device is looked at when the socket gets one.)
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

/// Is it a value that moves the connection?
fn holds(d: &Desc, when: If, v: i32) -> bool {
    match when {
        If::Always => true,
        If::NotZero => v != 0,
        If::Positive => v > 0,
        If::NotNegative => v >= 0,
        If::Limited => v != -1,
        If::Listening => v > 0 && d.kind() == Kind::Listener,
        If::Unconnected => v != 0 && d.is_unconnected(),
        // Refused but for a connection of IPv4 through a socket of IPv6.
        If::ToIpv4 => v == libc::AF_INET && d.is_conn() && d.family() == libc::AF_INET6 as u32 && is_mapped(d),
    }
}

/// An option that is not in the table: what the kernel takes is only the kernel's to do.
///
/// # Safety
/// `val` is the program's for `len` bytes.
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
        return set(); // another socket has the number now
    }
    Ok(())
}

/// Does the answer depend on the kernel connection?
pub fn answers_below(level: i32, name: i32) -> bool {
    (level, name) != fsocket_proto::agent::SOCKOPT
        && matches!(effect::of(level, name), Effect::SaysBelow | Effect::Unknown)
}

/// Such an option of a connection. Where the placeholder has an answer, the connection moves, and has another one.
///
/// # Safety
/// `out` and `len` are the program's, or nothing is there.
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
        return Outcome::Done(Ok(())); // nothing, which is right
    }
    leave(d);
    // SAFETY: the program says that this is its memory; the copy returns EFAULT where nothing is.
    match before.and_then(|n| unsafe { user::put(len, n) }) {
        Ok(()) => Outcome::Kernel(Cause::NotOurs),
        Err(e) => Outcome::Done(Err(e)),
    }
}

/// Before a send with `flags`: with MSG_FASTOPEN it connects the socket, or fails as `connect` does. A socket without a path
/// is then the kernel's.
pub fn sends(fd: i32, flags: i32) {
    if flags & libc::MSG_FASTOPEN != 0 {
        if let Some(d) = table::lookup(fd).filter(|d| d.is_unconnected()) {
            fsocket_fdtable::pristine::settle(fd, d);
            leave(d);
        }
    }
}

/// The program wants of this socket what only the kernel's can do.
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
