//! Finds out what the descriptors that clients send are.

use fsocket_proto::Addr;
use rustix::fd::{AsRawFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{sockopt, AddressFamily, SocketType};
use std::net::SocketAddr;

/// SO_NETNS_COOKIE of a socket. It identifies the socket's network namespace.
pub fn netns_cookie(fd: BorrowedFd<'_>) -> Result<u64, Errno> {
    // SAFETY: the value of this option is a u64: any bytes are valid.
    unsafe { option(fd, libc::SO_NETNS_COOKIE) }
}

/// The name of a Unix socket as ss(8) shows it: the path, `@` and the rest of an abstract name, or
/// `*`. Control characters are replaced.
pub fn unix_name(fd: BorrowedFd<'_>) -> Result<String, Errno> {
    let name = rustix::net::SocketAddrUnix::try_from(rustix::net::getsockname(fd)?)?;
    let text = match (name.path_bytes(), name.abstract_name()) {
        (Some(path), _) if !path.is_empty() => String::from_utf8_lossy(path).into_owned(),
        (_, Some(rest)) => format!("@{}", String::from_utf8_lossy(rest)),
        _ => "*".to_owned(),
    };
    Ok(text.replace(char::is_control, "?"))
}

/// Whether the peer of a Unix socket has received everything that was sent from this end, or has
/// closed its end.
pub fn is_received(fd: BorrowedFd<'_>) -> bool {
    // (An unreceived message counts some hundred bytes at least. A message that the kernel is
    // freeing counts one byte.)
    const LESS_THAN_ONE: i32 = 64;
    let mut bytes: i32 = 0;
    // SAFETY: this request writes an int to `bytes`, which lives during the call.
    let rc = unsafe { libc::ioctl(fd.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    rc != 0 || bytes < LESS_THAN_ONE
}

/// SO_PEERCRED of a Unix socket: pid and uid. The pid is 0 if the peer has none in this PID
/// namespace (rustix's type cannot express that).
pub fn peer(fd: BorrowedFd<'_>) -> Result<(u32, u32), Errno> {
    // SAFETY: the value of this option is a ucred, a plain C type for which any bytes are valid.
    let cred: libc::ucred = unsafe { option(fd, libc::SO_PEERCRED)? };
    Ok((cred.pid.max(0) as u32, cred.uid))
}

/// Whether a process has CAP_NET_ADMIN in the monitor's user namespace. Root in a container may
/// lack it, and root in a user namespace has it only for that namespace.
pub fn may_administer(pid: u32) -> bool {
    const CAP_NET_ADMIN: u32 = 12;
    let effective = || -> Option<bool> {
        let text = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let mask = text.lines().find_map(|l| l.strip_prefix("CapEff:"))?;
        Some(u64::from_str_radix(mask.trim(), 16).ok()? & 1 << CAP_NET_ADMIN != 0)
    };
    let namespace = |whose: &str| std::fs::read_link(format!("/proc/{whose}/ns/user")).ok();
    let same = namespace("self").is_some_and(|own| namespace(&pid.to_string()) == Some(own));
    pid != 0 && same && effective().unwrap_or(false)
}

/// A socket option at SOL_SOCKET.
///
/// # Safety
/// `T` must be the option's type, a plain C type for which any bytes are valid.
unsafe fn option<T>(fd: BorrowedFd<'_>, name: libc::c_int) -> Result<T, Errno> {
    let mut value = std::mem::MaybeUninit::<T>::zeroed();
    let mut len = size_of::<T>() as libc::socklen_t;
    // SAFETY: `value` and `len` are valid for writes of the size that is passed.
    let rc =
        unsafe { libc::getsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, name, value.as_mut_ptr().cast(), &raw mut len) };
    if rc != 0 {
        return Err(std::io::Error::last_os_error().raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error));
    }
    if len as usize != size_of::<T>() {
        return Err(Errno::NOPROTOOPT);
    }
    // SAFETY: the memory was zeroed, then written by the kernel. `T` is a plain C type for which
    // any bytes are valid.
    Ok(unsafe { value.assume_init() })
}

/// Whether `fd` is of the same kind as a control socket: a Unix socket of type SOCK_SEQPACKET.
pub fn is_control_socket(fd: BorrowedFd<'_>) -> bool {
    sockopt::socket_domain(fd) == Ok(AddressFamily::UNIX) && sockopt::socket_type(fd) == Ok(SocketType::SEQPACKET)
}

/// The kernel's facts about a listening socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listening {
    pub cookie: u64,
    pub netns: u64,
    pub addr: Addr,
}

