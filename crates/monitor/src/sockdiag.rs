//! Asking the kernel whether a listening socket still exists.
//!
//! A process that registers a listener, closes the socket and does not say so
//! would go on receiving the connections of whoever binds that port next. So
//! before the first connection from a process to a listener, the kernel is
//! asked (NETLINK_SOCK_DIAG, as `ss` does) whether that very socket, by its
//! cookie, is still there. Before later ones it is asked again when a socket with
//! that port has stopped to listen; see [`crate::shm::closings`]. It is also asked which listener a SYN
//! would reach: one of the kernel's alone (of a process without the library, or with an option that is
//! the kernel's) may be nearer than ours. Listeners in network namespaces that we may not enter are
//! believed.

mod unix;

use crate::address::{is_v4, V4_ANY, V6_ANY};
use crate::descriptor::{self, Listening};
use fsocket_proto::Addr;
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
pub use unix::Connected;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const TCP_ESTABLISHED: u32 = 1;
const TCP_LISTEN: u32 = 10;
/// The loopback device is the first of each network namespace. What goes to one of the host's own
/// addresses comes in by it.
const LOOPBACK: u32 = 1;
/// Bound and nothing else; since Linux 6.8. Answered as TCP_CLOSE.
const TCP_BOUND_INACTIVE: u32 = 13;
const TCP_CLOSE: u32 = 7;
const NLMSG_ERROR: u16 = libc::NLMSG_ERROR as u16;
const NLMSG_DONE: u16 = libc::NLMSG_DONE as u16;

/// struct nlmsghdr.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Head {
    len: u32,
    kind: u16,
    flags: u16,
    seq: u32,
    pid: u32,
}

/// struct inet_diag_sockid; ports and addresses in network order.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct SockId {
    sport: [u8; 2],
    dport: [u8; 2],
    src: [u8; 16],
    dst: [u8; 16],
    interface: u32,
    cookie: [u32; 2],
}

/// struct inet_diag_req_v2, after its header.
#[derive(Clone, Copy, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Request {
    head: Head,
    family: u8,
    protocol: u8,
    ext: u8,
    pad: u8,
    states: u32,
    id: SockId,
}

/// Beginning of struct inet_diag_msg.
#[derive(Clone, Copy, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Answer {
    family: u8,
    state: u8,
    timer: u8,
    retrans: u8,
    id: SockId,
    expires: u32,
    queued: [u32; 2],
    uid: u32,
}

/// The sockets that a request is about. Addresses are as the kernel keeps them; zero is any.
#[derive(Clone, Copy)]
struct Question {
    /// Bit s: those in state s.
    states: u32,
    family: i32,
    own: ([u8; 16], u16),
    peer: ([u8; 16], u16),
    /// True: the kernel answers for every such socket. False: the kernel answers for its own choice.
    is_dump: bool,
}

impl Question {
    fn one(state: u32, family: i32, own: ([u8; 16], u16), peer: ([u8; 16], u16)) -> Question {
        Question { states: 1 << state, family, own, peer, is_dump: false }
    }

    fn all(states: u32, family: i32, port: u16) -> Question {
        Question { states, family, own: ([0; 16], port), peer: ([0; 16], 0), is_dump: true }
    }

    /// Is a socket with this answer in one of the states?
    fn concerns(&self, answer: &Answer) -> bool {
        let has = |state: u32| self.states.checked_shr(state).unwrap_or(0) & 1 != 0;
        let state = u32::from(answer.state);
        has(state) || state == TCP_CLOSE && has(TCP_BOUND_INACTIVE)
    }
}

/// A line to the kernel.
pub struct SockDiag {
    fd: OwnedFd,
    seq: u32,
}

impl From<SockDiag> for OwnedFd {
    fn from(diag: SockDiag) -> OwnedFd {
        diag.fd
    }
}

impl SockDiag {
    /// A line that another process has opened.
    pub fn on(fd: OwnedFd) -> SockDiag {
        SockDiag { fd, seq: 0 }
    }

