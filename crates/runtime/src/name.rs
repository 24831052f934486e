//! Socket addresses: reads those of the program, and writes the library's answers as the kernel
//! does.

use crate::user;
use core::sync::atomic::{AtomicU8, Ordering};
use fsocket_proto::Addr;
use fsocket_sys::Result;

const V4: u16 = libc::AF_INET as u16;
const V6: u16 = libc::AF_INET6 as u16;

/// Parses an address that the program has passed. None: not IPv4 or IPv6, malformed or unreadable.
/// The caller then lets the kernel report the error.
///
/// # Safety
/// `p` points to `len` bytes, as the program passed it.
pub unsafe fn parse(p: *const libc::sockaddr, len: u32) -> Option<Addr> {
    let mut b = [0u8; 28];
    let n = b.len().min(len as usize);
    if n < 16 {
        return None;
    }
    // SAFETY: `b` has room for `n` bytes, and the guarded copy reports a bad `p`.
    unsafe { user::read(p as *const u8, b.as_mut_ptr(), n) }.ok()?;
    let mut a = Addr { family: u16::from_ne_bytes([b[0], b[1]]), ..Addr::default() };
    a.port = u16::from_be_bytes([b[2], b[3]]);
    match a.family {
        V4 => {
            (a.ip[10], a.ip[11]) = (0xff, 0xff);
            a.ip[12..].copy_from_slice(&b[4..8]);
        }
        V6 if n >= 24 => a.ip.copy_from_slice(&b[8..24]),
        _ => return None,
    }
    Some(a)
}

/// Is this the address of a Unix socket?
///
/// # Safety
/// `p` points to `len` bytes, as the program passed it.
pub unsafe fn is_unix(p: *const libc::sockaddr, len: u32) -> bool {
    // SAFETY: the guarded copy reports a bad `p`.
    len >= 2 && unsafe { user::get(p as *const u16) } == Ok(libc::AF_UNIX as u16)
}

pub fn is_v4(ip: &[u8; 16]) -> bool {
    ip[..10] == [0; 10] && ip[10] == 0xff && ip[11] == 0xff
}

const V4_LOOPBACK: [u8; 16] = core::net::Ipv4Addr::LOCALHOST.to_ipv6_mapped().octets();

pub fn is_loopback(ip: &[u8; 16]) -> bool {
    if is_v4(ip) {
        ip[12] == 127
    } else {
        ip[..15] == [0; 15] && ip[15] == 1
    }
}

pub fn is_any(ip: &[u8; 16]) -> bool {
    if is_v4(ip) {
        ip[12..] == [0; 4]
    } else {
        *ip == [0; 16]
    }
}

/// The address to which the kernel connects: the unspecified address means loopback.
pub fn destination(ip: [u8; 16]) -> [u8; 16] {
    match (is_any(&ip), is_v4(&ip)) {
        (false, _) => ip,
        (true, true) => V4_LOOPBACK,
        (true, false) => core::net::Ipv6Addr::LOCALHOST.octets(),
    }
}

/// Can a socket that is bound to `own` reach `dst`, as far as the IP versions matter? (`::`
/// reaches both.)
pub fn same_version(own: &[u8; 16], dst: &[u8; 16]) -> bool {
    *own == [0; 16] || is_v4(own) == is_v4(dst)
}

/// The source address that the kernel would choose for a connection to `dst` on this host:
/// 127.0.0.1 for all of 127/8, else the destination itself.
pub fn source_for(dst: &[u8; 16]) -> [u8; 16] {
    let mut s = *dst;
    if is_v4(dst) && dst[12] == 127 {
        s[13..].copy_from_slice(&[0, 0, 1]);
    }
    s
}

pub fn load(from: &[AtomicU8; 16]) -> [u8; 16] {
    core::array::from_fn(|i| from[i].load(Ordering::Relaxed))
}
pub fn store(to: &[AtomicU8; 16], ip: &[u8; 16]) {
    for (t, b) in to.iter().zip(ip) {
        t.store(*b, Ordering::Relaxed);
    }
}

/// A `sockaddr_in` or `sockaddr_in6`, and its length.
pub fn sockaddr(family: i32, ip: &[u8; 16], port: u16) -> ([u8; 28], usize) {
    let mut b = [0u8; 28];
    b[..2].copy_from_slice(&(family as u16).to_ne_bytes());
    b[2..4].copy_from_slice(&port.to_be_bytes());
    if family == V4 as i32 {
        b[4..8].copy_from_slice(&ip[12..]);
        return (b, 16);
    }
    b[8..24].copy_from_slice(ip);
    (b, 28)
}

/// Writes an address as the kernel does: at most `*len` bytes, then the true length into `*len`.
/// `family`: the family of the program's socket.
///
/// # Safety
/// `out` and `len` come from the program and may be bad pointers.
pub unsafe fn give(ip: &[u8; 16], port: u16, family: u16, out: *mut libc::sockaddr, len: *mut u32) -> Result<()> {
    let (b, n) = sockaddr(family as i32, ip, port);
    // SAFETY: the guarded copy returns EFAULT for a bad `out` or `len`.
    unsafe { user::give(&b[..n], out as *mut u8, len, n as u32) }
}
