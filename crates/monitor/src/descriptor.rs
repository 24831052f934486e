//! Descriptors that clients hand us: what they are, and how to get rid of them
//! without being held up.

use fsocket_proto::Addr;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::FileType;
use rustix::io::Errno;
use rustix::net::{sockopt, AddressFamily, SocketType};
use std::net::SocketAddr;
use std::time::Duration;

/// A descriptor that came with a message and is not trusted yet. Closing some
/// kinds of descriptor can take as long as their maker likes (a FUSE file, a
/// socket with SO_LINGER); those are closed on a thread of their own.
#[derive(Debug)]
pub struct Attached(Option<OwnedFd>);

impl Attached {
    pub fn new(fd: OwnedFd) -> Attached {
        Attached(Some(fd))
    }

    /// Keeps a descriptor whose kind has been checked.
    pub fn keep(mut self) -> OwnedFd {
        self.0.take().expect("taken only here and in drop")
    }

    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_ref().expect("taken only here and in drop").as_fd()
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        let Some(fd) = self.0.take() else { return };
        if closes_at_once(fd.as_fd()) {
            return;
        }
        let raw = std::sync::Arc::new(std::sync::Mutex::new(Some(fd)));
        let theirs = raw.clone();
        let spawned = std::thread::Builder::new()
            .name("close".into())
            .stack_size(64 * 1024)
            .spawn(move || drop(theirs.lock().map(|mut fd| fd.take())));
        if spawned.is_err() {
            // Rather a leaked descriptor than a monitor that hangs.
            if let Ok(mut fd) = raw.lock() {
                std::mem::forget(fd.take());
            };
        }
    }
}

fn closes_at_once(fd: BorrowedFd<'_>) -> bool {
    match rustix::fs::fstat(fd).map(|st| FileType::from_raw_mode(st.st_mode)) {
        // (A time of zero means a reset, and no wait.)
        Ok(FileType::Socket) => matches!(sockopt::socket_linger(fd), Ok(None | Some(Duration::ZERO))),
        _ => rustix::fs::fcntl_get_seals(fd).is_ok() || is_eventfd(fd),
    }
}

/// Whether `fd` is an eventfd.
pub fn is_eventfd(fd: BorrowedFd<'_>) -> bool {
    std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))
        .is_ok_and(|target| target.as_os_str() == "anon_inode:[eventfd]")
}

/// SO_NETNS_COOKIE of a socket: names its network namespace.
pub fn netns_cookie(fd: BorrowedFd<'_>) -> Result<u64, Errno> {
    // SAFETY: this option is a u64.
    unsafe { option(fd, libc::SO_NETNS_COOKIE) }
}

/// SO_PEERCRED of a Unix socket: pid and uid. The pid is 0 when it has none in
/// our PID namespace (which rustix's type cannot say).
pub fn peer(fd: BorrowedFd<'_>) -> Result<(u32, u32), Errno> {
    // SAFETY: this option is a ucred.
    let cred: libc::ucred = unsafe { option(fd, libc::SO_PEERCRED)? };
    Ok((cred.pid.max(0) as u32, cred.uid))
}

/// A socket option at SOL_SOCKET.
///
/// # Safety
/// `T` must be the option's type, a plain C type for which any bytes are valid.
unsafe fn option<T>(fd: BorrowedFd<'_>, name: libc::c_int) -> Result<T, Errno> {
    let mut value = std::mem::MaybeUninit::<T>::zeroed();
    let mut len = size_of::<T>() as libc::socklen_t;
    // SAFETY: `value` and `len` are valid for writes of the size given.
    let rc =
        unsafe { libc::getsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, name, value.as_mut_ptr().cast(), &raw mut len) };
    if rc != 0 {
        return Err(std::io::Error::last_os_error().raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error));
    }
    if len as usize != size_of::<T>() {
        return Err(Errno::NOPROTOOPT);
    }
    // SAFETY: zeroed, then written by the kernel; any bytes are a valid `T`.
    Ok(unsafe { value.assume_init() })
}

/// Whether `fd` is a control socket by kind: Unix, SOCK_SEQPACKET.
pub fn is_control_socket(fd: BorrowedFd<'_>) -> bool {
    sockopt::socket_domain(fd) == Ok(AddressFamily::UNIX) && sockopt::socket_type(fd) == Ok(SocketType::SEQPACKET)
}

/// What the kernel says of a listening socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listening {
    pub cookie: u64,
    pub netns: u64,
    pub addr: Addr,
}

/// Reads a listening TCP socket.
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

/// Checks that `fd` is a TCP socket: connected, or one of which nothing is
/// decided yet.
///
/// # Errors
/// EINVAL: something else.
pub fn tcp(fd: BorrowedFd<'_>, connected: bool) -> Result<(), Errno> {
    let tcp = matches!(sockopt::socket_protocol(fd)?, Some(p) if p == rustix::net::ipproto::TCP);
    let peer = rustix::net::getpeername(fd).is_ok_and(|a| a.is_some());
    let bound = SocketAddr::try_from(rustix::net::getsockname(fd)?).is_ok_and(|a| a.port() != 0);
    if !tcp || peer != connected || bound != connected {
        return Err(Errno::INVAL);
    }
    Ok(())
}

fn mapped(ip: std::net::IpAddr) -> [u8; 16] {
    match ip {
        std::net::IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        std::net::IpAddr::V6(v6) => v6.octets(),
    }
}

fn bound_to_device(fd: BorrowedFd<'_>) -> Result<bool, Errno> {
    // SAFETY: this option is an int.
    let index: libc::c_int = unsafe { option(fd, libc::SO_BINDTOIFINDEX)? };
    Ok(index != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert!(!is_eventfd(f.as_fd()));
    }

    #[test]
    fn a_descriptor_of_any_kind_can_be_dropped() {
        for path in ["/dev/null", "/proc/self/stat", "/"] {
            drop(Attached::new(std::fs::File::open(path).unwrap().into()));
        }
    }
}
