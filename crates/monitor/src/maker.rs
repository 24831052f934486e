//! Sockets that the monitor makes for its clients, by its own right and out of their reach.
//!
//! A client never sends a socket that anything privileged is done to: it could use the socket
//! meanwhile, or keep it half-made. Here sockets are made, finished and looked at once more before
//! anybody else has a descriptor of them; where a step fails they are closed here. An [`Order`] says
//! everything that is needed, in plain values: what this file does can be done by another process.

use crate::address::is_v4;
use crate::descriptor;
use crate::sockdiag::SockDiag;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{sockopt, AddressFamily, SocketFlags, SocketType};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Bytes that a kernel end takes before anybody reads, half of what it says: a whole ring, and what
/// the kernel needs to keep them.
const BUFFER: i32 = 3 << 20;
/// Segment size on the loopback interface, for either IP version.
const MSS: u32 = 65_464;
/// How long a connection over the loopback interface may take, milliseconds.
const PATIENCE_MS: i64 = 20;

/// One end of a connection.
#[derive(Clone, Copy, Debug)]
pub struct End {
    /// The socket is for IPv6.
    pub v6: bool,
    /// IPv4 in v4-mapped form.
    pub ip: [u8; 16],
    pub port: u16,
    /// Whose the socket is.
    pub uid: u32,
}

impl End {
    /// For its own socket.
    fn addr(&self) -> SocketAddr {
        self.addr_for(self.v6)
    }

    /// For a socket of that family.
    fn addr_for(&self, v6: bool) -> SocketAddr {
        let ip = Ipv6Addr::from(self.ip);
        match ip.to_ipv4_mapped().filter(|_| !v6) {
            Some(ip) => SocketAddr::from((ip, self.port)),
            None => SocketAddr::from((ip, self.port)),
        }
    }
}

/// A connection of which this host has both ends.
#[derive(Clone, Copy, Debug)]
pub struct Order {
    pub client: End,
    pub server: End,
    /// The client's port is the client's to use. Else the two get any ports.
    pub named: bool,
    /// It is bound to that port by a socket of the client's, with this cookie.
    pub holder: Option<u64>,
}

impl Order {
    /// An address that a socket of the family cannot have is no address of this connection.
    fn is_sound(&self) -> bool {
        let fits = |e: &End| e.v6 || is_v4(&e.ip);
        fits(&self.client) && fits(&self.server) && is_v4(&self.client.ip) == is_v4(&self.server.ip)
    }
}

/// Makes both ends of a connection: under its own addresses where that is possible (TCP_REPAIR), else
/// an ordinary one over the loopback interface. Client first.
///
/// # Errors
/// EXDEV: not in that network namespace. Else of the calls.
pub fn connection(order: &Order, place: Option<BorrowedFd<'_>>) -> Result<[OwnedFd; 2], Errno> {
    apart(place, || {
        if order.named && order.is_sound() {
            match repaired(order) {
                Ok(ends) => return Ok(ends),
                Err(e) => tracing::info!(error = %e, "a switched connection gets other port numbers"),
            }
        }
        plain(order)
    })
}

/// Begins to connect a socket of the client's to a listener, under the client's own port if that is
/// free. It does not block.
///
/// # Errors
/// As of [`connection`].
pub fn dial(order: &Order, place: Option<BorrowedFd<'_>>) -> Result<OwnedFd, Errno> {
    if !order.is_sound() {
        return Err(Errno::INVAL);
    }
    apart(place, || {
        // Without the port better another one than none. (What is not a port of the client's own is
        // no reason to refuse: its server asks for this.)
        if order.named {
            if let Ok(fd) = begin(order, |fd| take_port(fd, &order.client, order.holder)) {
                return Ok(fd);
            }
        }
        begin(order, |fd| rustix::net::bind(fd, &End { port: 0, ..order.client }.addr()))
    })
}

