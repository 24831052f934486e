//! Calls that pass through the library, so that a stand-in is a connection like any program's.
//! (Calls by rustix, and sockets made by it, bypass the library.)

use fsocket_proto::agent::{Place, SOCKOPT};
use rustix::fd::{AsRawFd, BorrowedFd};
use std::io;

fn done(n: isize) -> io::Result<usize> {
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

/// Receives without blocking. `peek`: the bytes stay in the socket.
pub fn recv(fd: BorrowedFd<'_>, to: &mut [u8], peek: bool) -> io::Result<usize> {
    let flags = libc::MSG_DONTWAIT | if peek { libc::MSG_PEEK } else { 0 };
    // SAFETY: pointer and length describe `to`, which is live.
    done(unsafe { libc::recv(fd.as_raw_fd(), to.as_mut_ptr().cast(), to.len(), flags) })
}

/// Sends without blocking.
pub fn send(fd: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<usize> {
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: pointer and length describe `bytes`, which is live.
    done(unsafe { libc::send(fd.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), flags) })
}

pub fn shutdown_write(fd: BorrowedFd<'_>) {
    // SAFETY: `shutdown` takes no pointers.
    unsafe { libc::shutdown(fd.as_raw_fd(), libc::SHUT_WR) };
}

/// Makes the last close send a reset.
pub fn reset_on_close(fd: BorrowedFd<'_>) {
    let now = libc::linger { l_onoff: 1, l_linger: 0 };
    let len = size_of::<libc::linger>() as libc::socklen_t;
    // SAFETY: `now` is live during the call, and `len` is its size.
    unsafe { libc::setsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_LINGER, (&raw const now).cast(), len) };
}

/// Where the connection is in shared memory. `None`: it uses the kernel.
pub fn place(fd: BorrowedFd<'_>) -> Option<Place> {
    let mut bytes = [0u8; Place::SIZE];
    let mut len = Place::SIZE as libc::socklen_t;
    let (level, name) = SOCKOPT;
    // SAFETY: `bytes` and `len` are live, and `len` is the size of `bytes`.
    let rc = unsafe { libc::getsockopt(fd.as_raw_fd(), level, name, bytes.as_mut_ptr().cast(), &raw mut len) };
    (rc == 0 && len as usize == Place::SIZE).then(|| Place::of(&bytes))
}

/// Moves the connection to the kernel, by setting O_ASYNC: only the kernel can send signals for
/// arriving bytes. The peer continues on its own kernel connection, from the point to which it has
/// read. The peer sends again the bytes that this side has not read.
pub fn leave(fd: BorrowedFd<'_>) {
    // SAFETY: `fcntl` takes no pointers here.
    unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK | libc::O_ASYNC) };
}

/// An epoll instance made through the library, which may therefore contain connections over shared
/// memory.
pub struct Poll(std::os::fd::OwnedFd);

impl Poll {
    pub fn new() -> io::Result<Poll> {
        use std::os::fd::FromRawFd;
        // SAFETY: `epoll_create1` takes no pointers.
        let fd = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the call has just made the descriptor, so it has no other owner.
        Ok(Poll(unsafe { std::os::fd::OwnedFd::from_raw_fd(fd) }))
    }

    /// Adds a descriptor. Its entry disappears when the last copy of the descriptor is closed.
    pub fn add(&self, fd: BorrowedFd<'_>, events: i32, name: u64) -> io::Result<()> {
        let mut event = libc::epoll_event { events: events as u32, u64: name };
        // SAFETY: `event` is live during the call.
        let rc = unsafe { libc::epoll_ctl(self.0.as_raw_fd(), libc::EPOLL_CTL_ADD, fd.as_raw_fd(), &raw mut event) };
        done(rc as isize).map(drop)
    }

    /// The names and events of ready descriptors.
    pub fn wait(&self, ms: i32) -> io::Result<Vec<(u64, u32)>> {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 256];
        // SAFETY: `events` has room for 256 events.
        let n = unsafe { libc::epoll_wait(self.0.as_raw_fd(), events.as_mut_ptr(), 256, ms) };
        match done(n as isize) {
            Ok(n) => Ok(events[..n].iter().map(|e| (e.u64, e.events)).collect()),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(Vec::new()),
            Err(e) => Err(e),
        }
    }
}
