//! Listen sockets like one that a client shows.

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

/// A listening TCP socket: what it is bound to, and its cookie.
pub fn listening(fd: BorrowedFd<'_>) -> Result<(Shape, u64), Errno> {
    if !sockopt::socket_acceptconn(fd)? {
        return Err(Errno::INVAL);
    }
    let shape = Shape::of(fd.as_raw_fd()).map_err(errno)?;
    Ok((shape, sockopt::socket_cookie(fd)?))
}

/// Whether no other socket listens at the address, but for those that are `ours`. Among several of
/// one user the kernel shares connections by their number: somebody who was handed one of them has a
/// share, and must not make it larger. In [`maker::apart`].
pub fn is_alone(global: BorrowedFd<'_>, ours: impl Fn(u64) -> bool) -> Result<bool, Errno> {
    let info = descriptor::listening(global)?;
    let there = SockDiag::new().and_then(|mut d| d.listeners(&info.addr)).ok_or(Errno::PERM)?;
    Ok(there.into_iter().all(|cookie| cookie == info.cookie || ours(cookie)))
}

/// Makes a socket for the user that `global` belongs to. In [`maker::apart`].
pub fn clone_as_owner(global: BorrowedFd<'_>, reservation: bool) -> Result<OwnedFd, Errno> {
    let fd = global.as_raw_fd();
    // The group shares an address only if one user owns all of it.
    maker::act_as(rustix::fs::fstat(global)?.st_uid)?;
    let shape = Shape::of(fd).map_err(errno)?;
    let window = ReuseWindow::new(&shape).map_err(errno)?;
    if reservation {
        reuse_port(fd, true).map_err(errno)?;
    }
    let made =
        if reservation { reservation::reserve(fd, &shape) } else { listener::like(fd, &shape) }.map_err(errno)?;
    // SAFETY: just made, and nobody else's.
    let made = unsafe { OwnedFd::from_raw_fd(made) };
    window.close(&shape).map_err(errno)?;
    if reservation {
        reuse_port(made.as_raw_fd(), false).map_err(errno)?;
    }
    Ok(made)
}
