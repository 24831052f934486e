//! Calls with an address, and the port that a call got.

use super::errno;
use crate::shared::Slot;
use fsocket_sys as sys;
use libc::{c_int, sockaddr, sockaddr_storage, socklen_t};
use std::mem::{size_of, zeroed};
use std::sync::atomic::Ordering::Relaxed;

/// An address as [`crate::symbols::ADDR`] numbers them.
pub(super) unsafe fn named(addr: i64, port: i64, call: impl FnOnce(*const sockaddr, socklen_t) -> c_int) -> i64 {
    let port = (port.max(0) as u16).to_be();
    // SAFETY: zero is a valid address; the call copies it.
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

/// `connect`, and what local port it got: the name of the connection.
pub(super) unsafe fn connect(s: &Slot, fd: c_int, addr: i64, port: i64) -> i64 {
    // SAFETY: as the calls want it; the name is ours.
    unsafe {
        let r = named(addr, port, |p, len| libc::connect(fd, p, len));
        let saved = errno();
        let mut name: libc::sockaddr_in6 = zeroed();
        let mut len = size_of::<libc::sockaddr_in6>() as socklen_t;
        let known = (r == 0 || saved == libc::EINPROGRESS)
            && libc::getsockname(fd, &mut name as *mut _ as *mut sockaddr, &mut len) == 0;
        s.put_aux(if known { u16::from_be(name.sin6_port).into() } else { 0 });
        *libc::__errno_location() = saved;
        r
    }
}

/// A call that gives an address: it goes into the buffer as it came.
pub(super) unsafe fn name_out(s: &Slot, call: impl FnOnce(*mut sockaddr, *mut socklen_t) -> c_int) -> i64 {
    // SAFETY: a buffer of ours; the slot is the caller's.
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
    // SAFETY: a listener of ours too is a listener of the kernel's, which knows
    // the port.
    unsafe {
        let r = libc::listen(fd, backlog);
        let saved = errno();
        let mut name: libc::sockaddr_in6 = zeroed();
        let mut len = size_of::<libc::sockaddr_in6>() as u32;
        let args = [fd as usize, &mut name as *mut _ as usize, &mut len as *mut u32 as usize, 0, 0, 0];
        let known = r == 0 && sys::raw(libc::SYS_getsockname, args).is_ok();
        s.put_aux(if known { u16::from_be(name.sin6_port).into() } else { 0 });
        *libc::__errno_location() = saved;
        r.into()
    }
}