fn begin(order: &Order, bind: impl FnOnce(&OwnedFd) -> Result<(), Errno>) -> Result<OwnedFd, Errno> {
    let fd = socket(&order.client, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?;
    bind(&fd)?;
    let to = order.server.addr_for(order.client.v6);
    match rustix::net::connect(&fd, &to) {
        Ok(()) | Err(Errno::INPROGRESS) => {
            conclude(&fd, to);
            Ok(fd)
        }
        Err(e) => Err(e),
    }
}

/// On this host a connection is there by now. The first call that asks for it is told that it has succeeded, and
/// those behind it EISCONN, as the program has to be: it was told before.
fn conclude(fd: &OwnedFd, to: SocketAddr) {
    let _ = rustix::net::connect(fd, &to);
}

/// What [`dial`] has begun: true once it is connected. The socket is then as a client's own.
///
/// # Errors
/// It has failed.
pub fn dialled(fd: BorrowedFd<'_>) -> Result<bool, Errno> {
    if !is_ready(fd, 0) {
        return Ok(false);
    }
    sockopt::socket_error(fd)??;
    if rustix::net::getpeername(fd)?.is_none() {
        return Err(Errno::NOTCONN);
    }
    rustix::io::ioctl_fionbio(fd, false)?;
    Ok(true)
}

/// Runs `work` on a thread of its own, in that network namespace: the loop's thread must change
/// neither its namespace nor its user.
///
/// # Errors
/// EXDEV: the monitor may not enter it. Else of `work`.
pub fn apart<T: Send>(
    place: Option<BorrowedFd<'_>>,
    work: impl FnOnce() -> Result<T, Errno> + Send,
) -> Result<T, Errno> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("maker".into()).spawn_scoped(scope, move || {
            if let Some(place) = place {
                // SAFETY: no memory is involved; it changes this thread alone, which ends behind `work`.
                if unsafe { libc::setns(place.as_raw_fd(), libc::CLONE_NEWNET) } != 0 {
                    return Err(Errno::XDEV);
                }
            }
            work()
        });
        thread.map_err(|_| Errno::AGAIN)?.join().map_err(|_| Errno::IO)?
    })
}

/// Sockets that this thread makes are `uid`'s from here on: the rules of SO_REUSEPORT among sockets of one user
/// and filters by user hold for them. Only in [`apart`].
///
/// # Errors
/// EPERM.
pub fn act_as(uid: u32) -> Result<(), Errno> {
    // SAFETY: no memory is involved; the raw calls change this thread alone.
    let now = unsafe {
        libc::syscall(libc::SYS_setfsuid, uid);
        libc::syscall(libc::SYS_setfsuid, u32::MAX) as u32
    };
    // A private monitor makes everything as its own user.
    if now == uid || !rustix::process::geteuid().is_root() {
        return Ok(());
    }
    Err(Errno::PERM)
}

/// The network namespace of a TCP socket that a client shows.
///
/// # Errors
/// EINVAL: something else, or elsewhere than `cookie` says; EXDEV: the monitor has no right to it.
pub fn namespace_of(fd: BorrowedFd<'_>, cookie: u64) -> Result<OwnedFd, Errno> {
    const SIOCGSKNS: libc::Ioctl = 0x894C;
    // Before the request, which means something else to a file of another kind.
    if !descriptor::is_tcp(fd) || descriptor::netns_cookie(fd)? != cookie {
        return Err(Errno::INVAL);
    }
    // SAFETY: takes no argument; returns a new descriptor, or fails.
    let ns = unsafe { libc::ioctl(fd.as_raw_fd(), SIOCGSKNS) };
    if ns < 0 {
        return Err(Errno::XDEV);
    }
    // SAFETY: just made, and ours alone.
    Ok(unsafe { OwnedFd::from_raw_fd(ns) })
}

fn socket(end: &End, flags: SocketFlags) -> Result<OwnedFd, Errno> {
    act_as(end.uid)?;
    let family = if end.v6 { AddressFamily::INET6 } else { AddressFamily::INET };
    let fd = rustix::net::socket_with(family, SocketType::STREAM, flags, Some(rustix::net::ipproto::TCP))?;
    if end.v6 {
        sockopt::set_ipv6_v6only(&fd, false)?;
    }
    Ok(fd)
}

