//! `getsockname` and `getpeername` of connections.

use crate::name::give;
use crate::ready;
use crate::table::Desc;
use crate::user;
use fsocket_abi::path_switch::PathState;
use fsocket_sys::{self as sys, Errno, Result};

/// `getsockname` of a connection.
///
/// # Safety
/// As [`give`].
pub unsafe fn local(d: &Desc, out: *mut libc::sockaddr, len: *mut u32) -> Result<()> {
    let (ip, port) = d.sock().local();
    // SAFETY: the program says that `out` and `len` are its memory; `give` copies, and returns EFAULT where nothing is.
    unsafe { give(&ip, port, d.sock().family(), out, len) }
}

/// `getpeername` of a connection; ENOTCONN once it is reset, as in the kernel.
///
/// # Safety
/// As [`give`].
pub unsafe fn peer(d: &Desc, out: *mut libc::sockaddr, len: *mut u32) -> Result<()> {
    if ready::over(d) || is_over_below(d) {
        return Err(Errno::ENOTCONN);
    }
    let (ip, port) = d.sock().peer();
    // SAFETY: the program says that `out` and `len` are its memory; `give` copies, and returns EFAULT where nothing is.
    unsafe { give(&ip, port, d.sock().family(), out, len) }
}

/// The name of a Unix connection's peer, which a receive returns as the sender. If the peer has
/// no name, the address is empty.
///
/// # Safety
/// As [`give`].
pub unsafe fn sender(fd: i32, out: *mut libc::sockaddr, len: *mut u32) -> Result<()> {
    let mut name = [0u8; size_of::<libc::sockaddr_un>()];
    let n = match sys::getpeername(fd, &mut name) {
        Ok(n) if n > size_of::<libc::sa_family_t>() => n,
        _ => 0,
    };
    // SAFETY: the program says that this is its memory; the copy returns EFAULT where no memory
    // is mapped.
    unsafe { user::give(&name[..n.min(name.len())], out.cast(), len, n as u32) }
}

/// Is the kernel's end reset, while bytes that came before the move to the kernel are still
/// unread?
fn is_over_below(d: &Desc) -> bool {
    match d.path_state() {
        PathState::Draining(k) => sys::getpeername(k, &mut [0; 28]).err() == Some(Errno::ENOTCONN),
        _ => false,
    }
}
