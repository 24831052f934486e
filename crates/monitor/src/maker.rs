//! Sockets that the monitor makes for its clients, with its own rights and out of their reach.
//!
//! The monitor does nothing privileged to a client's own socket, which the client could use or
//! keep half-made. It makes a socket here, finishes and checks it, and only then passes it on. If
//! a step fails, it closes the socket. An [`Order`] is plain values, so that the broker can run
//! this code.

use crate::address::is_v4;
use crate::descriptor;
use crate::sockdiag::SockDiag;
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use rustix::io::{retry_on_intr, Errno};
use rustix::net::{sockopt, AddressFamily, SocketFlags, SocketType};
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

/// SO_SNDBUFFORCE of a kernel end (the kernel doubles it): room for a ring's content and overhead.
const BUFFER: i32 = 3 << 20;
/// Segment size on the loopback interface, for either IP version.
const MSS: u32 = 65_464;
/// How long a connection over the loopback interface may take.
const PATIENCE: Duration = Duration::from_millis(20);

/// One end of a connection.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct End {
    /// The socket is for IPv6.
    pub v6: bool,
    /// IPv4 in v4-mapped form.
    pub ip: [u8; 16],
    pub port: u16,
    /// The owner of the socket.
    pub uid: u32,
}

impl End {
    /// The address, for this end's own socket.
    fn addr(&self) -> SocketAddr {
        self.addr_for(self.v6)
    }

    /// The address, for a socket of this family.
    fn addr_for(&self, v6: bool) -> SocketAddr {
        let ip = Ipv6Addr::from(self.ip);
        match ip.to_ipv4_mapped().filter(|_| !v6) {
            Some(ip) => SocketAddr::from((ip, self.port)),
            None => SocketAddr::from((ip, self.port)),
        }
    }
}

/// A connection of which this host has both ends.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Order {
    pub client: End,
    pub server: End,
    /// Use these ports: the client's port belongs to the client. Else any ports.
    pub named: bool,
    /// The cookie of a socket of the client that is bound to that port.
    pub holder: Option<u64>,
}

impl Order {
    /// Whether sockets of these families can have these addresses.
    fn is_sound(&self) -> bool {
        let fits = |e: &End| e.v6 || is_v4(&e.ip);
        fits(&self.client) && fits(&self.server) && is_v4(&self.client.ip) == is_v4(&self.server.ip)
    }
}

/// Makes both ends of a connection, the client's end first. They get the addresses in `order` if
/// possible (TCP_REPAIR). Else they are an ordinary connection over the loopback interface.
///
/// # Errors
/// EXDEV: the monitor may not enter that network namespace. Else those of the system calls.
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

/// Starts to connect a new socket to a listener on behalf of the client, from the client's own
/// port if that is free. Does not block.
///
/// # Errors
/// Those of [`connection`].
pub fn dial(order: &Order, place: Option<BorrowedFd<'_>>) -> Result<OwnedFd, Errno> {
    if !order.is_sound() {
        return Err(Errno::INVAL);
    }
    apart(place, || {
        // If the named port is not free, another one is used below. (A port that does not belong
        // to the client is no reason to refuse: the server side asks for this connection.)
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

/// Both ends are on this host, so the connection is established by now. The first `connect` call
/// after that returns success, and later ones EISCONN. The program has already been told of the
/// success, so this call takes it and the program's next call gets EISCONN.
fn conclude(fd: &OwnedFd, to: SocketAddr) {
    let _ = rustix::net::connect(fd, &to);
}

/// Finishes [`dial`]: true once the socket is connected. It is in blocking mode then.
///
/// # Errors
/// The connection attempt has failed.
pub fn dialled(fd: BorrowedFd<'_>) -> Result<bool, Errno> {
    if !is_ready(fd, Duration::ZERO) {
        return Ok(false);
    }
    sockopt::socket_error(fd)??;
    if rustix::net::getpeername(fd)?.is_none() {
        return Err(Errno::NOTCONN);
    }
    rustix::io::ioctl_fionbio(fd, false)?;
    Ok(true)
}

/// Runs `work` on a new thread, in the network namespace `place`. The event loop's thread must
/// change neither its namespace nor its user.
///
/// # Errors
/// EXDEV: the monitor may not enter the namespace. Else those of `work`.
pub fn apart<T: Send>(
    place: Option<BorrowedFd<'_>>,
    work: impl FnOnce() -> Result<T, Errno> + Send,
) -> Result<T, Errno> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("maker".into()).spawn_scoped(scope, move || {
            if let Some(place) = place {
                // SAFETY: accesses no memory, and changes only this thread, which ends soon.
                if unsafe { libc::setns(place.as_raw_fd(), libc::CLONE_NEWNET) } != 0 {
                    return Err(Errno::XDEV);
                }
            }
            work()
        });
        thread.map_err(|_| Errno::AGAIN)?.join().map_err(|_| Errno::IO)?
    })
}

/// From here on, sockets that this thread makes belong to user `uid`: for SO_REUSEPORT (sockets of
/// one user only) and for packet filters by user. Only within [`apart`].
///
/// # Errors
/// EPERM.
pub fn act_as(uid: u32) -> Result<(), Errno> {
    // SAFETY: the calls access no memory. As raw system calls they change only this thread.
    let now = unsafe {
        libc::syscall(libc::SYS_setfsuid, uid);
        libc::syscall(libc::SYS_setfsuid, u32::MAX) as u32
    };
    // A private monitor makes all sockets as its own user.
    if now == uid || !rustix::process::geteuid().is_root() {
        return Ok(());
    }
    Err(Errno::PERM)
}

