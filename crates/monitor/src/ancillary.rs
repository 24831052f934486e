//! One message of a Unix socket with what comes along: descriptors, and who has sent it.
//!
//! The kernel closes descriptors for which there is no room in the answer, in the thread that receives. A descriptor
//! can take long to close, so there is room for as many as a message can have.

use rustix::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use rustix::io::Errno;
use std::mem::MaybeUninit;

/// Descriptors of one message, at most (SCM_MAX_FD).
const MOST: usize = 253;
/// Room for those, the credentials, the pidfd, and a security label, for which a client can ask on a socket of its own.
const ROOM: usize = MOST * size_of::<libc::c_int>() + 1024;
/// From linux/socket.h (6.5).
const SCM_PIDFD: libc::c_int = 4;
/// What the kernel says of a user that it does not know.
const OVERFLOW_UID: u32 = 65534;

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

/// What a receive brought.
pub struct Got {
    /// Bytes.
    pub length: usize,
    /// The message was longer.
    pub is_longer: bool,
    /// Some of what came along is lost.
    pub is_cut: bool,
    pub fds: Vec<OwnedFd>,
    pub sender: Option<Sender>,
}

impl Got {
    /// Nothing has come, and nothing will.
    pub fn is_end(&self) -> bool {
        self.length == 0 && !self.is_cut && self.fds.is_empty() && self.sender.is_none()
    }
}

#[repr(C, align(8))]
struct Control([MaybeUninit<u8>; ROOM]);

/// Receives one message. It does not wait, whatever mode the socket is in.
///
/// # Errors
/// Of `recvmsg`.
pub fn receive(fd: BorrowedFd<'_>, bytes: &mut [u8]) -> Result<Got, Errno> {
    let mut control = Control([MaybeUninit::uninit(); ROOM]);
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    // SAFETY: plain C data for which zero is valid.
    let mut head: libc::msghdr = unsafe { std::mem::zeroed() };
    head.msg_iov = &raw mut part;
    head.msg_iovlen = 1;
    head.msg_control = (&raw mut control).cast();
    let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
    let length = rustix::io::retry_on_intr(|| {
        head.msg_controllen = ROOM;
        // SAFETY: all that `head` points to lives here and is as long as said.
        let n = unsafe { libc::recvmsg(fd.as_raw_fd(), &raw mut head, flags) };
        usize::try_from(n)
            .map_err(|_| Errno::from_raw_os_error(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)))
    })?;
    let (fds, sender) = parts(&head);
    let has = |flag| head.msg_flags & flag != 0;
    Ok(Got { length, is_longer: has(libc::MSG_TRUNC), is_cut: has(libc::MSG_CTRUNC), fds, sender })
}

/// What came along: all descriptors become ours, so that none stays open.
fn parts(head: &libc::msghdr) -> (Vec<OwnedFd>, Option<Sender>) {
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
                        fds.push(OwnedFd::from_raw_fd(fd));
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
