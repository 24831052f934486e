//! Which two Unix sockets are connected (unix_diag(7), sock_diag(7)).
//!
//! The kernel says of a socket with which other one it is connected: no process can make it say anything else, and it
//! needs no privilege. Both are named by their inode numbers, which `fstat` says of a descriptor.

use super::{Head, SockDiag, NLMSG_ERROR, SOCK_DIAG_BY_FAMILY, TCP_ESTABLISHED};
use rustix::net::{RecvFlags, SendFlags};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// From linux/unix_diag.h.
const UDIAG_SHOW_PEER: u32 = 4;
const UNIX_DIAG_PEER: u16 = 2;

/// struct unix_diag_req, after its header.
#[derive(Clone, Copy, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Request {
    head: Head,
    family: u8,
    protocol: u8,
    pad: u16,
    states: u32,
    inode: u32,
    show: u32,
    cookie: [u32; 2],
}

/// struct unix_diag_msg.
#[derive(Clone, Copy, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Answer {
    family: u8,
    kind: u8,
    state: u8,
    pad: u8,
    inode: u32,
    cookie: [u32; 2],
}

/// struct nlattr.
#[derive(Clone, Copy, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Attribute {
    len: u16,
    kind: u16,
}

/// A connected Unix stream socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connected {
    /// SO_COOKIE.
    pub cookie: u64,
    /// Inode number of the socket with which it is connected.
    pub peer: u32,
}

impl SockDiag {
    /// What the kernel says of the Unix stream socket with this inode number, in the network namespace that is asked
    /// about. `None`: there is none, it is not connected, or the kernel does not tell.
    pub fn unix(&mut self, inode: u32) -> Option<Connected> {
        self.seq = self.seq.wrapping_add(1);
        let request = Request {
            head: Head {
                len: size_of::<Request>() as u32,
                kind: SOCK_DIAG_BY_FAMILY,
                flags: libc::NLM_F_REQUEST as u16,
                seq: self.seq,
                pid: 0,
            },
            family: libc::AF_UNIX as u8,
            protocol: 0,
            pad: 0,
            states: u32::MAX,
            inode,
            show: UDIAG_SHOW_PEER,
            cookie: [u32::MAX; 2],
        };
        rustix::net::send(&self.fd, request.as_bytes(), SendFlags::empty()).ok()?;
        let mut bytes = [0u8; 4096];
        loop {
            // The kernel has answered by now: it runs in our system calls.
            let (n, _) = rustix::net::recv(&self.fd, &mut bytes[..], RecvFlags::DONTWAIT).ok()?;
            let (head, body) = Head::read_from_prefix(bytes.get(..n)?).ok()?;
            // Left over from a question that ended early.
            if head.seq != self.seq {
                continue;
            }
            let body = body.get(..(head.len as usize).checked_sub(size_of::<Head>())?)?;
            return if head.kind == NLMSG_ERROR { None } else { connected(body, inode) };
        }
    }
}

fn connected(body: &[u8], inode: u32) -> Option<Connected> {
    let (answer, mut rest) = Answer::read_from_prefix(body).ok()?;
    let fits = answer.inode == inode
        && i32::from(answer.kind) == libc::SOCK_STREAM
        && u32::from(answer.state) == TCP_ESTABLISHED;
    let cookie = u64::from(answer.cookie[0]) | u64::from(answer.cookie[1]) << 32;
    while let Some((attribute, value)) = Attribute::read_from_prefix(rest).ok().filter(|_| fits) {
        let value = value.get(..usize::from(attribute.len).checked_sub(size_of::<Attribute>())?)?;
        if attribute.kind == UNIX_DIAG_PEER {
            let peer = u32::read_from_bytes(value).ok()?;
            return Some(Connected { cookie, peer });
        }
        rest = rest.get(usize::from(attribute.len).next_multiple_of(4)..)?;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};

    fn inode(fd: impl std::os::fd::AsFd) -> u32 {
        rustix::fs::fstat(fd).unwrap().st_ino as u32
    }

    #[test]
    fn the_kernel_names_the_peer() {
        let dir = std::env::temp_dir().join(format!("fastsocket-unix-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let mut diag = SockDiag::open().unwrap();
        let listener = UnixListener::bind(dir.join("s")).unwrap();
        let opened = UnixStream::connect(dir.join("s")).unwrap();
        let accepted = listener.accept().unwrap().0;
        let (a, b) = (inode(&opened), inode(&accepted));
        let cookie = |fd: &UnixStream| rustix::net::sockopt::socket_cookie(fd).unwrap();
        assert_eq!(diag.unix(a), Some(Connected { cookie: cookie(&opened), peer: b }));
        assert_eq!(diag.unix(b), Some(Connected { cookie: cookie(&accepted), peer: a }));
        let (left, right) = UnixStream::pair().unwrap();
        assert_eq!(diag.unix(inode(&left)).unwrap().peer, inode(&right));
        let (datagram, _other) = UnixDatagram::pair().unwrap();
        for other in [inode(&listener), inode(&datagram), inode(std::fs::File::open("/dev/null").unwrap())] {
            assert_eq!(diag.unix(other), None);
        }
        drop(accepted);
        assert_eq!(diag.unix(b), None, "it is gone");
        drop(listener);
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
