//! Local listen sockets: copies of a global listen socket.

use crate::copy;
use fsocket_sys::{self as sys, Errno, Result};
use libc::*;

/// The address and options to which a listen socket is bound.
#[derive(Clone, Copy)]
pub struct Shape {
    pub domain: i32,
    pub v6only: bool,
    addr: [u8; 28],
    len: usize,
}

impl Shape {
    /// Reads the shape of a socket.
    ///
    /// # Errors
    /// EINVAL: `fd` is not a bound TCP socket of IPv4 or IPv6. (A Multipath TCP socket is none.)
    pub fn of(fd: i32) -> Result<Shape> {
        let domain = int(fd, SOL_SOCKET, SO_DOMAIN)?;
        let protocol = int(fd, SOL_SOCKET, SO_PROTOCOL)?;
        if !matches!(domain, AF_INET | AF_INET6) || protocol != IPPROTO_TCP {
            return Err(Errno::EINVAL);
        }
        let mut addr = [0u8; 28];
        let len = sys::getsockname(fd, &mut addr)?;
        let v6only = domain == AF_INET6 && int(fd, IPPROTO_IPV6, IPV6_V6ONLY)? != 0;
        let shape = Shape { domain, v6only, addr, len: len.min(28) };
        if shape.port() == 0 {
            return Err(Errno::EINVAL);
        }
        Ok(shape)
    }

    pub fn addr(&self) -> &[u8] {
        &self.addr[..self.len]
    }
    pub fn is_v6(&self) -> bool {
        self.domain == AF_INET6
    }
    pub fn port(&self) -> u16 {
        u16::from_be_bytes([self.addr[2], self.addr[3]])
    }
    pub fn is_wildcard(&self) -> bool {
        let ip = if self.is_v6() { &self.addr[8..24] } else { &self.addr[4..8] };
        ip.iter().all(|b| *b == 0)
    }
}

pub(crate) fn int(fd: i32, level: i32, name: i32) -> Result<i32> {
    let mut v = [0u8; 4];
    sys::getsockopt(fd, level, name, &mut v)?;
    Ok(i32::from_ne_bytes(v))
}

/// Sets or clears SO_REUSEPORT, which is possible at any time.
///
/// # Errors
/// Errors of `setsockopt`.
pub fn reuse_port(fd: i32, on: bool) -> Result<()> {
    sys::setsockopt(fd, SOL_SOCKET, SO_REUSEPORT, &(on as i32).to_ne_bytes())
}

/// Is SO_REUSEPORT set?
///
/// # Errors
/// Errors of `getsockopt`.
pub fn reuse_port_of(fd: i32) -> Result<bool> {
    int(fd, SOL_SOCKET, SO_REUSEPORT).map(|v| v != 0)
}

/// The backlog of a listening socket, and the number of connections that wait to be accepted. Linux reports them in
/// `tcpi_sacked` and `tcpi_unacked`.
///
/// # Errors
/// Errors of `getsockopt`.
pub fn backlog(fd: i32) -> Result<(u32, u32)> {
    let mut info = [0u8; 32];
    let n = sys::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &mut info)?;
    // struct tcp_info: eight bytes, then rto, ato, snd_mss, rcv_mss, unacked, sacked.
    let word = |at: usize| u32::from_ne_bytes([info[at], info[at + 1], info[at + 2], info[at + 3]]);
    if n < 32 {
        return Err(Errno::EINVAL);
    }
    Ok((word(28), word(24)))
}

