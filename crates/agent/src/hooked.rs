//! Calls that go through the library: a stand-in is a connection of this program like any other's. (rustix and
//! sockets made by it pass the library by.)

use fsocket_proto::agent::{Place, SOCKOPT};
use rustix::fd::{AsRawFd, BorrowedFd};
use std::io;

fn done(n: isize) -> io::Result<usize> {
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

/// Does not block. `peek`: it stays there.
pub fn recv(fd: BorrowedFd<'_>, to: &mut [u8], peek: bool) -> io::Result<usize> {
    let flags = libc::MSG_DONTWAIT | if peek { libc::MSG_PEEK } else { 0 };
    // SAFETY: pointer and length are those of `to`.
    done(unsafe { libc::recv(fd.as_raw_fd(), to.as_mut_ptr().cast(), to.len(), flags) })
}

/// Does not block.
pub fn send(fd: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<usize> {
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: pointer and length are those of `bytes`.
    done(unsafe { libc::send(fd.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), flags) })
}

pub fn shutdown_write(fd: BorrowedFd<'_>) {
    // SAFETY: no memory is involved.
    unsafe { libc::shutdown(fd.as_raw_fd(), libc::SHUT_WR) };
}

/// The last close sends a reset.
pub fn reset_on_close(fd: BorrowedFd<'_>) {
    let now = libc::linger { l_onoff: 1, l_linger: 0 };
    let len = size_of::<libc::linger>() as libc::socklen_t;
    // SAFETY: a linger that lives during the call.
    unsafe { libc::setsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_LINGER, (&raw const now).cast(), len) };
}

/// `None`: it is not over shared memory.
pub fn place(fd: BorrowedFd<'_>) -> Option<Place> {
    let mut bytes = [0u8; Place::SIZE];
    let mut len = Place::SIZE as libc::socklen_t;
    let (level, name) = SOCKOPT;
    // SAFETY: `bytes` and `len` are valid for writes.
    let rc = unsafe { libc::getsockopt(fd.as_raw_fd(), level, name, bytes.as_mut_ptr().cast(), &raw mut len) };
    (rc == 0 && len as usize == Place::SIZE).then(|| Place::of(&bytes))
}

/// Leaves shared memory: signals for what arrives are the kernel's to send. The peer goes on in its own kernel
/// connection, behind what it has read, and sends again there what this side has not read.
pub fn leave(fd: BorrowedFd<'_>) {
    // SAFETY: no memory is involved.
    unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK | libc::O_ASYNC) };
}

/// An epoll instance by the library, so that connections over shared memory can be in it.
pub struct Poll(std::os::fd::OwnedFd);

impl Poll {
    pub fn new() -> io::Result<Poll> {
        use std::os::fd::FromRawFd;
        // SAFETY: no memory is involved.
        let fd = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just made, and nobody else's.
        Ok(Poll(unsafe { std::os::fd::OwnedFd::from_raw_fd(fd) }))
    }

    /// It goes when the last descriptor is closed.
    pub fn add(&self, fd: BorrowedFd<'_>, events: i32, name: u64) -> io::Result<()> {
        let mut event = libc::epoll_event { events: events as u32, u64: name };
        // SAFETY: an event that lives during the call.
        let rc = unsafe { libc::epoll_ctl(self.0.as_raw_fd(), libc::EPOLL_CTL_ADD, fd.as_raw_fd(), &raw mut event) };
        done(rc as isize).map(drop)
    }

    /// Names and events.
    pub fn wait(&self, ms: i32) -> io::Result<Vec<(u64, u32)>> {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 256];
        // SAFETY: 256 events are there.
        let n = unsafe { libc::epoll_wait(self.0.as_raw_fd(), events.as_mut_ptr(), 256, ms) };
        match done(n as isize) {
            Ok(n) => Ok(events[..n].iter().map(|e| (e.u64, e.events)).collect()),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(Vec::new()),
            Err(e) => Err(e),
        }
    }
}