/// The options and the owner of a socket, which decide who else may bind its address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reuse {
    pub address: bool,
    pub port: bool,
    pub uid: u32,
}

/// Reads SO_REUSEADDR, SO_REUSEPORT and the owner of a socket.
pub fn reuse(fd: BorrowedFd<'_>) -> Result<Reuse, Errno> {
    let uid = rustix::fs::fstat(fd)?.st_uid;
    Ok(Reuse { address: sockopt::socket_reuseaddr(fd)?, port: sockopt::socket_reuseport(fd)?, uid })
}

/// Reads the facts about a listening TCP socket.
///
/// # Errors
/// ENOTSOCK and the like from the kernel; EINVAL: not a listening TCP socket;
/// EOPNOTSUPP: bound to a device, or to an address that means different hosts
/// on different links.
pub fn listening(fd: BorrowedFd<'_>) -> Result<Listening, Errno> {
    let domain = sockopt::socket_domain(fd)?;
    let tcp = matches!(sockopt::socket_protocol(fd)?, Some(p) if p == rustix::net::ipproto::TCP);
    if (domain != AddressFamily::INET && domain != AddressFamily::INET6) || !tcp || !sockopt::socket_acceptconn(fd)? {
        return Err(Errno::INVAL);
    }
    if bound_to_device(fd)? {
        return Err(Errno::OPNOTSUPP);
    }
    let local = SocketAddr::try_from(rustix::net::getsockname(fd)?).map_err(|_| Errno::INVAL)?;
    let v6only = domain == AddressFamily::INET6 && sockopt::ipv6_v6only(fd)?;
    let addr = Addr { ip: mapped(local.ip()), port: local.port(), family: domain.as_raw(), v6only: u32::from(v6only) };
    if addr.port == 0 || crate::address::is_link_local(&addr.ip) {
        return Err(Errno::OPNOTSUPP);
    }
    Ok(Listening { cookie: sockopt::socket_cookie(fd)?, netns: netns_cookie(fd)?, addr })
}

/// Whether `fd` is a TCP socket of IPv4 or IPv6.
pub fn is_tcp(fd: BorrowedFd<'_>) -> bool {
    matches!(sockopt::socket_protocol(fd), Ok(Some(p)) if p == rustix::net::ipproto::TCP)
        && matches!(sockopt::socket_domain(fd), Ok(AddressFamily::INET | AddressFamily::INET6))
}

/// Whether `fd` is a Unix socket of any type.
pub fn is_unix(fd: BorrowedFd<'_>) -> bool {
    sockopt::socket_domain(fd) == Ok(AddressFamily::UNIX)
}

/// A socket that a client shows: it is going to be connected, or is connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientEnd {
    pub netns: u64,
    pub cookie: u64,
    pub state: Use,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// Neither bound nor connected.
    Unused,
    /// Connected to the destination in question.
    Connected { own: SocketAddr, peer: SocketAddr },
}

/// Reads a socket that is, or could be, connected to `ip` and `port`: a TCP socket, of a family
/// that reaches the address, and not bound to a device.
///
/// # Errors
/// ENOTSOCK and the like from the kernel. EINVAL: another kind of socket, or connected elsewhere.
pub fn client_end(fd: BorrowedFd<'_>, ip: &[u8; 16], port: u16) -> Result<ClientEnd, Errno> {
    /// From net/tcp_states.h.
    const TCP_ESTABLISHED: u8 = 1;
    const TCP_CLOSE: u8 = 7;
    let domain = sockopt::socket_domain(fd)?;
    let reaches = match domain {
        AddressFamily::INET => crate::address::is_v4(ip),
        AddressFamily::INET6 => !crate::address::is_v4(ip) || !sockopt::ipv6_v6only(fd)?,
        _ => false,
    };
    let tcp = matches!(sockopt::socket_protocol(fd)?, Some(p) if p == rustix::net::ipproto::TCP);
    if !reaches || !tcp || sockopt::socket_type(fd)? != SocketType::STREAM || bound_to_device(fd)? {
        return Err(Errno::INVAL);
    }
    let own = SocketAddr::try_from(rustix::net::getsockname(fd)?).map_err(|_| Errno::INVAL)?;
    let state = match tcp_state(fd)? {
        TCP_CLOSE if own.port() == 0 && own.ip().is_unspecified() => Use::Unused,
        TCP_ESTABLISHED => {
            let peer = rustix::net::getpeername(fd)?.and_then(|p| SocketAddr::try_from(p).ok()).ok_or(Errno::INVAL)?;
            if mapped(peer.ip()) != *ip || peer.port() != port {
                return Err(Errno::INVAL);
            }
            let canonical = crate::address::canonical;
            Use::Connected { own: canonical(own), peer: canonical(peer) }
        }
        _ => return Err(Errno::INVAL),
    };
    Ok(ClientEnd { netns: netns_cookie(fd)?, cookie: sockopt::socket_cookie(fd)?, state })
}