fn repaired(order: &Order) -> Result<[OwnedFd; 2], Errno> {
    let Order { client, server, .. } = order;
    if client.port < 1024 || server.port == 0 {
        return Err(Errno::INVAL);
    }
    let c = socket(client, SocketFlags::CLOEXEC)?;
    let s = socket(server, SocketFlags::CLOEXEC)?;
    let seq = [random(), random()];
    take_port(&c, client, order.holder)?;
    repair(&c, true)?;
    // (The listener has this one.)
    repair(&s, true)?;
    rustix::net::bind(&s, &server.addr())?;
    half_open(c.as_fd(), server.addr_for(client.v6), seq[0], seq[1])?;
    half_open(s.as_fd(), client.addr_for(server.v6), seq[1], seq[0])?;
    for fd in [&c, &s] {
        descriptor::set(fd.as_fd(), libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, &BUFFER.to_ne_bytes())?;
        repair(fd, false)?;
    }
    finished(&c, client, server)?;
    finished(&s, server, client)?;
    Ok([c, s])
}

/// Binds a client's socket to its port: as anybody binds it, else beside connections that have it, those in
/// TIME_WAIT too, and beside the very socket that has it for the client (`holder`). In TCP_REPAIR nobody refuses a port.
/// Not beside another socket that listens there, or may: then the port is not this client's any more.
///
/// # Errors
/// EADDRINUSE. Before Linux 6.8 also beside connections: sockets that are bound and nothing else are not shown there.
fn take_port(fd: &OwnedFd, own: &End, holder: Option<u64>) -> Result<(), Errno> {
    match rustix::net::bind(fd, &own.addr()) {
        Err(Errno::ADDRINUSE) => {}
        bound => return bound,
    }
    repair(fd, true)?;
    rustix::net::bind(fd, &own.addr())?;
    let this = sockopt::socket_cookie(fd)?;
    let bound = SockDiag::open()?.unconnected(own.port).ok_or(Errno::ADDRINUSE)?;
    let allowed = bound.contains(&this) && bound.iter().all(|c| *c == this || Some(*c) == holder);
    allowed.then_some(()).ok_or(Errno::ADDRINUSE)?;
    repair(fd, false)
}

fn repair(fd: &OwnedFd, on: bool) -> Result<(), Errno> {
    descriptor::set(fd.as_fd(), libc::IPPROTO_TCP, TCP_REPAIR, &i32::from(on).to_ne_bytes())
}

/// Looks at a socket once more, before anybody gets it.
fn finished(fd: &OwnedFd, own: &End, peer: &End) -> Result<(), Errno> {
    let same = |a: Option<SocketAddr>, b: &End| {
        a.is_some_and(|a| (a.ip().to_canonical(), a.port()) == (IpAddr::from(b.ip).to_canonical(), b.port))
    };
    let name = rustix::net::getsockname(fd)?.try_into().ok();
    let other = rustix::net::getpeername(fd)?.and_then(|a| a.try_into().ok());
    if !same(name, own) || !same(other, peer) || in_repair(fd.as_fd())? || sockopt::socket_acceptconn(fd)? {
        return Err(Errno::IO);
    }
    Ok(())
}

/// One end of an established connection, without a handshake: sequence numbers
/// are those that the other end is given the other way round.
fn half_open(fd: BorrowedFd<'_>, peer: SocketAddr, send_seq: u32, recv_seq: u32) -> Result<(), Errno> {
    let tcp = |name, value: &[u8]| descriptor::set(fd, libc::IPPROTO_TCP, name, value);
    for (queue, seq) in [(SEND_QUEUE, send_seq), (RECV_QUEUE, recv_seq)] {
        tcp(TCP_REPAIR_QUEUE, &queue.to_ne_bytes())?;
        tcp(TCP_QUEUE_SEQ, &seq.to_ne_bytes())?;
    }
    rustix::net::connect(fd, &peer)?;
    let options = [OPT_MSS, MSS, OPT_WINDOW, 7 << 16 | 7, OPT_SACK, 0, OPT_TIMESTAMP, 0];
    tcp(TCP_REPAIR_OPTIONS, &options.map(u32::to_ne_bytes).concat())?;
    // As of a socket that was never in repair, which `TCP_QUEUE_SEQ` shows.
    tcp(TCP_REPAIR_QUEUE, &NO_QUEUE.to_ne_bytes())
}

