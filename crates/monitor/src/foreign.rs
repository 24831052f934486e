//! Descriptors and memory that a client has touched, or shares.
//!
//! A client can send a descriptor of anything, and it can change what it shares: its mode, its options, what waits in
//! it. So nothing here waits, and none of it is closed by the loop unless that is known to be short. ADR 72.

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

/// A signal ends a close that was thought to be short after this time.
const PATIENCE: Duration = Duration::from_micros(200);
/// More bytes than these are not freed by the loop.
const SMALL: u64 = 1 << 20;
/// More connections than these, that wait for `accept`, are not ended by the loop.
const FEW: u32 = 8;

thread_local! {
    static HERE: Arc<Closer> = Arc::default();
    /// How many more this thread may close itself.
    static CREDIT: Cell<u32> = const { Cell::new(0) };
    static WATCHDOG: OnceCell<Option<Watchdog>> = const { OnceCell::new() };
}

/// What closes for this thread.
pub fn closer() -> Arc<Closer> {
    HERE.with(Arc::clone)
}

/// From here on this thread closes so many descriptors itself, where that is short. To be said for each message: the
/// address of a socket that was shown is free when the answer comes.
pub fn may_close(descriptors: u32) {
    CREDIT.set(descriptors);
}

/// A descriptor that came from a client, or that one has or will have. It counts for a user until it is closed.
pub struct ForeignFd {
    fd: Option<OwnedFd>,
    uid: u32,
    is_control: bool,
    /// For so many descriptors.
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

    /// A control socket, of which nobody but the monitor reads.
    pub fn control(mut self) -> ForeignFd {
        self.is_control = true;
        self
    }

    /// From here on something is sent by this control socket. The descriptors in flight there count, too.
    pub fn sends(mut self) -> ForeignFd {
        self.closer.count(self.uid, shares::FLIGHT as i64);
        self.counts += shares::FLIGHT;
        self
    }

    /// The user for whom it counts.
    pub fn uid(&self) -> u32 {
        self.uid
    }

    /// To ask the kernel what it is, and to pass it on. Nothing is read, written or awaited by it.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_ref().expect("taken only when it is dropped").as_fd()
    }

    /// Sends, if there is room now.
    ///
    /// # Errors
    /// Of `send`.
    pub fn send(&self, bytes: &[u8]) -> Result<usize, Errno> {
        rustix::net::send(self.as_fd(), bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)
    }

    /// Receives, if there is something now.
    ///
    /// # Errors
    /// Of `recv`.
    pub fn recv(&self, bytes: &mut [u8]) -> Result<usize, Errno> {
        rustix::net::recv(self.as_fd(), bytes, RecvFlags::DONTWAIT).map(|(n, _)| n)
    }

    /// Ends one direction of a connection, or both.
    pub fn shutdown(&self, how: Shutdown) {
        let _ = rustix::net::shutdown(self.as_fd(), how);
    }

    /// Its end is a reset, if nobody else has it.
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

/// Nothing is in a control socket of this user, and nothing comes any more.
fn is_drained(fd: BorrowedFd<'_>, uid: u32) -> bool {
    let _ = rustix::net::shutdown(fd, Shutdown::Both);
    let Ok(got) = ancillary::receive(fd, &mut [0; 1]) else { return false };
    let is_end = got.is_end();
    CREDIT.set(0);
    got.fds.into_iter().for_each(|fd| drop(ForeignFd::new(fd, uid)));
    is_end
}

/// The owner may have changed an option since the look at it. Then a signal ends the wait.
fn close_watched(fd: OwnedFd) {
    WATCHDOG.with(|dog| {
        let dog = dog.get_or_init(|| Watchdog::every(PATIENCE).ok()).as_ref();
        dog.inspect(|dog| dog.arm());
        drop(fd);
        dog.inspect(|dog| dog.disarm());
    });
}

/// Whether it is a socket or memory of which little is left to be done at its end.
fn closes_at_once(fd: BorrowedFd<'_>) -> bool {
    match rustix::fs::fstat(fd) {
        Ok(st) if FileType::from_raw_mode(st.st_mode) == FileType::Socket => {
            if descriptor::is_unix(fd) {
                // (Nothing unread: nothing that was passed either, unless it comes right now.)
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
            // (A time of zero means a reset, and no wait.)
            matches!(sockopt::socket_linger(fd), Ok(None | Some(Duration::ZERO)))
                && rustix::io::ioctl_fionread(fd).is_ok_and(|n| n <= SMALL)
        }
        Ok(st) => rustix::fs::fcntl_get_seals(fd).is_ok() && st.st_blocks as u64 * 512 <= SMALL,
        Err(_) => false,
    }
}

/// Memory that clients have, too. It is freed where that holds up nobody, if nobody else has it any more.
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

/// So many descriptors that a user may yet have: they count as if there were.
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
