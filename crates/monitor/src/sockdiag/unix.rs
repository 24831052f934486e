//! Finds out which two Unix sockets are connected (unix_diag(7), sock_diag(7)).
//!
//! The kernel tells with which other socket a socket is connected. No process can falsify the
//! answer, and asking takes no privilege. Sockets are identified by their inode numbers, which
//! `fstat` returns for a descriptor.

use super::{SockDiag, SOCK_DIAG_BY_FAMILY, TCP_ESTABLISHED};
use crate::netlink::attributes;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// From linux/unix_diag.h.
const UDIAG_SHOW_PEER: u32 = 4;
const UNIX_DIAG_PEER: u16 = 2;

/// struct unix_diag_req.
#[derive(Clone, Copy, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Request {
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

/// A connected Unix stream socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connected {
    /// SO_COOKIE.
    pub cookie: u64,
    /// Inode number of the peer's socket.
    pub peer: u32,
}

impl SockDiag {
    /// The kernel's facts about the Unix stream socket with this inode number, in the network
    /// namespace of this sock_diag socket. `None`: there is no such socket, it is not connected,
    /// or the kernel does not answer.
    pub fn unix(&mut self, inode: u32) -> Option<Connected> {
        let request = Request {
            family: libc::AF_UNIX as u8,
            protocol: 0,
            pad: 0,
            states: u32::MAX,
            inode,
            show: UDIAG_SHOW_PEER,
            cookie: [u32::MAX; 2],
        };
        let mut found = None;
        let answer = |_, body: &[u8]| found = connected(body, inode);
        self.0.ask(SOCK_DIAG_BY_FAMILY, false, request.as_bytes(), answer).ok()?;
        found
    }
}

fn connected(body: &[u8], inode: u32) -> Option<Connected> {
    let (answer, rest) = Answer::read_from_prefix(body).ok()?;
    let fits = answer.inode == inode
        && i32::from(answer.kind) == libc::SOCK_STREAM
        && u32::from(answer.state) == TCP_ESTABLISHED;
    let cookie = u64::from(answer.cookie[0]) | u64::from(answer.cookie[1]) << 32;
    let (_, peer) = attributes(rest).find(|(kind, _)| fits && *kind == UNIX_DIAG_PEER)?;
    Some(Connected { cookie, peer: u32::read_from_bytes(peer).ok()? })
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