/// Reads the state: the first byte of `struct tcp_info`.
fn tcp_state(fd: BorrowedFd<'_>) -> Result<u8, Errno> {
    let mut state = 0u8;
    let mut len = 1 as libc::socklen_t;
    // SAFETY: `state` and `len` are valid for writes of the size that is passed. The kernel writes
    // no more than `len` bytes.
    let rc = unsafe {
        libc::getsockopt(fd.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, (&raw mut state).cast(), &raw mut len)
    };
    if rc != 0 || len != 1 {
        return Err(Errno::INVAL);
    }
    Ok(state)
}

/// How many connections wait in the accept queue of a listening socket.
///
/// # Errors
/// Those of `getsockopt`.
pub fn backlog(fd: BorrowedFd<'_>) -> Result<u32, Errno> {
    let counts = fsocket_reuseport::listener::backlog(fd.as_raw_fd());
    counts.map(|(_, waiting)| waiting).map_err(|e| Errno::from_raw_os_error(e.raw()))
}

/// Sets a socket option to these bytes.
///
/// # Errors
/// Those of `setsockopt`.
pub fn set(fd: BorrowedFd<'_>, level: i32, name: i32, value: &[u8]) -> Result<(), Errno> {
    // SAFETY: the kernel reads `value.len()` bytes from the pointer to `value`.
    let rc =
        unsafe { libc::setsockopt(fd.as_raw_fd(), level, name, value.as_ptr().cast(), value.len() as libc::socklen_t) };
    if rc != 0 {
        return Err(std::io::Error::last_os_error().raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error));
    }
    Ok(())
}

/// A socket's network namespace; `None`: this process may not open it.
pub fn netns_of(fd: BorrowedFd<'_>) -> Option<OwnedFd> {
    /// From linux/sockios.h.
    const SIOCGSKNS: libc::c_ulong = 0x894C;
    // SAFETY: the call takes no argument, and nothing else owns the new descriptor that it
    // returns.
    unsafe {
        let ns = libc::ioctl(fd.as_raw_fd(), SIOCGSKNS as _);
        (ns >= 0).then(|| <OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(ns))
    }
}

/// Inode number of a socket's network namespace; `None`: this process may not open it.
pub fn netns_inode(fd: BorrowedFd<'_>) -> Option<u64> {
    rustix::fs::fstat(netns_of(fd)?).ok().map(|st| st.st_ino)
}

/// Checks that `fd` is a TCP socket that is connected, or (if not `connected`) neither bound nor
/// connected.
///
/// # Errors
/// EINVAL: it is not.
pub fn tcp(fd: BorrowedFd<'_>, connected: bool) -> Result<(), Errno> {
    let tcp = matches!(sockopt::socket_protocol(fd)?, Some(p) if p == rustix::net::ipproto::TCP);
    let peer = rustix::net::getpeername(fd).is_ok_and(|a| a.is_some());
    let bound = SocketAddr::try_from(rustix::net::getsockname(fd)?).is_ok_and(|a| a.port() != 0);
    if !tcp || peer != connected || bound != connected {
        return Err(Errno::INVAL);
    }
    Ok(())
}

/// The port (1024 or above) of a TCP socket that is bound, and neither listens nor is connected.
///
/// # Errors
/// EINVAL: another kind of socket. EADDRINUSE: the socket does not hold the port any more.
pub fn bound_port(fd: BorrowedFd<'_>) -> Result<u16, Errno> {
    if !is_tcp(fd) || sockopt::socket_acceptconn(fd)? || rustix::net::getpeername(fd).is_ok_and(|a| a.is_some()) {
        return Err(Errno::INVAL);
    }
    let name = SocketAddr::try_from(rustix::net::getsockname(fd)?).map_err(|_| Errno::INVAL)?;
    if name.port() < 1024 {
        return Err(Errno::INVAL);
    }
    // A socket whose connection was reset still shows its former port. A socket that is really
    // bound cannot be bound again (EINVAL). For another one, `bind` gets the port here, as its
    // owner could do too.
    match rustix::net::bind(fd, &name) {
        Ok(()) | Err(Errno::INVAL) => Ok(name.port()),
        Err(e) => Err(e),
    }
}

