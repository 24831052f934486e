//! Sends and receives single messages on control sockets, without blocking.
//!
//! Every call has MSG_DONTWAIT, because the process that passed an adopted socket shares its file
//! status flags and can set it to blocking mode.

use crate::ancillary::{self, Got, Sender};
use crate::foreign::ForeignFd;
use fsocket_proto::{Msg, MSG_SIZE};
use rustix::fd::{AsRawFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::SendFlags;
use zerocopy::{FromBytes, IntoBytes};

/// The result of a receive.
#[derive(Debug)]
pub enum Received<F = OwnedFd> {
    Message(Msg, Option<F>),
    /// A message whose descriptor was lost because this process had no room for it. This is no
    /// fault of the sender.
    Cut(Msg),
    /// No message is there now.
    Nothing,
    /// No message could be received now, for lack of memory or after a reset. Waiting messages
    /// stay in the socket.
    Later,
    /// The other side has closed its end.
    End,
    /// Not a valid message.
    Malformed,
}

/// Receives at most one message, as a client does. The caller owns the descriptor.
pub fn receive(fd: BorrowedFd<'_>) -> Received {
    received(fd, |fd| fd).0
}

/// Receives at most one message from a client of this user, as the monitor does. Also returns the
/// sender, if the socket was set to tell it.
pub fn receive_from(fd: BorrowedFd<'_>, uid: u32) -> (Received<ForeignFd>, Option<Sender>) {
    received(fd, |fd| ForeignFd::new(fd, uid))
}

/// From linux/socket.h (6.5).
const SO_PASSPIDFD: libc::c_int = 76;

/// Makes the kernel tell the sender of each message. Sockets accepted from a listening socket
/// inherit this setting.
pub fn ask_for_senders(fd: BorrowedFd<'_>) {
    for option in [libc::SO_PASSCRED, SO_PASSPIDFD] {
        let on: libc::c_int = 1;
        let len = size_of::<libc::c_int>() as libc::socklen_t;
        // SAFETY: the option is an int that lives during the call. (An older kernel fails for
        // SO_PASSPIDFD.)
        unsafe { libc::setsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, option, (&raw const on).cast(), len) };
    }
}

fn received<F>(fd: BorrowedFd<'_>, own: impl FnMut(OwnedFd) -> F) -> (Received<F>, Option<Sender>) {
    let mut bytes = [0u8; MSG_SIZE + 1];
    let Got { length, is_longer, is_cut, fds, sender } = match ancillary::receive(fd, &mut bytes) {
        Ok(got) => got,
        Err(Errno::AGAIN) => return (Received::Nothing, None),
        // CONNRESET: the other side closed its end without reading everything. The kernel reports
        // this once, before the other side's messages.
        Err(Errno::CONNRESET | Errno::NOMEM | Errno::NOBUFS) => return (Received::Later, None),
        Err(_) => return (Received::End, None),
    };
    let mut fds: Vec<F> = fds.into_iter().map(own).collect();
    if length == 0 {
        return (Received::End, None);
    }
    // (True if more than one descriptor has come, or one of several that did not all fit.)
    let too_many = fds.len() > 1 || is_cut && !fds.is_empty();
    if length != MSG_SIZE || is_longer || too_many {
        return (Received::Malformed, None);
    }
    match Msg::read_from_bytes(&bytes[..MSG_SIZE]) {
        Ok(msg) if msg.is_of_our_version() && is_cut => (Received::Cut(msg), sender),
        Ok(msg) if msg.is_of_our_version() => (Received::Message(msg, fds.pop()), sender),
        _ => (Received::Malformed, None),
    }
}

/// Sends one message with at most one descriptor.
///
/// # Errors
/// EAGAIN: the receiver reads too slowly. Other errors: it has closed its end.
pub fn send(fd: BorrowedFd<'_>, msg: &Msg, attach: Option<BorrowedFd<'_>>) -> Result<(), Errno> {
    ancillary::send(fd, msg.as_bytes(), attach.as_slice(), SendFlags::DONTWAIT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use fsocket_proto::request;
    use rustix::net::{AddressFamily, SocketFlags, SocketType};
    use std::os::fd::AsFd;

    #[test]
    fn a_message_for_whose_descriptor_there_is_no_room_is_no_fault() {
        let (a, b) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let null = std::fs::File::open("/dev/null").unwrap();
        let (first, second) = (request::Rest { channel: 7 }, request::Settled {});
        send(a.as_fd(), &first.into(), Some(null.as_fd())).unwrap();
        send(a.as_fd(), &second.into(), None).unwrap();
        // SAFETY: the child makes only system calls, then ends. The child's limit does not concern
        // this process.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            // SAFETY: the structure lives during the call.
            unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const none) };
            let cut = matches!(receive(b.as_fd()), Received::Cut(m) if m.is::<request::Rest>());
            let next = matches!(receive(b.as_fd()), Received::Message(m, None) if m.is::<request::Settled>());
            // SAFETY: this ends the child at once, without running other code of this program.
            unsafe { libc::_exit(i32::from(!cut) | i32::from(!next) << 1) };
        }
        let mut status = 0;
        // SAFETY: waits for this process's own child, and writes its status into a local variable.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
    }
}
