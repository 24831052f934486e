//! Makes listen sockets like one that a client shows.

use crate::descriptor;
use crate::maker;
use crate::sockdiag::SockDiag;
use fsocket_reuseport::listener::{self, reuse_port, Shape};
use fsocket_reuseport::reservation::{self, ReuseWindow};
use rustix::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::sockopt;

fn errno(e: fsocket_sys::Errno) -> Errno {
    Errno::from_raw_os_error(e.raw())
}

/// Checks that this is a listening TCP socket. Returns what it is bound to, and its cookie.
pub fn listening(fd: BorrowedFd<'_>) -> Result<(Shape, u64), Errno> {
    if !sockopt::socket_acceptconn(fd)? {
        return Err(Errno::INVAL);
    }
    let shape = Shape::of(fd.as_raw_fd()).map_err(errno)?;
    Ok((shape, sockopt::socket_cookie(fd)?))
}

/// Whether `global` and sockets for which `ours` returns true are the only listeners at this
/// address. The kernel shares connections equally among the listen sockets of one user at an
/// address. A process that was handed one of several sockets has one share of the connections, and
/// must not get more. To be run in [`maker::apart`].
pub fn is_alone(global: BorrowedFd<'_>, ours: impl Fn(u64) -> bool) -> Result<bool, Errno> {
    let info = descriptor::listening(global)?;
    let there = SockDiag::new().and_then(|mut d| d.listeners(&info.addr)).ok_or(Errno::PERM)?;
    Ok(there.into_iter().all(|cookie| cookie == info.cookie || ours(cookie)))
}

/// Makes a socket that belongs to the same user as `global`. To be run in [`maker::apart`].
pub fn clone_as_owner(global: BorrowedFd<'_>, reservation: bool) -> Result<OwnedFd, Errno> {
    let fd = global.as_raw_fd();
    // All sockets of a SO_REUSEPORT group must belong to one user.
    maker::act_as(rustix::fs::fstat(global)?.st_uid)?;
    let shape = Shape::of(fd).map_err(errno)?;
    let window = ReuseWindow::new(&shape).map_err(errno)?;
    if reservation {
        reuse_port(fd, true).map_err(errno)?;
    }
    let made =
        if reservation { reservation::reserve(fd, &shape) } else { listener::like(fd, &shape) }.map_err(errno)?;
    // SAFETY: the call above has just made this descriptor, and nothing else owns it.
    let made = unsafe { OwnedFd::from_raw_fd(made) };
    window.close(&shape).map_err(errno)?;
    if reservation {
        reuse_port(made.as_raw_fd(), false).map_err(errno)?;
    }
    Ok(made)
}