/// An ordinary connection over the loopback interface, under ports of the kernel's choice.
fn plain(order: &Order) -> Result<[OwnedFd; 2], Errno> {
    // One address that both families have.
    let v4 = !order.client.v6 || !order.server.v6 || is_v4(&order.server.ip);
    let ip = if v4 { Ipv4Addr::LOCALHOST.to_ipv6_mapped() } else { Ipv6Addr::LOCALHOST }.octets();
    let at = |end: &End, port| End { ip, port, ..*end };
    let l = socket(&order.server, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?;
    rustix::net::bind(&l, &at(&order.server, 0).addr())?;
    rustix::net::listen(&l, 1)?;
    let port = SocketAddr::try_from(rustix::net::getsockname(&l)?).map_err(|_| Errno::INVAL)?.port();
    let c = socket(&order.client, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?;
    match rustix::net::connect(&c, &at(&order.client, port).addr()) {
        Ok(()) | Err(Errno::INPROGRESS) => conclude(&c, at(&order.client, port).addr()),
        Err(e) => return Err(e),
    }
    let own = SocketAddr::try_from(rustix::net::getsockname(&c)?).map_err(|_| Errno::INVAL)?;
    act_as(order.server.uid)?;
    // Anybody on this host may connect to it for a moment: only the one that we have made is taken.
    for _ in 0..8 {
        if !is_ready(l.as_fd(), PATIENCE_MS) {
            break;
        }
        let s = rustix::net::accept_with(&l, SocketFlags::CLOEXEC)?;
        let peer = rustix::net::getpeername(&s)?.and_then(|a| SocketAddr::try_from(a).ok());
        let canonical = |a: SocketAddr| (a.ip().to_canonical(), a.port());
        if peer.map(canonical) == Some(canonical(own)) && is_ready_to_write(c.as_fd(), PATIENCE_MS) {
            rustix::io::ioctl_fionbio(&c, false)?;
            for fd in [&c, &s] {
                // As large as the privilege allows.
                let _ = descriptor::set(fd.as_fd(), libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, &BUFFER.to_ne_bytes());
            }
            return Ok([c, s]);
        }
    }
    Err(Errno::TIMEDOUT)
}

fn is_ready(fd: BorrowedFd<'_>, ms: i64) -> bool {
    polled(fd, rustix::event::PollFlags::IN | rustix::event::PollFlags::OUT, ms)
}

fn is_ready_to_write(fd: BorrowedFd<'_>, ms: i64) -> bool {
    polled(fd, rustix::event::PollFlags::OUT, ms)
}

fn polled(fd: BorrowedFd<'_>, events: rustix::event::PollFlags, ms: i64) -> bool {
    let mut fds = [rustix::event::PollFd::new(&fd, events)];
    let limit = rustix::event::Timespec { tv_sec: 0, tv_nsec: ms * 1_000_000 };
    matches!(rustix::event::poll(&mut fds, Some(&limit)), Ok(1))
}

/// Is TCP_REPAIR on?
///
/// # Errors
/// Of `getsockopt`.
pub fn in_repair(fd: BorrowedFd<'_>) -> Result<bool, Errno> {
    let (mut value, mut len) = (0i32, size_of::<i32>() as libc::socklen_t);
    // SAFETY: `value` and `len` are valid for writes of that size.
    let rc = unsafe {
        libc::getsockopt(fd.as_raw_fd(), libc::IPPROTO_TCP, TCP_REPAIR, (&raw mut value).cast(), &raw mut len)
    };
    if rc != 0 {
        return Err(last_error());
    }
    Ok(value != 0)
}

// linux/tcp.h; tcp(7) says nothing of them, CRIU's documentation does.
const TCP_REPAIR: i32 = 19;
const TCP_REPAIR_QUEUE: i32 = 20;
const TCP_QUEUE_SEQ: i32 = 21;
const TCP_REPAIR_OPTIONS: i32 = 22;
const NO_QUEUE: i32 = 0;
const RECV_QUEUE: i32 = 1;
const SEND_QUEUE: i32 = 2;
const OPT_MSS: u32 = 2;
const OPT_WINDOW: u32 = 3;
const OPT_SACK: u32 = 4;
/// With timestamps the pair of ports can be used again a second after its last
/// connection (net.ipv4.tcp_tw_reuse), without them after a minute.
const OPT_TIMESTAMP: u32 = 8;

fn random() -> u32 {
    let mut seq = [0u8; 4];
    let _ = rustix::rand::getrandom(&mut seq, rustix::rand::GetRandomFlags::empty());
    u32::from_ne_bytes(seq)
}

fn last_error() -> Errno {
    std::io::Error::last_os_error().raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error)
}

#[cfg(test)]
mod tests;