/// The network namespace of a TCP socket, in which the client will get sockets.
///
/// # Errors
/// EINVAL: no TCP socket, or not in the namespace of `cookie`. EXDEV: no right to open it.
pub fn namespace_of(fd: BorrowedFd<'_>, cookie: u64) -> Result<OwnedFd, Errno> {
    if !descriptor::is_tcp(fd) || descriptor::netns_cookie(fd)? != cookie {
        return Err(Errno::INVAL);
    }
    namespace_to_look(fd)
}

/// The network namespace of a TCP or Unix socket, for questions to the kernel only: a Unix socket
/// does not prove that its owner may have TCP sockets there.
///
/// # Errors
/// EINVAL: another kind of file. EXDEV: the monitor may not open the namespace.
pub fn namespace_to_look(fd: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    const SIOCGSKNS: libc::Ioctl = 0x894C;
    // Checked first: for other kinds of files the request's number means something else.
    if !descriptor::is_tcp(fd) && !descriptor::is_unix(fd) {
        return Err(Errno::INVAL);
    }
    // SAFETY: the request takes no argument. It returns a new descriptor, or fails.
    let ns = unsafe { libc::ioctl(fd.as_raw_fd(), SIOCGSKNS) };
    if ns < 0 {
        return Err(Errno::XDEV);
    }
    // SAFETY: the call has just made this descriptor, and nothing else owns it.
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
    // (In repair before it is bound, because the listener holds the server's port.)
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

/// Binds a client's socket to its port. First tries an ordinary bind, then one in TCP_REPAIR,
/// where the kernel refuses no port. Connections may use the port too (also in TIME_WAIT), and the
/// client's own `holder`. No other socket may listen there, now or later.
///
/// # Errors
/// EADDRINUSE. Before Linux 6.8 also beside connections: sock_diag does not show bound sockets.
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

/// Checks a finished socket, before a client gets it.
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

/// Makes one end of an established connection without a handshake. The other end needs the same
/// sequence numbers, swapped.
fn half_open(fd: BorrowedFd<'_>, peer: SocketAddr, send_seq: u32, recv_seq: u32) -> Result<(), Errno> {
    let tcp = |name, value: &[u8]| descriptor::set(fd, libc::IPPROTO_TCP, name, value);
    for (queue, seq) in [(SEND_QUEUE, send_seq), (RECV_QUEUE, recv_seq)] {
        tcp(TCP_REPAIR_QUEUE, &queue.to_ne_bytes())?;
        tcp(TCP_QUEUE_SEQ, &seq.to_ne_bytes())?;
    }
    rustix::net::connect(fd, &peer)?;
    let options = [OPT_MSS, MSS, OPT_WINDOW, 7 << 16 | 7, OPT_SACK, 0, OPT_TIMESTAMP, 0];
    tcp(TCP_REPAIR_OPTIONS, &options.map(u32::to_ne_bytes).concat())?;
    // The default: otherwise `TCP_QUEUE_SEQ` would show that the socket was once in repair.
    tcp(TCP_REPAIR_QUEUE, &NO_QUEUE.to_ne_bytes())
}

/// An ordinary connection over the loopback interface, with ports that the kernel chooses.
fn plain(order: &Order) -> Result<[OwnedFd; 2], Errno> {
    // The loopback address that sockets of both families can use.
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
    // Any process on this host can connect to `l`. Only our own connection is accepted.
    for _ in 0..8 {
        if !is_ready(l.as_fd(), PATIENCE) {
            break;
        }
        let s = rustix::net::accept_with(&l, SocketFlags::CLOEXEC)?;
        let peer = rustix::net::getpeername(&s)?.and_then(|a| SocketAddr::try_from(a).ok());
        let canonical = |a: SocketAddr| (a.ip().to_canonical(), a.port());
        if peer.map(canonical) == Some(canonical(own)) && is_ready_within(c.as_fd(), PollFlags::OUT, PATIENCE) {
            rustix::io::ioctl_fionbio(&c, false)?;
            for fd in [&c, &s] {
                // Best effort: a large buffer takes a privilege.
                let _ = descriptor::set(fd.as_fd(), libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, &BUFFER.to_ne_bytes());
            }
            return Ok([c, s]);
        }
    }
    Err(Errno::TIMEDOUT)
}

fn is_ready(fd: BorrowedFd<'_>, limit: Duration) -> bool {
    is_ready_within(fd, PollFlags::IN | PollFlags::OUT, limit)
}

/// Whether one of these events comes in time. The watchdog's signals do not change the wait.
pub fn is_ready_within(fd: BorrowedFd<'_>, events: PollFlags, limit: Duration) -> bool {
    let end = Instant::now() + limit;
    let mut fds = [PollFd::new(&fd, events)];
    retry_on_intr(|| {
        let left = end.saturating_duration_since(Instant::now());
        poll(&mut fds, Some(&Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) }))
    }) == Ok(1)
}

/// Whether TCP_REPAIR is on.
///
/// # Errors
/// Those of `getsockopt`.
pub fn in_repair(fd: BorrowedFd<'_>) -> Result<bool, Errno> {
    let (mut value, mut len) = (0i32, size_of::<i32>() as libc::socklen_t);
    // SAFETY: `value` and `len` are valid for writes of the size that is passed.
    let rc = unsafe {
        libc::getsockopt(fd.as_raw_fd(), libc::IPPROTO_TCP, TCP_REPAIR, (&raw mut value).cast(), &raw mut len)
    };
    if rc != 0 {
        return Err(last_error());
    }
    Ok(value != 0)
}

// From linux/tcp.h. tcp(7) does not describe these options, CRIU's documentation does.
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
/// With timestamps, a pair of ports can be used again one second after its last connection
/// (net.ipv4.tcp_tw_reuse). Without them it takes a minute.
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
