//! One message on a control socket, in or out, never blocking.
//!
//! MSG_DONTWAIT on every call: the file status flags of an adopted socket are
//! shared with whoever sent it.

use crate::ancillary::{self, Got, Sender};
use crate::foreign::ForeignFd;
use fsocket_proto::{Msg, MSG_SIZE};
use rustix::fd::{AsRawFd, BorrowedFd, OwnedFd};
use rustix::io::{Errno, IoSlice};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use std::mem::MaybeUninit;
use zerocopy::{FromBytes, IntoBytes};

/// What a receive brought.
#[derive(Debug)]
pub enum Received<F = OwnedFd> {
    Message(Msg, Option<F>),
    /// The same, but for its descriptor there was no room here: that is no fault of the sender.
    Cut(Msg),
    /// Nothing there now.
    Nothing,
    /// The kernel lacks something, and what there is stays there.
    Later,
    /// The other side is gone.
    End,
    /// Not a message of ours.
    Malformed,
}

/// Receives at most one message, as a client does: what comes is the monitor's.
pub fn receive(fd: BorrowedFd<'_>) -> Received {
    received(fd, |fd| fd).0
}

/// The same, as the monitor does: from a client of this user. And who has sent it if the socket was told to say so.
pub fn receive_from(fd: BorrowedFd<'_>, uid: u32) -> (Received<ForeignFd>, Option<Sender>) {
    received(fd, |fd| ForeignFd::new(fd, uid))
}

/// From linux/socket.h (6.5).
const SO_PASSPIDFD: libc::c_int = 76;

/// Has the kernel say with each message who sends it. Sockets that are accepted from a listening one
/// have it from that.
pub fn ask_for_senders(fd: BorrowedFd<'_>) {
    for option in [libc::SO_PASSCRED, SO_PASSPIDFD] {
        let on: libc::c_int = 1;
        let len = size_of::<libc::c_int>() as libc::socklen_t;
        // SAFETY: an int that lives during the call. An older kernel has no SO_PASSPIDFD.
        unsafe { libc::setsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, option, (&raw const on).cast(), len) };
    }
}

fn received<F>(fd: BorrowedFd<'_>, own: impl FnMut(OwnedFd) -> F) -> (Received<F>, Option<Sender>) {
    let mut bytes = [0u8; MSG_SIZE + 1];
    let Got { length, is_longer, is_cut, fds, sender } = match ancillary::receive(fd, &mut bytes) {
        Ok(got) => got,
        Err(Errno::AGAIN) => return (Received::Nothing, None),
        // CONNRESET: it went without reading everything. Reported once, before what it sent.
        Err(Errno::CONNRESET | Errno::NOMEM | Errno::NOBUFS) => return (Received::Later, None),
        Err(_) => return (Received::End, None),
    };
    let mut fds: Vec<F> = fds.into_iter().map(own).collect();
    if length == 0 {
        return (Received::End, None);
    }
    // (More than one descriptor has come, or the first of more.)
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
/// EAGAIN: the receiver is slow; anything else: it is gone.
pub fn send(fd: BorrowedFd<'_>, msg: &Msg, attach: Option<BorrowedFd<'_>>) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let attach = attach.map(|fd| [fd]);
    if let Some(fds) = &attach {
        control.push(SendAncillaryMessage::ScmRights(fds));
    }
    rustix::io::retry_on_intr(|| {
        rustix::net::sendmsg(
            fd,
            &[IoSlice::new(msg.as_bytes())],
            &mut control,
            SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
        )
    })
    .map(|_| ())
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
        // SAFETY: the child makes system calls only, and ends; its limit is its own.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            // SAFETY: the structure lives during the call.
            unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const none) };
            let cut = matches!(receive(b.as_fd()), Received::Cut(m) if m.is::<request::Rest>());
            let next = matches!(receive(b.as_fd()), Received::Message(m, None) if m.is::<request::Settled>());
            // SAFETY: ends the child, and runs nothing of the parent's.
            unsafe { libc::_exit(i32::from(!cut) | i32::from(!next) << 1) };
        }
        let mut status = 0;
        // SAFETY: waits for our own child.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
    }
}