/// Makes a copy of the listening socket `global` that listens on the same address. The copy is non-blocking and
/// close-on-exec. During the call, every socket on this address must have SO_REUSEPORT set and belong to the same
/// user.
///
/// # Errors
/// Errors of the system calls: EADDRINUSE, EACCES, EPERM. EOPNOTSUPP: see [`copy::options`].
pub fn like(global: i32, shape: &Shape) -> Result<i32> {
    let (limit, _) = backlog(global)?;
    let fd = sys::socket(shape.domain, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, IPPROTO_TCP)?;
    let made = copy::before_bind(global, fd, shape.is_v6())
        .and_then(|()| copy::options(global, fd, shape.is_v6()))
        .and_then(|()| reuse_port(fd, true))
        .and_then(|()| sys::bind(fd, shape.addr()))
        .and_then(|()| copy::fast_open(global, fd))
        .and_then(|()| sys::listen(fd, limit.min(i32::MAX as u32) as i32))
        .and_then(|()| copy::after_listen(global, fd));
    match made {
        Ok(()) => Ok(fd),
        Err(e) => {
            let _ = sys::close(fd);
            Err(e)
        }
    }
}

/// Is the calling thread in the network namespace of this socket? The process may have inherited the socket, or the
/// thread may have changed its namespace since.
///
/// # Errors
/// EXDEV: it is not. Other errors are those of the system calls.
pub fn in_namespace_of(fd: i32) -> Result<()> {
    let cookie = |fd| {
        let mut value = [0u8; 8];
        sys::getsockopt(fd, SOL_SOCKET, SO_NETNS_COOKIE, &mut value).map(|_| value)
    };
    let here = sys::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)?;
    let both = cookie(here).and_then(|here| Ok((here, cookie(fd)?)));
    let _ = sys::close(here);
    match both? {
        (here, there) if here == there => Ok(()),
        _ => Err(Errno::EXDEV),
    }
}

