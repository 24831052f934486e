//! Which Unix sockets are connected, as the kernel says it (sock_diag(7)). It needs no privilege.

use rustix::fd::{BorrowedFd, OwnedFd};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use std::collections::HashMap;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const TCP_ESTABLISHED: u32 = 1;
/// From linux/unix_diag.h.
const UDIAG_SHOW_PEER: u32 = 4;
const UNIX_DIAG_PEER: u16 = 2;

/// struct nlmsghdr.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Head {
    len: u32,
    kind: u16,
    flags: u16,
    seq: u32,
    pid: u32,
}

/// struct unix_diag_req.
#[derive(IntoBytes, Immutable)]
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
#[derive(FromBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Answer {
    kinds: [u8; 4],
    inode: u32,
    cookie: [u32; 2],
}

/// struct nlattr.
#[derive(FromBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Attribute {
    len: u16,
    kind: u16,
}

/// The inode number of each connected Unix socket in a network namespace, and of its peer. Empty where this user may not enter the
/// namespace.
pub fn peers(netns: BorrowedFd<'_>) -> HashMap<u64, u64> {
    std::thread::scope(|scope| scope.spawn(|| in_namespace(netns).unwrap_or_default()).join()).unwrap_or_default()
}

/// Enters the namespace by this thread alone.
fn in_namespace(netns: BorrowedFd<'_>) -> Option<HashMap<u64, u64>> {
    let is_own =
        || Some(rustix::fs::fstat(netns).ok()?.st_ino == rustix::fs::stat("/proc/thread-self/ns/net").ok()?.st_ino);
    if !is_own()? {
        rustix::thread::move_into_link_name_space(netns, Some(rustix::thread::LinkNameSpaceType::Network)).ok()?;
    }
    let flags = SocketFlags::CLOEXEC;
    let kind = Some(rustix::net::netlink::SOCK_DIAG);
    dump(&rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, kind).ok()?)
}

fn dump(socket: &OwnedFd) -> Option<HashMap<u64, u64>> {
    let request = Request {
        head: Head {
            len: size_of::<Request>() as u32,
            kind: SOCK_DIAG_BY_FAMILY,
            flags: (libc::NLM_F_REQUEST | libc::NLM_F_DUMP) as u16,
            seq: 1,
            pid: 0,
        },
        family: libc::AF_UNIX as u8,
        protocol: 0,
        pad: 0,
        states: 1 << TCP_ESTABLISHED,
        inode: 0,
        show: UDIAG_SHOW_PEER,
        cookie: [0; 2],
    };
    rustix::net::send(socket, request.as_bytes(), SendFlags::empty()).ok()?;
    let (mut peers, mut bytes) = (HashMap::new(), vec![0u8; 32768]);
    loop {
        let (n, _) = rustix::net::recv(socket, &mut bytes[..], RecvFlags::empty()).ok()?;
        let mut rest = bytes.get(..n)?;
        while let Ok((head, _)) = Head::read_from_prefix(rest) {
            let body = rest.get(size_of::<Head>()..head.len as usize)?;
            match i32::from(head.kind) {
                libc::NLMSG_DONE => return Some(peers),
                libc::NLMSG_ERROR => return None,
                _ => peers.extend(pair(body)),
            }
            rest = rest.get((head.len as usize).next_multiple_of(4)..).unwrap_or_default();
        }
    }
}

fn pair(body: &[u8]) -> Option<(u64, u64)> {
    let (answer, mut rest) = Answer::read_from_prefix(body).ok()?;
    while let Ok((attribute, value)) = Attribute::read_from_prefix(rest) {
        if attribute.kind == UNIX_DIAG_PEER {
            let (peer, _) = u32::read_from_prefix(value).ok()?;
            return Some((answer.inode.into(), peer.into()));
        }
        rest = rest.get(usize::from(attribute.len).next_multiple_of(4).max(4)..)?;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    #[test]
    fn the_kernel_names_both_ends() {
        let (a, b) = UnixStream::pair().unwrap();
        let [a, b] = [&a, &b].map(|s| rustix::fs::fstat(s).unwrap().st_ino);
        let netns = std::fs::File::open("/proc/self/ns/net").unwrap();
        let peers = peers(netns.as_fd());
        assert_eq!((peers.get(&a), peers.get(&b)), (Some(&b), Some(&a)));
    }
}
