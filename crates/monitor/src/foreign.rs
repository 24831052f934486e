//! Descriptors and memory that a client has touched, or shares with the monitor.
//!
//! A client can send a descriptor of any file. It can change the mode and the options of what it
//! shares, and the data that wait in it. So no function here waits. The event loop closes such an
//! object itself only if that is known to be short. ADR 72.

use crate::ancillary;
use crate::closer::{lane_of, Closer, Lane, Remains};
use crate::memory::Mapping;
use crate::watchdog::Watchdog;
use crate::{descriptor, shares};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::FileType;
use rustix::io::Errno;
use rustix::net::{sockopt, RecvFlags, SendFlags, Shutdown, SocketType};
use std::cell::{Cell, OnceCell};
use std::sync::Arc;
use std::time::Duration;

/// A close that was expected to be short is interrupted by a signal after this time.
const PATIENCE: Duration = Duration::from_micros(200);
/// The event loop does not free an object with more bytes than this.
const SMALL: u64 = 1 << 20;
/// The event loop does not close a listener with more connections than this in its accept queue.
const FEW: u32 = 8;

thread_local! {
    static HERE: Arc<Closer> = Arc::default();
    /// How many more descriptors this thread may close itself.
    static CREDIT: Cell<u32> = const { Cell::new(0) };
    static WATCHDOG: OnceCell<Option<Watchdog>> = const { OnceCell::new() };
}

/// The closer of this thread.
pub fn closer() -> Arc<Closer> {
    HERE.with(Arc::clone)
}

/// From here on this thread may close this many descriptors itself, where that is short. The event
/// loop calls this for each message: when the answer to a message arrives, the address of a socket
/// that came with it should be free.
pub fn may_close(descriptors: u32) {
    CREDIT.set(descriptors);
}

/// A descriptor that came from a client, or that a client has or will get. It counts for a user
/// until it is closed.
pub struct ForeignFd {
    fd: Option<OwnedFd>,
    uid: u32,
    is_control: bool,
    /// How many descriptors it counts as.
    counts: u64,
    closer: Arc<Closer>,
}

impl std::fmt::Debug for ForeignFd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} of {}", self.fd, self.uid)
    }
}

impl ForeignFd {
    pub fn new(fd: OwnedFd, uid: u32) -> ForeignFd {
        let closer = closer();
        closer.count(uid, 1);
        ForeignFd { fd: Some(fd), uid, is_control: false, counts: 1, closer }
    }

    /// Marks a control socket, from which only the monitor reads.
    pub fn control(mut self) -> ForeignFd {
        self.is_control = true;
        self
    }

    /// From here on the monitor sends over this control socket. Descriptors in flight in it count
    /// for the user, too.
    pub fn sends(mut self) -> ForeignFd {
        self.closer.count(self.uid, shares::FLIGHT as i64);
        self.counts += shares::FLIGHT;
        self
    }

    /// The user in whose share the descriptor counts.
    pub fn uid(&self) -> u32 {
        self.uid
    }

    /// For questions to the kernel about the descriptor, and to pass it on. Callers must not read,
    /// write or wait with it.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_ref().expect("taken only when it is dropped").as_fd()
    }

    /// Sends, if the socket has room now.
    ///
    /// # Errors
    /// Those of `send`.
    pub fn send(&self, bytes: &[u8]) -> Result<usize, Errno> {
        rustix::net::send(self.as_fd(), bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)
    }

    /// Receives, if there is something to receive now.
    ///
    /// # Errors
    /// Those of `recv`.
    pub fn recv(&self, bytes: &mut [u8]) -> Result<usize, Errno> {
        rustix::net::recv(self.as_fd(), bytes, RecvFlags::DONTWAIT).map(|(n, _)| n)
    }

    /// Shuts down one direction of a connection, or both.
    pub fn shutdown(&self, how: Shutdown) {
        let _ = rustix::net::shutdown(self.as_fd(), how);
    }

    /// Makes the last close of this socket reset the connection.
    pub fn reset_on_close(&self) {
        let linger: [i32; 2] = [1, 0];
        let value = linger.map(i32::to_ne_bytes).concat();
        let _ = descriptor::set(self.as_fd(), libc::SOL_SOCKET, libc::SO_LINGER, &value);
    }
}

