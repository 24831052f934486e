//! Asks the kernel about a Unix connection that may move.

use fsocket_proto::Addr;
use fsocket_sys as sys;

/// From asm-generic/socket.h.
const SO_PASSSEC: i32 = 34;
const SO_PEEK_OFF: i32 = 42;
const SO_PASSPIDFD: i32 = 76;

/// A number in the form of an address that stands for the peer: a hash of its name. (Clients with
/// the same hash are usually connected to the same server; the monitor identifies the connection
/// itself.)
pub(super) fn peer_of(fd: i32) -> Addr {
    let mut name = [0u8; 112];
    let n = sys::getpeername(fd, &mut name).map_or(0, |n| n.min(name.len()));
    let mix = |k: u64, b: &u8| (k ^ u64::from(*b)).wrapping_mul(0x0100_0000_01b3);
    let hash = name[..n].iter().fold(0xcbf2_9ce4_8422_2325, mix);
    let mut ip = [0; 16];
    ip[..8].copy_from_slice(&hash.to_ne_bytes());
    Addr { ip, family: libc::AF_UNIX as u16, ..Addr::default() }
}

/// Is the connection at rest: nothing to read at either end, open both ways, and no option that needs the kernel?
/// (The peer checks, too, and would find bytes that come after this check.)
pub(super) fn at_rest(fd: i32) -> bool {
    let zero = |name| matches!(int(fd, name), None | Some(0));
    let usual = [libc::SO_PASSCRED, SO_PASSSEC, SO_PASSPIDFD, libc::SO_TIMESTAMP, libc::SO_TIMESTAMPNS].map(zero);
    usual == [true; 5] && int(fd, SO_PEEK_OFF).is_none_or(|at| at < 0) && is_empty(fd)
}

/// Does nothing wait to be read at either end, and are both directions open? After [`at_rest`]
/// this check is enough if no calls were made since.
pub(super) fn is_empty(fd: i32) -> bool {
    let none = |request: u64| {
        let mut n = -1i32;
        let args = [fd as usize, request as usize, &raw mut n as usize, 0, 0, 0];
        // SAFETY: the kernel writes an int.
        unsafe { sys::raw(libc::SYS_ioctl, args) }.is_ok() && n == 0
    };
    // (TIOCOUTQ: memory of the bytes that the peer has not read.)
    is_quiet(fd) && none(libc::FIONREAD) && none(libc::TIOCOUTQ)
}

/// Has the other end sent no unread bytes, and not closed or shut down?
pub(super) fn is_quiet(fd: i32) -> bool {
    let mut p = libc::pollfd { fd, events: libc::POLLIN | libc::POLLRDHUP, revents: 0 };
    // SAFETY: one pollfd.
    let events = unsafe { sys::ppoll(&mut p, 1, Some(0), core::ptr::null()) };
    events == Ok(0)
}

/// Is `fd` a Unix stream socket that neither listens nor is connected?
pub(super) fn is_unconnected(fd: i32) -> bool {
    let is = |name, value| int(fd, name) == Some(value);
    is(libc::SO_DOMAIN, libc::AF_UNIX)
        && is(libc::SO_TYPE, libc::SOCK_STREAM)
        && is(libc::SO_ACCEPTCONN, 0)
        && sys::getpeername(fd, &mut [0; 112]).is_err()
}

pub(super) fn int(fd: i32, name: i32) -> Option<i32> {
    let mut v = [0u8; 4];
    sys::getsockopt(fd, libc::SOL_SOCKET, name, &mut v).ok().map(|_| i32::from_ne_bytes(v))
}
