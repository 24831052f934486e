//! Protects the addresses of connections over shared memory. The kernel does not know these
//! connections, and would give their addresses to other sockets.

use crate::{ctl, inspect, name};
use core::sync::atomic::Ordering;
use fsocket_proto::registry::Registry;
use fsocket_proto::{request, Addr};
use fsocket_sys::{Errno, Result};

/// Called before a fresh socket of this family is bound.
///
/// # Errors
/// EADDRINUSE: a connection over shared memory has the address, which the kernel does not know.
pub fn before_bind(fd: i32, addr: &Addr) -> Result<()> {
    // For a port below 1024 the kernel may have to return EACCES first.
    if addr.port < 1024 {
        return Ok(());
    }
    ask(fd, *addr, addr.port, false, |reg, port| {
        reg.served[port].load(Ordering::Relaxed) != 0 || reg.owner[port].load(Ordering::Relaxed) != 0
    })
}

/// Called before the kernel connects a socket that the program has bound.
///
/// # Errors
/// EADDRNOTAVAIL: a connection over shared memory has both addresses.
pub fn before_connect(fd: i32, dst: &Addr) -> Result<()> {
    // For an address of another IP version the kernel must return EAFNOSUPPORT or ENETUNREACH
    // first.
    let Some(here) = inspect::bound_address(fd).filter(|here| name::same_version(&here.ip, &dst.ip)) else {
        return Ok(());
    };
    ask(fd, *dst, here.port, true, |reg, port| reg.owner[port].load(Ordering::Relaxed) != 0)
}

fn ask(fd: i32, addr: Addr, port: u16, connects: bool, may_be: impl Fn(&Registry, usize) -> bool) -> Result<()> {
    ctl::wanted();
    if ctl::dead() || !ctl::registry().is_some_and(|reg| may_be(reg, port.into())) {
        return Ok(());
    }
    match ctl::request(request::InUse { addr, connects }, Some(fd)) {
        Err(e @ (Errno::EADDRINUSE | Errno::EADDRNOTAVAIL)) => Err(e),
        _ => Ok(()),
    }
}
