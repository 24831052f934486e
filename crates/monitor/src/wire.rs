//! One message on a control socket, in or out, never blocking.
//!
//! MSG_DONTWAIT on every call: the file status flags of an adopted socket are
//! shared with whoever sent it.

use crate::descriptor::Attached;
use fsocket_proto::{Msg, MSG_SIZE, VERSION};
use rustix::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use rustix::io::{Errno, IoSlice};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use std::mem::MaybeUninit;
use zerocopy::{FromBytes, IntoBytes};

/// What a receive brought.
#[derive(Debug)]
pub enum Received {
    Message(Msg, Option<Attached>),
    /// The same, but for its descriptor there was no room here: that is no fault of the sender.
    Cut(Msg),
    /// Nothing there now.
    Nothing,
    /// The other side is gone.
    End,
    /// Not a message of ours.
    Malformed,
}

/// The sender of a message, as the kernel has noted it (SCM_CREDENTIALS, SCM_PIDFD). It is the process
/// that sends now, not the one that has opened the socket, and nothing of it is a claim.
#[derive(Debug, Default)]
pub struct Sender {
    /// 0: it has none in our PID namespace.
    pub pid: u32,
    pub uid: u32,
    pub gid: u32,
    /// From 6.5 on. Without it a process could end and another one get its number while we read.
    pub pidfd: Option<OwnedFd>,
}

/// Receives at most one message.
pub fn receive(fd: BorrowedFd<'_>) -> Received {
    receive_from(fd).0
}

/// From linux/socket.h (6.5).
const SO_PASSPIDFD: libc::c_int = 76;
const SCM_PIDFD: libc::c_int = 4;

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

/// Room for two descriptors (a message has one, one too many is seen), the credentials and the pidfd.
#[repr(C, align(8))]
struct Control([u8; 128]);

/// The same, and who has sent it if the socket was told to say so.
pub fn receive_from(fd: BorrowedFd<'_>) -> (Received, Option<Sender>) {
    let mut bytes = [0u8; MSG_SIZE + 1];
    let mut control = Control([0; 128]);
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    // SAFETY: plain C data for which zero is valid.
    let mut head: libc::msghdr = unsafe { std::mem::zeroed() };
    head.msg_iov = &raw mut part;
    head.msg_iovlen = 1;
    head.msg_control = (&raw mut control).cast();
    head.msg_controllen = size_of::<Control>();
    let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
    let got = rustix::io::retry_on_intr(|| {
        // SAFETY: all that `head` points to lives here and is as long as said.
        let n = unsafe { libc::recvmsg(fd.as_raw_fd(), &raw mut head, flags) };
        usize::try_from(n)
            .map_err(|_| Errno::from_raw_os_error(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)))
    });
    let got = match got {
        Ok(got) => got,
        // CONNRESET: it went without reading everything. Reported once, before
        // what it sent; level-triggered readiness brings us back.
        // NOMEM, NOBUFS: the message is still there.
        Err(Errno::AGAIN | Errno::CONNRESET | Errno::NOMEM | Errno::NOBUFS) => return (Received::Nothing, None),
        Err(_) => return (Received::End, None),
    };
    let (mut fds, sender) = ancillary(&head);
    if got == 0 {
        return (Received::End, None);
    }
    let is_cut = head.msg_flags & libc::MSG_CTRUNC != 0;
    // (More than one descriptor has come, or the first of more.)
    let too_many = fds.len() > 1 || is_cut && !fds.is_empty();
    if got != MSG_SIZE || head.msg_flags & libc::MSG_TRUNC != 0 || too_many {
        return (Received::Malformed, None);
    }
    match Msg::read_from_bytes(&bytes[..MSG_SIZE]) {
        Ok(msg) if msg.version == VERSION && is_cut => (Received::Cut(msg), sender),
        Ok(msg) if msg.version == VERSION => (Received::Message(msg, fds.pop()), sender),
        _ => (Received::Malformed, None),
    }
}

/// What came along: all descriptors become ours, so that none stays open.
fn ancillary(head: &libc::msghdr) -> (Vec<Attached>, Option<Sender>) {
    let (mut fds, mut cred, mut pidfd) = (Vec::new(), None, None);
    // SAFETY: `head` is as recvmsg has left it, its control data still there.
    let mut next = unsafe { libc::CMSG_FIRSTHDR(head) };
    while !next.is_null() {
        // SAFETY: a header within the control data, as CMSG_FIRSTHDR and CMSG_NXTHDR say; the data
        // behind it is `len` bytes long, and what is read of it is within. A descriptor in
        // SCM_RIGHTS, and one in SCM_PIDFD that is no error, is new and nobody else's.
        unsafe {
            let c = &*next;
            let data = libc::CMSG_DATA(next);
            let len = c.cmsg_len.saturating_sub(libc::CMSG_LEN(0) as usize);
            match (c.cmsg_level, c.cmsg_type) {
                (libc::SOL_SOCKET, libc::SCM_RIGHTS) => {
                    for i in 0..len / size_of::<libc::c_int>() {
                        let fd = data.cast::<libc::c_int>().add(i).read_unaligned();
                        fds.push(Attached::new(OwnedFd::from_raw_fd(fd)));
                    }
                }
                (libc::SOL_SOCKET, libc::SCM_CREDENTIALS) if len >= size_of::<libc::ucred>() => {
                    cred = Some(data.cast::<libc::ucred>().read_unaligned());
                }
                (libc::SOL_SOCKET, SCM_PIDFD) if len >= size_of::<libc::c_int>() => {
                    let fd = data.cast::<libc::c_int>().read_unaligned();
                    // (An error if the sender is gone or we are out of descriptors.)
                    pidfd = (fd >= 0).then(|| OwnedFd::from_raw_fd(fd));
                }
                _ => {}
            }
            next = libc::CMSG_NXTHDR(head, next);
        }
    }
    // Without a pid and a uid: sent before the socket was told to say.
    let known = |c: &libc::ucred| c.pid != 0 || c.uid != OVERFLOW_UID;
    let sender = cred.filter(known).map(|c| Sender { pid: c.pid.max(0) as u32, uid: c.uid, gid: c.gid, pidfd });
    (fds, sender)
}

/// What the kernel says of a user that it does not know.
const OVERFLOW_UID: u32 = 65534;

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
    use rustix::net::{AddressFamily, SocketFlags, SocketType};
    use std::os::fd::AsFd;

    #[test]
    fn a_message_for_whose_descriptor_there_is_no_room_is_no_fault() {
        let (a, b) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let null = std::fs::File::open("/dev/null").unwrap();
        send(a.as_fd(), &Msg::new(7), Some(null.as_fd())).unwrap();
        send(a.as_fd(), &Msg::new(8), None).unwrap();
        // SAFETY: the child makes system calls only, and ends; its limit is its own.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            // SAFETY: as above.
            unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const none) };
            let cut = matches!(receive(b.as_fd()), Received::Cut(m) if m.kind == 7);
            let next = matches!(receive(b.as_fd()), Received::Message(m, None) if m.kind == 8);
            // SAFETY: as above.
            unsafe { libc::_exit(i32::from(!cut) | i32::from(!next) << 1) };
        }
        let mut status = 0;
        // SAFETY: waits for our own child.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
    }
}
