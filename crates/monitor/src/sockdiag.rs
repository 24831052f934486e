//! Asks the kernel about sockets, mainly whether a listening socket still exists.
//!
//! A process may register a listener and close its socket without a message. Without a check it
//! would then get the connections of the process that binds the port next. So before a client's
//! first connection to a listener, the monitor asks the kernel whether the socket with that cookie
//! still listens (NETLINK_SOCK_DIAG, as `ss` does). It asks again after a socket with that port
//! has stopped listening ([`crate::shm::closings`]). It also asks which listener a SYN would
//! reach: a listener without the library, or one with an option that only the kernel supports, may
//! fit the address better. In a network namespace closed to the monitor, listeners are assumed to
//! exist.

mod unix;

use crate::address::{is_v4, V4_ANY, V6_ANY};
use crate::descriptor::{self, Listening};
use crate::netlink::Netlink;
use fsocket_proto::Addr;
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
pub use unix::Connected;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const TCP_ESTABLISHED: u32 = 1;
const TCP_LISTEN: u32 = 10;
/// The loopback device has the first number in each network namespace. Packets to the host's own
/// addresses arrive on it.
const LOOPBACK: u32 = 1;
/// Sockets that are bound, and neither listen nor connect (since Linux 6.8). They are answered as
/// TCP_CLOSE.
const TCP_BOUND_INACTIVE: u32 = 13;
const TCP_CLOSE: u32 = 7;

/// `struct inet_diag_sockid`; ports and addresses in network byte order.
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

/// `struct inet_diag_req_v2`.
#[derive(Clone, Copy, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Request {
    family: u8,
    protocol: u8,
    ext: u8,
    pad: u8,
    states: u32,
    id: SockId,
}

/// The beginning of `struct inet_diag_msg`.
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

/// Which sockets a request is about. Addresses have the kernel's format; zero means any.
#[derive(Clone, Copy)]
struct Question {
    /// Bit s: sockets in state s.
    states: u32,
    family: i32,
    own: ([u8; 16], u16),
    peer: ([u8; 16], u16),
    /// True: the kernel lists all such sockets. False: the kernel looks up one socket, as for a
    /// packet.
    is_dump: bool,
}

impl Question {
    fn one(state: u32, family: i32, own: ([u8; 16], u16), peer: ([u8; 16], u16)) -> Question {
        Question { states: 1 << state, family, own, peer, is_dump: false }
    }

    fn all(states: u32, family: i32, port: u16) -> Question {
        Question { states, family, own: ([0; 16], port), peer: ([0; 16], 0), is_dump: true }
    }

    /// Whether the answered socket is in one of the states.
    fn concerns(&self, answer: &Answer) -> bool {
        let has = |state: u32| self.states.checked_shr(state).unwrap_or(0) & 1 != 0;
        let state = u32::from(answer.state);
        has(state) || state == TCP_CLOSE && has(TCP_BOUND_INACTIVE)
    }
}

/// A sock_diag socket.
pub struct SockDiag(Netlink);

impl From<SockDiag> for OwnedFd {
    fn from(diag: SockDiag) -> OwnedFd {
        diag.0.into_fd()
    }
}

impl SockDiag {
    /// Uses a sock_diag socket that another process has opened.
    pub fn on(fd: OwnedFd) -> SockDiag {
        SockDiag(Netlink::on(fd))
    }

