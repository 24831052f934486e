//! Keeps other sockets from sharing the address of a listener.
//!
//! A local listen socket needs SO_REUSEPORT on itself and on the global one. This opens the address to every socket
//! of the same user that has SO_REUSEPORT set, where stock returns EADDRINUSE. Two measures close the address
//! again:
//!
//! 1. The *reservation*: a socket bound to the same address whose SO_REUSEPORT has been cleared after the
//!    bind. The kernel's conflict check finds it, and refuses other sockets.
//! 2. The kernel skips that check for a socket that is like the last one that passed it
//!    (`tb->fastreuseport`). So every change ends with a bind of another kind of socket, which overwrites
//!    `tb->fastreuseport` ([`ReuseWindow`]). This socket takes an unused address with the same port that the
//!    listener does not cover. If the listener covers all addresses (a dual-stack wildcard), the socket
//!    takes the listener's own address with TCP_REPAIR, which needs CAP_NET_ADMIN.
//!
//! While a local listen socket is added, the address is open for a few system calls: the reservation's SO_REUSEPORT
//! is set.

use crate::copy::{self, IPV6_FREEBIND};
use crate::listener::{reuse_port, Shape};
use fsocket_sys::{self as sys, Result};
use libc::*;

const TCP_REPAIR: i32 = 19;

/// Makes a reservation for the address of `global`, which must have SO_REUSEPORT set already. The address stays
/// open until the caller calls [`ReuseWindow::close`] and clears the reservation's SO_REUSEPORT.
///
/// # Errors
/// Errors of `socket` and `bind`: EADDRINUSE if another user has the address, EACCES for a port that needs a
/// privilege.
pub fn reserve(global: i32, shape: &Shape) -> Result<i32> {
    let fd = sys::socket(shape.domain, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, IPPROTO_TCP)?;
    let bound = copy::before_bind(global, fd, shape.is_v6())
        // If connections of an earlier server are in TIME_WAIT, the kernel admits only sockets with SO_REUSEADDR,
        // such as the listener.
        .and_then(|()| sys::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &1i32.to_ne_bytes()))
        .and_then(|()| reuse_port(fd, true))
        .and_then(|()| sys::bind(fd, shape.addr()))
        // With SO_REUSEADDR the reservation would admit other sockets.
        .and_then(|()| sys::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &0i32.to_ne_bytes()));
    if let Err(e) = bound {
        let _ = sys::close(fd);
        return Err(e);
    }
    Ok(fd)
}

/// The socket whose `bind` closes the address again. It is made before the address is opened, so that a missing
/// privilege shows in time.
pub struct ReuseWindow {
    fd: i32,
    kind: Kind,
}
enum Kind {
    /// Binds to an unused address of this family.
    Elsewhere(i32),
    /// Binds to the listener's own address, with TCP_REPAIR.
    Forced,
}

impl ReuseWindow {
    /// # Errors
    /// EPERM: a dual-stack wildcard needs CAP_NET_ADMIN.
    pub fn new(shape: &Shape) -> Result<ReuseWindow> {
        let kind = match (shape.is_wildcard(), shape.is_v6(), shape.v6only) {
            (false, ..) => Kind::Elsewhere(shape.domain),
            (true, false, _) => Kind::Elsewhere(AF_INET6),
            (true, true, true) => Kind::Elsewhere(AF_INET),
            (true, true, false) => Kind::Forced,
        };
        Self::of_kind(shape, kind).or_else(|_| Self::of_kind(shape, Kind::Forced))
    }

    fn of_kind(shape: &Shape, kind: Kind) -> Result<ReuseWindow> {
        let family = match kind {
            Kind::Elsewhere(f) => f,
            Kind::Forced => shape.domain,
        };
        let fd = sys::socket(family, SOCK_STREAM | SOCK_CLOEXEC, IPPROTO_TCP)?;
        let on = 1i32.to_ne_bytes();
        let off = 0i32.to_ne_bytes();
        let prepared = match kind {
            Kind::Forced => sys::setsockopt(fd, IPPROTO_TCP, TCP_REPAIR, &on).and_then(|()| {
                if family == AF_INET6 {
                    sys::setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, if shape.v6only { &on } else { &off })
                } else {
                    Ok(())
                }
            }),
            Kind::Elsewhere(_) if family == AF_INET6 => sys::setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &on)
                .and_then(|()| sys::setsockopt(fd, IPPROTO_IPV6, IPV6_FREEBIND, &on))
                .and_then(|()| reuse_port(fd, true)),
            Kind::Elsewhere(_) => sys::setsockopt(fd, IPPROTO_IP, IP_FREEBIND, &on).and_then(|()| reuse_port(fd, true)),
        };
        if let Err(e) = prepared {
            let _ = sys::close(fd);
            return Err(e);
        }
        Ok(ReuseWindow { fd, kind })
    }

    /// Overwrites the kernel's memory of the last socket that passed the check. The caller clears the reservation's
    /// SO_REUSEPORT.
    ///
    /// # Errors
    /// Errors of `bind`.
    pub fn close(self, shape: &Shape) -> Result<()> {
        let r = match self.kind {
            Kind::Forced => sys::bind(self.fd, shape.addr()),
            Kind::Elsewhere(family) => {
                // The address is random: another socket would have to bind to exactly this address to pass the
                // check.
                let mut at = [0u8; 28];
                let random = sys::getrandom_u64().to_ne_bytes();
                at[..2].copy_from_slice(&(family as u16).to_ne_bytes());
                at[2..4].copy_from_slice(&shape.port().to_be_bytes());
                let len = if family == AF_INET6 {
                    // 100::/64 is the discard prefix (RFC 6666).
                    at[8] = 1;
                    at[16..24].copy_from_slice(&random);
                    28
                } else {
                    // 240.0.0.0/4 is reserved for ever (RFC 1112).
                    at[4] = 240;
                    at[5..8].copy_from_slice(&random[..3]);
                    16
                };
                sys::bind(self.fd, &at[..len])
            }
        };
        let _ = sys::close(self.fd);
        core::mem::forget(self);
        r
    }
}

impl Drop for ReuseWindow {
    fn drop(&mut self) {
        let _ = sys::close(self.fd);
    }
}

/// Does the application itself share its address? Then there is nothing to close.
pub fn is_open_anyway(global: i32) -> bool {
    let mut v = [0u8; 4];
    sys::getsockopt(global, SOL_SOCKET, SO_REUSEPORT, &mut v).is_ok() && v != [0; 4]
}
