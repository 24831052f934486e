//! Which sockets may share the address of a listener.
//!
//! A local listen socket needs SO_REUSEPORT on itself and on the global one. In
//! the kernel that opens the address to every socket of the same user that has
//! SO_REUSEPORT set, where stock says EADDRINUSE. Two things close it again:
//!
//! 1. The *reservation*: a socket bound to the same address whose SO_REUSEPORT has been
//!    cleared after the bind. A socket that runs the kernel's conflict check meets it.
//! 2. The kernel skips that check for a socket that is like the last one that
//!    passed it (`tb->fastreuseport`). So every change ends with a bind of another
//!    kind that overwrites this memory: of an address of the same port that nobody
//!    uses and that the listener does not cover, or, where the listener covers all
//!    (a dual-stack wildcard), of the listener's own with TCP_REPAIR, which needs
//!    CAP_NET_ADMIN.
//!
//! To add a local listen socket the door is open for a few system calls: the
//! reservation's SO_REUSEPORT is set meanwhile.

use crate::copy::{self, IPV6_FREEBIND};
use crate::listener::{reuse_port, Shape};
use fsocket_sys::{self as sys, Result};
use libc::*;

const TCP_REPAIR: i32 = 19;

/// A reservation for the address of `global`, which must have SO_REUSEPORT set by now.
/// The door is open afterwards; see [`close`].
///
/// # Errors
/// Of `socket` and `bind`: EADDRINUSE for another user, EACCES for a port that
/// needs a privilege.
pub fn reserve(global: i32, shape: &Shape) -> Result<i32> {
    let fd = sys::socket(shape.domain, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, IPPROTO_TCP)?;
    let bound = copy::before_bind(global, fd, shape.is_v6())
        // Connections in TIME_WAIT, that a server before this one has left, let in
        // who has SO_REUSEADDR, as they let in the listener.
        .and_then(|()| sys::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &1i32.to_ne_bytes()))
        .and_then(|()| reuse_port(fd, true))
        .and_then(|()| sys::bind(fd, shape.addr()))
        // A reservation that itself allows others by SO_REUSEADDR is none.
        .and_then(|()| sys::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &0i32.to_ne_bytes()));
    if let Err(e) = bound {
        let _ = sys::close(fd);
        return Err(e);
    }
    Ok(fd)
}

/// Something that closes the door: made before it is opened, so that a lack of
/// privilege shows in time.
pub struct ReuseWindow {
    fd: i32,
    kind: Kind,
}
enum Kind {
    /// An address of this family.
    Elsewhere(i32),
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

    /// Overwrites the kernel's memory of the last socket that was let in. The
    /// reservation is shut by the caller.
    ///
    /// # Errors
    /// Of `bind`.
    pub fn close(self, shape: &Shape) -> Result<()> {
        let r = match self.kind {
            Kind::Forced => sys::bind(self.fd, shape.addr()),
            Kind::Elsewhere(family) => {
                // Random: a rival would have to name this very address.
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

/// Does the application itself share its address? Then there is no door.
pub fn is_open_anyway(global: i32) -> bool {
    let mut v = [0u8; 4];
    sys::getsockopt(global, SOL_SOCKET, SO_REUSEPORT, &mut v).is_ok() && v != [0; 4]
}