    /// `None` where the kernel does not tell (a module that cannot be loaded,
    /// a sandbox): tried on a socket of our own.
    pub fn new() -> Option<SockDiag> {
        let mut diag = SockDiag::open().ok()?;
        let probe = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).ok()?;
        let info = descriptor::listening(probe.as_fd()).ok()?;
        let other = Listening { cookie: info.cookie ^ 1 << 40, ..info };
        (diag.listens(&info) && !diag.listens(&other)).then_some(diag)
    }

    /// For the network namespace of this thread, untried.
    ///
    /// # Errors
    /// Of `socket`.
    pub fn open() -> Result<SockDiag, Errno> {
        let fd = rustix::net::socket_with(
            AddressFamily::NETLINK,
            SocketType::RAW,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            Some(rustix::net::netlink::SOCK_DIAG),
        )?;
        Ok(SockDiag { fd, seq: 0 })
    }

    /// Whether exactly this socket listens. When the kernel cannot be asked,
    /// yes.
    pub fn listens(&mut self, info: &Listening) -> bool {
        let ip = match info.addr.ip {
            V4_ANY => Ipv4Addr::LOCALHOST.to_ipv6_mapped().octets(),
            V6_ANY => Ipv6Addr::LOCALHOST.octets(),
            ip => ip,
        };
        // One look-up by address finds it, unless several sockets share the
        // address; then all listeners of the port are listed.
        let is_it = |answer: &Answer| cookie(&answer.id) == info.cookie;
        self.lookup(ip, info.addr.port, is_it) == Some(true) || self.list(info) != Some(false)
    }

    /// Whether a SYN to `ip` from this host would reach a socket with exactly this one's address: this
    /// very one, or one that shares its connections. When the kernel cannot be asked, yes.
    pub fn is_reached(&mut self, ip: [u8; 16], info: &Listening) -> bool {
        let bound = raw(&info.addr);
        let is_it = |a: &Answer| u16::from(a.family) == info.addr.family && a.id.src == bound && a.id.interface == 0;
        self.lookup(ip, info.addr.port, is_it) != Some(false)
    }

    /// Both at once: whether a SYN to `ip` from this host would reach this very socket. No: there is more to ask.
    pub fn leads_to(&mut self, ip: [u8; 16], info: &Listening) -> bool {
        let bound = raw(&info.addr);
        let is_it = |a: &Answer| {
            let same = u16::from(a.family) == info.addr.family && a.id.src == bound && a.id.interface == 0;
            same && cookie(&a.id) == info.cookie
        };
        self.lookup(ip, info.addr.port, is_it) == Some(true)
    }

    /// Asks the kernel for the listener that it would choose itself: device, address, family, group.
    fn lookup(&mut self, ip: [u8; 16], port: u16, is_it: impl FnMut(&Answer) -> bool) -> Option<bool> {
        let family = if is_v4(&ip) { libc::AF_INET } else { libc::AF_INET6 };
        let to = Addr { ip, family: family as u16, ..Addr::default() };
        // Port 0 at the other end: no connection matches, only a listener.
        self.ask(Question::one(TCP_LISTEN, family, (raw(&to), port), (raw(&to), 0)), is_it)
    }

    /// Whether exactly this socket is the end of the connection between these two. When the kernel cannot be asked,
    /// yes.
    pub fn is_end(&mut self, own: SocketAddr, peer: SocketAddr, socket: u64) -> bool {
        let family = if own.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
        let end = |a: SocketAddr| match a.ip() {
            IpAddr::V4(v4) => (
                raw(&Addr { ip: v4.to_ipv6_mapped().octets(), family: libc::AF_INET as u16, ..Addr::default() }),
                a.port(),
            ),
            IpAddr::V6(v6) => (v6.octets(), a.port()),
        };
        let is_it = |a: &Answer| cookie(&a.id) == socket;
        self.ask(Question::one(TCP_ESTABLISHED, family, end(own), end(peer)), is_it) != Some(false)
    }

    /// Whose listening socket gets what comes for this address.
    pub fn listener_of(&mut self, ip: &[u8; 16], port: u16) -> Option<u32> {
        let (family, mut raw) = (if is_v4(ip) { libc::AF_INET } else { libc::AF_INET6 }, *ip);
        if is_v4(ip) {
            raw = [0; 16];
            raw[..4].copy_from_slice(&ip[12..]);
        }
        let mut uid = None;
        self.ask(Question::one(TCP_LISTEN, family, (raw, port), (raw, 0)), |answer| {
            uid = Some(answer.uid);
            true
        })?;
        uid
    }

    fn list(&mut self, info: &Listening) -> Option<bool> {
        // Whether a socket with the cookie is among the answers; `None`: no usable answer.
        let is_it = |answer: &Answer| cookie(&answer.id) == info.cookie;
        let family = i32::from(info.addr.family);
        self.ask(Question::all(1 << TCP_LISTEN, family, info.addr.port), is_it)
    }

    /// Cookies of all sockets that listen on exactly this address; `None`: no usable
    /// answer.
    pub fn listeners(&mut self, addr: &Addr) -> Option<Vec<u64>> {
        let bound = raw(addr);
        let mut found = Vec::new();
        self.ask(Question::all(1 << TCP_LISTEN, i32::from(addr.family), addr.port), |answer| {
            if answer.id.src == bound {
                found.push(cookie(&answer.id));
            }
            false
        })?;
        Some(found)
    }

    /// Local ports of all sockets that listen, or (`connected`) of all connections, those in TIME_WAIT as well: one entry
    /// a socket. `None`: no usable answer. (The tables in /proc cost the kernel a walk through all its memory for each few
    /// lines: 20 s for 25,000 connections.)
    pub fn local_ports(&mut self, connected: bool) -> Option<Vec<u16>> {
        const LISTENS: u32 = 1 << TCP_LISTEN;
        const CONNECTED: u32 = 0x1fff & !1 & !LISTENS & !(1 << TCP_CLOSE);
        let mut ports = Vec::new();
        for family in [libc::AF_INET, libc::AF_INET6] {
            let states = if connected { CONNECTED } else { LISTENS };
            self.ask(Question::all(states, family, 0), |answer| {
                ports.push(u16::from_be_bytes(answer.id.sport));
                false
            })?;
        }
        Some(ports)
    }

    /// Cookies of all sockets with that port that listen, or are bound and nothing else (those since Linux 6.8).
    /// `None`: no usable answer.
    pub fn unconnected(&mut self, port: u16) -> Option<Vec<u64>> {
        let mut found = Vec::new();
        for (state, family) in [TCP_LISTEN, TCP_BOUND_INACTIVE]
            .into_iter()
            .flat_map(|state| [libc::AF_INET, libc::AF_INET6].map(|family| (state, family)))
        {
            self.ask(Question::all(1 << state, family, port), |a| {
                if u16::from_be_bytes(a.id.sport) == port {
                    found.push(cookie(&a.id));
                }
                false
            })?;
        }
        Some(found)
    }

    /// Shows the sockets that are answered to `is_it` until it says yes. Whether it did; `None`: no usable answer.
    fn ask(&mut self, what: Question, mut is_it: impl FnMut(&Answer) -> bool) -> Option<bool> {
        let Question { states, family, own, peer, is_dump } = what;
        let flags = if is_dump { libc::NLM_F_DUMP as u16 } else { 0 };
        self.seq = self.seq.wrapping_add(1);
        let request = Request {
            head: Head {
                len: size_of::<Request>() as u32,
                kind: SOCK_DIAG_BY_FAMILY,
                flags: libc::NLM_F_REQUEST as u16 | flags,
                seq: self.seq,
                pid: 0,
            },
            family: family as u8,
            protocol: libc::IPPROTO_TCP as u8,
            ext: 0,
            pad: 0,
            states,
            id: SockId {
                sport: own.1.to_be_bytes(),
                dport: peer.1.to_be_bytes(),
                src: own.0,
                dst: peer.0,
                interface: if is_dump { 0 } else { LOOPBACK },
                cookie: [u32::MAX; 2],
            },
        };
        rustix::net::send(&self.fd, request.as_bytes(), SendFlags::empty()).ok()?;
        // The kernel has answered by now: it runs in our system calls.
        let mut bytes = [0u8; 32768];
        loop {
            let (n, _) = rustix::net::recv(&self.fd, &mut bytes[..], RecvFlags::DONTWAIT).ok()?;
            let mut rest = &bytes[..n];
            while let Ok((head, _)) = Head::read_from_prefix(rest) {
                let len = head.len as usize;
                if len < size_of::<Head>() || len > rest.len() {
                    return None;
                }
                let body = &rest[size_of::<Head>()..len];
                rest = &rest[len.next_multiple_of(4).min(rest.len())..];
                // Left over from a question that ended early.
                if head.seq != self.seq {
                    continue;
                }
                match head.kind {
                    NLMSG_DONE => return Some(false),
                    NLMSG_ERROR => return (errno_of(body) == libc::ENOENT).then_some(false),
                    _ => {
                        let found = Answer::read_from_prefix(body).is_ok_and(|(a, _)| what.concerns(&a) && is_it(&a));
                        if found || !is_dump {
                            return Some(found);
                        }
                    }
                }
            }
        }
    }
}

/// An address as the kernel keeps it in a socket of that family.
fn raw(addr: &Addr) -> [u8; 16] {
    let mut raw = addr.ip;
    if i32::from(addr.family) == libc::AF_INET {
        raw = [0; 16];
        raw[..4].copy_from_slice(&addr.ip[12..]);
    }
    raw
}

fn cookie(id: &SockId) -> u64 {
    u64::from(id.cookie[0]) | u64::from(id.cookie[1]) << 32
}

fn errno_of(body: &[u8]) -> i32 {
    i32::read_from_prefix(body).map_or(0, |(e, _)| e.wrapping_neg())
}

#[cfg(test)]
mod tests;
