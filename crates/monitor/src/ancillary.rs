//! Sends and receives one message of a Unix socket, with its descriptors and its sender.
//!
//! If the buffer has no room for a message's descriptors, the kernel closes them within `recvmsg`.
//! Closing a descriptor can take long. So the buffer has room for as many descriptors as a message
//! can have.

use rustix::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use rustix::io::{Errno, IoSlice};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use std::mem::MaybeUninit;

/// Descriptors of one message, at most (SCM_MAX_FD).
const MOST: usize = 253;
/// Descriptors that the monitor sends with one message, at most.
const SENT: usize = 6;
/// Room for [`MOST`] descriptors, the credentials, the pidfd, and a security label. (A client can
/// switch on the label for its own socket.)
const ROOM: usize = MOST * size_of::<libc::c_int>() + 1024;
/// From linux/socket.h (6.5).
const SCM_PIDFD: libc::c_int = 4;
/// The kernel shows this user number for a user without a number in this user namespace.
const OVERFLOW_UID: u32 = 65534;

/// The sender of a message, as the kernel has recorded it (SCM_CREDENTIALS, SCM_PIDFD). It is the
/// process that has sent this message, not the one that opened the socket. A client cannot forge
/// it.
#[derive(Debug, Default)]
pub struct Sender {
    /// 0: the process has no number in the monitor's PID namespace.
    pub pid: u32,
    pub uid: u32,
    pub gid: u32,
    /// From Linux 6.5 on. Without a pidfd, the process could end and another one get its number
    /// while the monitor reads its facts.
    pub pidfd: Option<OwnedFd>,
}

/// The result of a receive.
pub struct Got {
    /// Bytes received.
    pub length: usize,
    /// The message was longer than the buffer.
    pub is_longer: bool,
    /// Some descriptors or other ancillary data were lost.
    pub is_cut: bool,
    pub fds: Vec<OwnedFd>,
    pub sender: Option<Sender>,
}

impl Got {
    /// Whether this is the end of the stream: the peer has closed its end, and no message is left.
    pub fn is_end(&self) -> bool {
        self.length == 0 && !self.is_cut && self.fds.is_empty() && self.sender.is_none()
    }
}

#[repr(C, align(8))]
struct Control([MaybeUninit<u8>; ROOM]);

/// Sends one message with these descriptors.
///
/// # Errors
/// EINVAL: too many descriptors. Else those of `sendmsg`.
pub fn send(fd: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>], flags: SendFlags) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(SENT))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::INVAL);
    }
    let flags = flags | SendFlags::NOSIGNAL;
    rustix::io::retry_on_intr(|| rustix::net::sendmsg(fd, &[IoSlice::new(bytes)], &mut control, flags)).map(drop)
}

/// Receives one message. Does not wait, even if the socket is in blocking mode.
///
/// # Errors
/// Those of `recvmsg`.
pub fn receive(fd: BorrowedFd<'_>, bytes: &mut [u8]) -> Result<Got, Errno> {
    received(fd, bytes, libc::MSG_DONTWAIT)
}

/// Like [`receive`], but waits for a message if the socket is in blocking mode.
///
/// # Errors
/// Those of `recvmsg`.
pub fn wait(fd: BorrowedFd<'_>, bytes: &mut [u8]) -> Result<Got, Errno> {
    received(fd, bytes, 0)
}

fn received(fd: BorrowedFd<'_>, bytes: &mut [u8], flags: libc::c_int) -> Result<Got, Errno> {
    let mut control = Control([MaybeUninit::uninit(); ROOM]);
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    // SAFETY: `msghdr` is plain C data, for which all zeros is a valid value.
    let mut head: libc::msghdr = unsafe { std::mem::zeroed() };
    head.msg_iov = &raw mut part;
    head.msg_iovlen = 1;
    head.msg_control = (&raw mut control).cast();
    let length = rustix::io::retry_on_intr(|| {
        head.msg_controllen = ROOM;
        // SAFETY: the buffers that `head` points to are local variables that outlive the call, and
        // `head` holds their true lengths.
        let n = unsafe { libc::recvmsg(fd.as_raw_fd(), &raw mut head, flags | libc::MSG_CMSG_CLOEXEC) };
        usize::try_from(n)
            .map_err(|_| Errno::from_raw_os_error(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)))
    })?;
    let (fds, sender) = parts(&head);
    let has = |flag| head.msg_flags & flag != 0;
    Ok(Got { length, is_longer: has(libc::MSG_TRUNC), is_cut: has(libc::MSG_CTRUNC), fds, sender })
}

/// Reads the ancillary data. Each descriptor gets an owner here, so that none leaks.
fn parts(head: &libc::msghdr) -> (Vec<OwnedFd>, Option<Sender>) {
    let (mut fds, mut cred, mut pidfd) = (Vec::new(), None, None);
    // SAFETY: `recvmsg` has filled in `head`, and the control buffer that it points to still
    // lives.
    let mut next = unsafe { libc::CMSG_FIRSTHDR(head) };
    while !next.is_null() {
        // SAFETY: CMSG_FIRSTHDR and CMSG_NXTHDR return only headers within the control buffer.
        // Each is followed by `len` bytes of data, and the code below reads no further. A
        // descriptor in SCM_RIGHTS, or a non-negative one in SCM_PIDFD, is new in this process and
        // has no other owner.
        unsafe {
            let c = &*next;
            let data = libc::CMSG_DATA(next);
            let len = c.cmsg_len.saturating_sub(libc::CMSG_LEN(0) as usize);
            match (c.cmsg_level, c.cmsg_type) {
                (libc::SOL_SOCKET, libc::SCM_RIGHTS) => {
                    for i in 0..len / size_of::<libc::c_int>() {
                        let fd = data.cast::<libc::c_int>().add(i).read_unaligned();
                        fds.push(OwnedFd::from_raw_fd(fd));
                    }
                }
                (libc::SOL_SOCKET, libc::SCM_CREDENTIALS) if len >= size_of::<libc::ucred>() => {
                    cred = Some(data.cast::<libc::ucred>().read_unaligned());
                }
                (libc::SOL_SOCKET, SCM_PIDFD) if len >= size_of::<libc::c_int>() => {
                    let fd = data.cast::<libc::c_int>().read_unaligned();
                    // (The kernel puts a negative errno here if the sender has ended or this
                    // process has no free descriptor.)
                    pidfd = (fd >= 0).then(|| OwnedFd::from_raw_fd(fd));
                }
                _ => {}
            }
            next = libc::CMSG_NXTHDR(head, next);
        }
    }
    // A message sent before this socket had SO_PASSCRED shows no pid and the overflow uid.
    let known = |c: &libc::ucred| c.pid != 0 || c.uid != OVERFLOW_UID;
    let sender = cred.filter(known).map(|c| Sender { pid: c.pid.max(0) as u32, uid: c.uid, gid: c.gid, pidfd });
    (fds, sender)
}
