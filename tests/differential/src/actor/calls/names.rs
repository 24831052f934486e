//! Calls with an address, and the ports that calls get.

use super::errno;
use crate::actor::PATH as MEMORY;
use crate::actor::SHARED;
use crate::shared::Slot;
use crate::symbols::{ABSTRACT, PATH};
use fsocket_sys as sys;
use libc::{c_int, sockaddr, sockaddr_storage, socklen_t};
use std::mem::{size_of, zeroed};
use std::sync::atomic::Ordering::Relaxed;

/// Hexadecimal digits at the end of a Unix socket's name, which are its "port".
const DIGITS: usize = 4;

/// The port of an address to bind to. A Unix socket that gets a new name takes the step's number
/// plus 1.
pub(super) fn place(s: &Slot, addr: i64, port: i64) -> i64 {
    if port == 0 && matches!(addr, PATH | ABSTRACT) {
        i64::from(s.step.load(Relaxed)) + 1
    } else {
        port
    }
}

/// A name that no other lane and no earlier run has used. (A socket that has ended may hold its
/// name for a moment.) Paths begin in the lane's directory.
fn unix_name(addr: i64, port: i64) -> (libc::sockaddr_un, usize) {
    let run = SHARED.get().map_or(0, |s| s.run.load(Relaxed));
    let memory: String = MEMORY.get().map_or("", String::as_str).chars().filter(char::is_ascii_digit).collect();
    let text = match addr {
        ABSTRACT => format!("\0differential-{memory}-{run:08x}-{port:04x}"),
        _ => format!("{}{run:08x}-{port:04x}", crate::lane::SOCKETS),
    };
    // SAFETY: zero is an address without a name.
    let mut name: libc::sockaddr_un = unsafe { zeroed() };
    name.sun_family = libc::AF_UNIX as u16;
    for (to, from) in name.sun_path.iter_mut().zip(text.bytes()) {
        *to = from as libc::c_char;
    }
    (name, size_of::<libc::sa_family_t>() + text.len() + usize::from(addr == PATH))
}

/// The "port" in the name of a Unix socket.
pub fn unix_port(name: &[u8]) -> Option<u16> {
    let end = name.iter().rposition(|b| *b != 0)? + 1;
    let digits = std::str::from_utf8(name.get(end.checked_sub(DIGITS)?..end)?).ok()?;
    u16::from_str_radix(digits, 16).ok()
}

pub(super) fn is_unix(fd: c_int) -> bool {
    let mut domain = [0u8; 4];
    sys::getsockopt(fd, libc::SOL_SOCKET, libc::SO_DOMAIN, &mut domain).is_ok()
        && i32::from_ne_bytes(domain) == libc::AF_UNIX
}

/// SIOCOUTQ. For a Unix socket the kernel counts the memory behind the bytes, so the result there
/// is only whether there is something.
pub(super) unsafe fn out_queue(fd: c_int, v: *mut c_int) -> c_int {
    // SAFETY: `v` is an int that lives during the call.
    unsafe {
        let r = libc::ioctl(fd, libc::TIOCOUTQ, v);
        if r == 0 && is_unix(fd) {
            *v = (*v != 0).into();
        }
        r
    }
}

/// Makes a call with an address, numbered as in [`crate::symbols::ADDR`].
pub(super) unsafe fn named(addr: i64, port: i64, call: impl FnOnce(*const sockaddr, socklen_t) -> c_int) -> i64 {
    if matches!(addr, PATH | ABSTRACT) {
        let (name, len) = unix_name(addr, port);
        return call(&raw const name as *const sockaddr, len as socklen_t).into();
    }
    let port = (port.max(0) as u16).to_be();
    // SAFETY: all-zero bytes are a valid address, and the call copies the address.
    unsafe {
        if matches!(addr, 0 | 1 | 4) {
            let mut name: libc::sockaddr_in = zeroed();
            name.sin_family = libc::AF_INET as u16;
            name.sin_port = port;
            name.sin_addr.s_addr = match addr {
                0 => u32::from_ne_bytes([127, 0, 0, 1]),
                4 => u32::from_ne_bytes([127, 0, 0, 2]),
                _ => 0,
            };
            return call(&name as *const _ as *const sockaddr, size_of::<libc::sockaddr_in>() as socklen_t).into();
        }
        let mut name: libc::sockaddr_in6 = zeroed();
        name.sin6_family = libc::AF_INET6 as u16;
        name.sin6_port = port;
        match addr {
            2 => name.sin6_addr.s6_addr[15] = 1,
            5 => name.sin6_addr.s6_addr[10..].copy_from_slice(&[255, 255, 127, 0, 0, 1]),
            _ => {}
        }
        call(&name as *const _ as *const sockaddr, size_of::<libc::sockaddr_in6>() as socklen_t).into()
    }
}

/// Calls `connect`, and reports the local port, which names the connection.
pub(super) unsafe fn connect(s: &Slot, fd: c_int, addr: i64, port: i64) -> i64 {
    // SAFETY: the name is a local variable, and its length is passed with it.
    unsafe {
        let r = named(addr, port, |p, len| libc::connect(fd, p, len));
        let saved = errno();
        let mut name: libc::sockaddr_in6 = zeroed();
        let mut len = size_of::<libc::sockaddr_in6>() as socklen_t;
        let known = (r == 0 || saved == libc::EINPROGRESS)
            && libc::getsockname(fd, &mut name as *mut _ as *mut sockaddr, &mut len) == 0;
        let known = known && i32::from(name.sin6_family) != libc::AF_UNIX;
        s.put_aux(if known { u16::from_be(name.sin6_port).into() } else { 0 });
        *libc::__errno_location() = saved;
        r
    }
}

/// Makes a call that returns an address, and copies the address into the slot's buffer.
pub(super) unsafe fn name_out(s: &Slot, call: impl FnOnce(*mut sockaddr, *mut socklen_t) -> c_int) -> i64 {
    // SAFETY: the buffer is local, and this actor has exclusive use of the slot.
    unsafe {
        let mut name: sockaddr_storage = zeroed();
        let mut len = size_of::<sockaddr_storage>() as socklen_t;
        let r = call(&mut name as *mut _ as *mut sockaddr, &mut len);
        if r >= 0 {
            let from = std::slice::from_raw_parts(&name as *const _ as *const u8, (len as usize).min(128));
            s.data()[..from.len()].copy_from_slice(from);
            s.len.store(from.len() as u32, Relaxed);
        }
        r.into()
    }
}

pub(super) unsafe fn listen(s: &Slot, fd: c_int, backlog: c_int) -> i64 {
    // SAFETY: the calls write to local variables. The raw `getsockname` works because the
    // descriptor is a listener in the kernel, too.
    unsafe {
        let r = libc::listen(fd, backlog);
        let saved = errno();
        let mut name: sockaddr_storage = zeroed();
        let mut len = size_of::<sockaddr_storage>() as u32;
        let args = [fd as usize, &mut name as *mut _ as usize, &mut len as *mut u32 as usize, 0, 0, 0];
        let known = r == 0 && sys::raw(libc::SYS_getsockname, args).is_ok();
        let bytes: [u8; size_of::<sockaddr_storage>()] = std::mem::transmute(name);
        let port = match i32::from(name.ss_family) {
            libc::AF_UNIX => unix_port(&bytes[2..]).unwrap_or(0),
            _ => u16::from_be_bytes([bytes[2], bytes[3]]),
        };
        s.put_aux(if known { port.into() } else { 0 });
        *libc::__errno_location() = saved;
        r.into()
    }
}
