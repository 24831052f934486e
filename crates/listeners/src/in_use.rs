//! Addresses that connections over shared memory have. The kernel does not know of them, and would give them
//! away.

use crate::{ctl, inspect, name};
use core::sync::atomic::Ordering;
use fsocket_proto::registry::Registry;
use fsocket_proto::{request, Addr};
use fsocket_sys::{Errno, Result};

/// A fresh socket of that family is about to be bound.
///
/// # Errors
/// EADDRINUSE, which the kernel would not say.
pub fn before_bind(fd: i32, addr: &Addr) -> Result<()> {
    // (Of a port below 1024 the kernel may say EACCES first.)
    if addr.port < 1024 {
        return Ok(());
    }
    ask(fd, *addr, addr.port, false, |reg, port| {
        reg.served[port].load(Ordering::Relaxed) != 0 || reg.owner[port].load(Ordering::Relaxed) != 0
    })
}

/// The kernel is about to connect a socket that the program has bound.
///
/// # Errors
/// EADDRNOTAVAIL: there is a connection with both its addresses.
pub fn before_connect(fd: i32, dst: &Addr) -> Result<()> {
    // (Of another version of IP the kernel says EAFNOSUPPORT or ENETUNREACH first.)
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