impl Drop for ForeignFd {
    fn drop(&mut self) {
        let Some(fd) = self.fd.take() else { return };
        let credit = CREDIT.get();
        if self.is_control {
            if credit > 0 && is_drained(fd.as_fd(), self.uid) && descriptor::is_received(fd.as_fd()) {
                drop(fd);
                return self.closer.count(self.uid, -(self.counts as i64));
            }
            return self.closer.put(Lane::Socket, self.uid, Remains::Control(fd, self.counts));
        }
        if credit > 0 && closes_at_once(fd.as_fd()) {
            CREDIT.set(credit - 1);
            close_watched(fd);
            return self.closer.count(self.uid, -1);
        }
        self.closer.put(lane_of(fd.as_fd()), self.uid, Remains::Fd(fd));
    }
}

/// Whether a control socket of this user has no unread message. From here on nobody can send to
/// it.
fn is_drained(fd: BorrowedFd<'_>, uid: u32) -> bool {
    let _ = rustix::net::shutdown(fd, Shutdown::Both);
    let Ok(got) = ancillary::receive(fd, &mut [0; 1]) else { return false };
    let is_end = got.is_end();
    CREDIT.set(0);
    got.fds.into_iter().for_each(|fd| drop(ForeignFd::new(fd, uid)));
    is_end
}

/// Closes a descriptor that should close at once. If its owner has changed an option since the
/// check, a signal ends the wait.
fn close_watched(fd: OwnedFd) {
    WATCHDOG.with(|dog| {
        let dog = dog.get_or_init(|| Watchdog::every(PATIENCE).ok()).as_ref();
        dog.inspect(|dog| dog.arm());
        drop(fd);
        dog.inspect(|dog| dog.disarm());
    });
}

/// Whether this is a socket or a memfd that closes quickly.
fn closes_at_once(fd: BorrowedFd<'_>) -> bool {
    match rustix::fs::fstat(fd) {
        Ok(st) if FileType::from_raw_mode(st.st_mode) == FileType::Socket => {
            if descriptor::is_unix(fd) {
                // (Without unread data there are no unreceived descriptors either, unless some
                // arrive right now.)
                return sockopt::socket_type(fd) == Ok(SocketType::STREAM)
                    && sockopt::socket_acceptconn(fd) == Ok(false)
                    && rustix::io::ioctl_fionread(fd) == Ok(0);
            }
            if !descriptor::is_tcp(fd) {
                return false;
            }
            if sockopt::socket_acceptconn(fd) == Ok(true) {
                return descriptor::backlog(fd).is_ok_and(|n| n <= FEW);
            }
            // (A linger time of zero means a reset, without a wait.)
            matches!(sockopt::socket_linger(fd), Ok(None | Some(Duration::ZERO)))
                && rustix::io::ioctl_fionread(fd).is_ok_and(|n| n <= SMALL)
        }
        Ok(st) => rustix::fs::fcntl_get_seals(fd).is_ok() && st.st_blocks as u64 * 512 <= SMALL,
        Err(_) => false,
    }
}

/// Memory that clients map, too. A thread of the closer unmaps it: if nobody else has the memory,
/// the kernel then frees it, which takes time.
pub struct ForeignMap {
    map: Option<Mapping>,
    uid: u32,
    closer: Arc<Closer>,
}

impl ForeignMap {
    pub fn new(map: Mapping, uid: u32) -> ForeignMap {
        let closer = closer();
        closer.count(uid, 1);
        ForeignMap { map: Some(map), uid, closer }
    }
}

impl std::ops::Deref for ForeignMap {
    type Target = Mapping;
    fn deref(&self) -> &Mapping {
        self.map.as_ref().expect("taken only when it is dropped")
    }
}

impl Drop for ForeignMap {
    fn drop(&mut self) {
        if let Some(map) = self.map.take() {
            self.closer.put(Lane::Memory, self.uid, Remains::Memory(map));
        }
    }
}

/// Descriptors that a user may still get. They count as if they existed.
pub struct Reserved {
    uid: u32,
    number: u64,
    closer: Arc<Closer>,
}

impl Reserved {
    pub fn new(uid: u32, number: u64) -> Reserved {
        let closer = closer();
        closer.count(uid, number as i64);
        Reserved { uid, number, closer }
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.closer.count(self.uid, -(self.number as i64));
    }
}