    /// Tries sock_diag with a socket made for that. `None`: the kernel does not answer (the module
    /// cannot be loaded, or a sandbox forbids it).
    pub fn new() -> Option<SockDiag> {
        let mut diag = SockDiag::open().ok()?;
        let probe = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).ok()?;
        let info = descriptor::listening(probe.as_fd()).ok()?;
        let other = Listening { cookie: info.cookie ^ 1 << 40, ..info };
        (diag.listens(&info) && !diag.listens(&other)).then_some(diag)
    }

    /// Opens a sock_diag socket in this thread's network namespace, without a try.
    ///
    /// # Errors
    /// Those of `socket`.
    pub fn open() -> Result<SockDiag, Errno> {
        Netlink::new(Some(rustix::net::netlink::SOCK_DIAG)).map(SockDiag)
    }

    /// Whether exactly this socket listens. If the kernel cannot be asked, true.
    pub fn listens(&mut self, info: &Listening) -> bool {
        let ip = match info.addr.ip {
            V4_ANY => Ipv4Addr::LOCALHOST.to_ipv6_mapped().octets(),
            V6_ANY => Ipv6Addr::LOCALHOST.octets(),
            ip => ip,
        };
        // Looking up the address finds the socket, unless several sockets share the address. Then
        // all listeners of the port are listed.
        let is_it = |answer: &Answer| cookie(&answer.id) == info.cookie;
        self.lookup(ip, info.addr.port, is_it) == Some(true) || self.list(info) != Some(false)
    }

    /// Whether a SYN from this host to `ip` would reach a socket with exactly the address of
    /// `info`: that socket itself, or one that shares its connections. If the kernel cannot be
    /// asked, true.
    pub fn is_reached(&mut self, ip: [u8; 16], info: &Listening) -> bool {
        let bound = raw(&info.addr);
        let is_it = |a: &Answer| u16::from(a.family) == info.addr.family && a.id.src == bound && a.id.interface == 0;
        self.lookup(ip, info.addr.port, is_it) != Some(false)
    }

    /// Whether a SYN from this host to `ip` would reach exactly this socket. False: the two
    /// questions above must be asked one by one.
    pub fn leads_to(&mut self, ip: [u8; 16], info: &Listening) -> bool {
        let bound = raw(&info.addr);
        let is_it = |a: &Answer| {
            let same = u16::from(a.family) == info.addr.family && a.id.src == bound && a.id.interface == 0;
            same && cookie(&a.id) == info.cookie
        };
        self.lookup(ip, info.addr.port, is_it) == Some(true)
    }

    /// Looks up the listener that the kernel itself would choose (by device, address, family,
    /// group).
    fn lookup(&mut self, ip: [u8; 16], port: u16, is_it: impl FnMut(&Answer) -> bool) -> Option<bool> {
        let family = if is_v4(&ip) { libc::AF_INET } else { libc::AF_INET6 };
        let to = Addr { ip, family: family as u16, ..Addr::default() };
        // Port 0 at the other end: no connection has it, so the look-up finds a listener.
        self.ask(Question::one(TCP_LISTEN, family, (raw(&to), port), (raw(&to), 0)), is_it)
    }

    /// Whether exactly this socket is the end of the connection between these addresses. If the
    /// kernel cannot be asked, true.
    pub fn is_end(&mut self, own: SocketAddr, peer: SocketAddr, socket: u64) -> bool {
        self.end(1 << TCP_ESTABLISHED, own, peer, |a| cookie(&a.id) == socket) != Some(false)
    }

    /// Whether the other end of this connection exists on this host under this address, in any
    /// state. `None`: the kernel does not answer.
    pub fn is_connected(&mut self, own: SocketAddr, peer: SocketAddr) -> Option<bool> {
        // If there is no such connection, the look-up answers with the listener.
        let is_it = |a: &Answer| u32::from(a.state) != TCP_LISTEN && a.id.dport == own.port().to_be_bytes();
        self.end(u32::MAX, peer, own, is_it)
    }

    fn end(
        &mut self,
        states: u32,
        own: SocketAddr,
        peer: SocketAddr,
        is_it: impl FnMut(&Answer) -> bool,
    ) -> Option<bool> {
        let family = if own.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
        let end = |a: SocketAddr| match a.ip() {
            IpAddr::V4(v4) => (
                raw(&Addr { ip: v4.to_ipv6_mapped().octets(), family: libc::AF_INET as u16, ..Addr::default() }),
                a.port(),
            ),
            IpAddr::V6(v6) => (v6.octets(), a.port()),
        };
        self.ask(Question { states, family, own: end(own), peer: end(peer), is_dump: false }, is_it)
    }

    /// The owner of the listening socket that gets connections to this address.
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
        // Whether a socket with the cookie is listed; `None`: the kernel does not answer.
        let is_it = |answer: &Answer| cookie(&answer.id) == info.cookie;
        let family = i32::from(info.addr.family);
        self.ask(Question::all(1 << TCP_LISTEN, family, info.addr.port), is_it)
    }

    /// The cookies of all sockets that listen on exactly this address; `None`: the kernel does not
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

    /// The local ports of all listening sockets, or (`connected`) of all connections including
    /// those in TIME_WAIT. One entry for each socket. `None`: the kernel does not answer. (Reading
    /// the tables in /proc is too slow: for a few lines at a time, the kernel searches its whole
    /// table, which takes 20 s for 25,000 connections.)
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

    /// The cookies of all sockets with that port that listen or are merely bound (the latter since
    /// Linux 6.8). `None`: the kernel does not answer.
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

    /// Calls `is_it` for the answered sockets until it returns true. Returns whether it did;
    /// `None`: the kernel does not answer.
    fn ask(&mut self, what: Question, mut is_it: impl FnMut(&Answer) -> bool) -> Option<bool> {
        let Question { states, family, own, peer, is_dump } = what;
        let request = Request {
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
        let mut found = false;
        let answered = self.0.ask(SOCK_DIAG_BY_FAMILY, is_dump, request.as_bytes(), |_, body| {
            found = found || Answer::read_from_prefix(body).is_ok_and(|(a, _)| what.concerns(&a) && is_it(&a));
        });
        matches!(answered, Ok(()) | Err(Errno::NOENT)).then_some(found)
    }
}

/// An address in the format that the kernel uses for a socket of that family.
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

#[cfg(test)]
mod tests;