fn mapped(ip: std::net::IpAddr) -> [u8; 16] {
    match ip {
        std::net::IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        std::net::IpAddr::V6(v6) => v6.octets(),
    }
}

fn bound_to_device(fd: BorrowedFd<'_>) -> Result<bool, Errno> {
    // SAFETY: the value of this option is an int: any bytes are valid.
    let index: libc::c_int = unsafe { option(fd, libc::SO_BINDTOIFINDEX)? };
    Ok(index != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fd::AsFd;
    use std::time::Duration;

    #[test]
    fn a_listening_socket_is_told_from_others() {
        let l = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let info = listening(l.as_fd()).unwrap();
        assert_eq!(info.addr.port, l.local_addr().unwrap().port());
        assert_eq!(info.addr.ip[12..], [127, 0, 0, 1]);
        assert_ne!(info.cookie, 0);
        let c = std::net::TcpStream::connect(l.local_addr().unwrap()).unwrap();
        assert_eq!(listening(c.as_fd()), Err(Errno::INVAL));
        let u = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        assert_eq!(listening(u.as_fd()), Err(Errno::INVAL));
        let f = std::fs::File::open("/dev/null").unwrap();
        assert!(listening(f.as_fd()).is_err());
    }

    #[test]
    fn root_without_the_capability_may_not_administer() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIPPED: root_without_the_capability_may_not_administer: not root");
            return;
        }
        assert!(may_administer(std::process::id()));
        assert!(!may_administer(0));
        for (program, args) in [
            ("setpriv", &["--bounding-set=-net_admin", "--inh-caps=-net_admin", "sleep", "30"][..]),
            ("unshare", &["--user", "--map-root-user", "sleep", "30"]),
        ] {
            let mut child = std::process::Command::new(program).args(args).spawn().unwrap();
            let is = |child: &std::process::Child| {
                let name = std::fs::read_to_string(format!("/proc/{}/comm", child.id())).unwrap_or_default();
                name.trim() == "sleep"
            };
            let end = std::time::Instant::now() + Duration::from_secs(20);
            while !is(&child) && child.try_wait().unwrap().is_none() && std::time::Instant::now() < end {
                std::thread::sleep(Duration::from_millis(5));
            }
            let (lives, may) = (child.try_wait().unwrap().is_none(), may_administer(child.id()));
            let _ = child.kill();
            let _ = child.wait();
            assert!(lives, "{program}");
            assert!(!may, "{program}");
        }
    }

    #[test]
    fn only_an_unused_or_fitting_socket_is_a_clients() {
        use rustix::net::{bind, listen, socket, SocketFlags};
        let l = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let (v4, port) = (mapped(l.local_addr().unwrap().ip()), l.local_addr().unwrap().port());
        let v6 = std::net::Ipv6Addr::LOCALHOST.octets();
        let make = |family, kind| socket(family, kind, None).unwrap();
        let (inet, inet6) = (AddressFamily::INET, AddressFamily::INET6);
        let unused = make(inet, SocketType::STREAM);
        assert_eq!(client_end(unused.as_fd(), &v4, port).unwrap().state, Use::Unused);
        assert!(netns_inode(unused.as_fd()).is_some() || !rustix::process::geteuid().is_root());
        let dual = make(inet6, SocketType::STREAM);
        assert!(client_end(dual.as_fd(), &v4, port).is_ok() && client_end(dual.as_fd(), &v6, port).is_ok());
        sockopt::set_ipv6_v6only(&dual, true).unwrap();
        assert!(client_end(dual.as_fd(), &v4, port).is_err() && client_end(unused.as_fd(), &v6, port).is_err());
        let (u1, _u2) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        let bound = make(inet, SocketType::STREAM);
        bind(&bound, &SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let listens = make(inet, SocketType::STREAM);
        listen(&listens, 1).unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        for fd in [u1.as_fd(), bound.as_fd(), listens.as_fd(), file.as_fd(), make(inet, SocketType::DGRAM).as_fd()] {
            assert!(client_end(fd, &v4, port).is_err());
        }
        let c = std::net::TcpStream::connect(l.local_addr().unwrap()).unwrap();
        let end = client_end(c.as_fd(), &v4, port).unwrap();
        assert_eq!(end.state, Use::Connected { own: c.local_addr().unwrap(), peer: l.local_addr().unwrap() });
        assert!(client_end(c.as_fd(), &v4, port ^ 1).is_err());
    }
}