/// Copies the options and the backlog of the global listen socket to a local one again.
///
/// # Errors
/// As for [`like`].
pub fn refresh(global: i32, local: i32, shape: &Shape) -> Result<()> {
    copy::options(global, local, shape.is_v6())?;
    let (limit, _) = backlog(global)?;
    sys::listen(local, limit.min(i32::MAX as u32) as i32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reservation::{self, ReuseWindow};
    use std::net::{SocketAddr, TcpListener, TcpStream};
    use std::os::fd::AsRawFd;

    /// The result of `bind` (and `listen`) for another socket of the same user.
    fn stranger(addr: SocketAddr, v6only: bool, reuseaddr: bool, listens: bool) -> Result<()> {
        let fd = sys::socket(if addr.is_ipv6() { AF_INET6 } else { AF_INET }, SOCK_STREAM, 0).unwrap();
        sys::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &(reuseaddr as i32).to_ne_bytes()).unwrap();
        reuse_port(fd, true).unwrap();
        if addr.is_ipv6() {
            sys::setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &(v6only as i32).to_ne_bytes()).unwrap();
        }
        let mut raw = [0u8; 28];
        let len = match addr {
            SocketAddr::V4(a) => {
                raw[4..8].copy_from_slice(&a.ip().octets());
                16
            }
            SocketAddr::V6(a) => {
                raw[8..24].copy_from_slice(&a.ip().octets());
                28
            }
        };
        raw[..2].copy_from_slice(&(if addr.is_ipv6() { AF_INET6 } else { AF_INET } as u16).to_ne_bytes());
        raw[2..4].copy_from_slice(&addr.port().to_be_bytes());
        let r = sys::bind(fd, &raw[..len]).and_then(|()| if listens { sys::listen(fd, 5) } else { Ok(()) });
        let _ = sys::close(fd);
        r
    }

    fn global(ip: &str, v6only: bool) -> TcpListener {
        let l = TcpListener::bind((ip, 0)).unwrap();
        if !ip.contains(':') || ip != "::" || !v6only {
            return l;
        }
        // The standard library cannot set IPV6_V6ONLY before `bind`.
        drop(l);
        let fd = sys::socket(AF_INET6, SOCK_STREAM, 0).unwrap();
        sys::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &1i32.to_ne_bytes()).unwrap();
        sys::setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &1i32.to_ne_bytes()).unwrap();
        let mut raw = [0u8; 28];
        raw[..2].copy_from_slice(&(AF_INET6 as u16).to_ne_bytes());
        sys::bind(fd, &raw).unwrap();
        sys::listen(fd, 128).unwrap();
        // SAFETY: the descriptor is new, and nothing else owns it.
        unsafe { std::os::fd::FromRawFd::from_raw_fd(fd) }
    }

    #[test]
    fn acknowledgements_are_delayed_as_on_the_global_one() {
        let global = TcpListener::bind("127.0.0.1:0").unwrap();
        // haproxy does the same, after `listen`, which would have switched the option on again.
        sys::setsockopt(global.as_raw_fd(), IPPROTO_TCP, TCP_QUICKACK, &0i32.to_ne_bytes()).unwrap();
        reuse_port(global.as_raw_fd(), true).unwrap();
        let local = like(global.as_raw_fd(), &Shape::of(global.as_raw_fd()).unwrap()).unwrap();
        assert_eq!(int(local, IPPROTO_TCP, TCP_QUICKACK).unwrap(), 0);
        let _ = sys::close(local);
    }

    #[test]
    fn the_address_stays_closed_to_strangers() {
        for (ip, v6only) in [("0.0.0.0", false), ("127.0.0.1", false), ("::", false), ("::", true), ("::1", false)] {
            let g = global(ip, v6only);
            let (fd, addr) = (g.as_raw_fd(), g.local_addr().unwrap());
            let shape = Shape::of(fd).unwrap();
            assert_eq!(shape.port(), addr.port());
            let window = match ReuseWindow::new(&shape) {
                Ok(c) => c,
                Err(e) => {
                    println!("SKIPPED: {ip}: a dual-stack wildcard needs CAP_NET_ADMIN ({e:?})");
                    continue;
                }
            };
            reuse_port(fd, true).unwrap();
            let reservation = reservation::reserve(fd, &shape).unwrap();
            let mut locals = vec![like(fd, &shape).unwrap()];
            // The address is still open now: this shows that the checks below can fail.
            if !v6only || ip != "::" {
                reuse_port(reservation, true).unwrap();
                assert!(stranger(addr, v6only, false, false).is_ok(), "{ip}: the open door");
            }
            window.close(&shape).unwrap();
            reuse_port(reservation, false).unwrap();
            for round in 0..2 {
                for (reuseaddr, listens) in [(false, false), (false, true), (true, false), (true, true)] {
                    let r = stranger(addr, v6only, reuseaddr, listens);
                    assert_eq!(r, Err(Errno::new(EADDRINUSE)), "{ip} round {round}");
                }
                let window = ReuseWindow::new(&shape).unwrap();
                reuse_port(reservation, true).unwrap();
                locals.push(like(fd, &shape).unwrap());
                window.close(&shape).unwrap();
                reuse_port(reservation, false).unwrap();
            }
            drop(g);
            for fd in locals.into_iter().chain([reservation]) {
                let _ = sys::close(fd);
            }
            assert!(stranger(addr, v6only, false, true).is_ok(), "{ip}: free again at once");
        }
    }

    #[test]
    fn a_copy_shares_the_load() {
        let g = TcpListener::bind("127.0.0.1:0").unwrap();
        let shape = Shape::of(g.as_raw_fd()).unwrap();
        reuse_port(g.as_raw_fd(), true).unwrap();
        let local = like(g.as_raw_fd(), &shape).unwrap();
        assert_eq!(backlog(local).unwrap().0, backlog(g.as_raw_fd()).unwrap().0);
        let clients: Vec<_> = (0..64).map(|_| TcpStream::connect(g.local_addr().unwrap()).unwrap()).collect();
        let (waiting, there) = (backlog(local).unwrap().1, backlog(g.as_raw_fd()).unwrap().1);
        assert_eq!(waiting + there, 64);
        assert!(waiting > 0 && there > 0, "{waiting} and {there}");
        drop(clients);
        let _ = sys::close(local);
    }
}
