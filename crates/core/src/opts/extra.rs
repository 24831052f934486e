//! Options beyond the common ones: those that the kernel's placeholder keeps, and
//! those that only a kernel connection can have.

use crate::table::{self, kind, Desc};
use crate::{listen, name, path, stats};
use core::sync::atomic::{AtomicU32, Ordering};
use fsocket_abi::arena::Counter;
use fsocket_sys::{self as sys};

/// Options kept per socket by name; with more, all that can be copied are.
pub const COUNT: usize = 6;
/// Bytes of the longest.
const LONG: usize = 64;

const S: i32 = libc::SOL_SOCKET;
const T: i32 = libc::IPPROTO_TCP;
// Numbers that the libc crate lacks; include/uapi/asm-generic/socket.h and
// include/uapi/linux/tcp.h.
const SO_TIMESTAMP_NEW: i32 = 63;
const SO_TIMESTAMPING_NEW: i32 = 65;
const TCP_SAVE_SYN: i32 = 27;
const TCP_INQ: i32 = 36;
// include/uapi/linux/in6.h
pub const IPV6_ADDRFORM: i32 = 1;

/// Does this option change what arrives with the bytes, or what becomes of the
/// connection, in ways that only the kernel has?
fn is_kernel_only(level: i32, name: i32, v: i32) -> bool {
    match (level, name) {
        (S, libc::SO_TIMESTAMP | libc::SO_TIMESTAMPNS | libc::SO_TIMESTAMPING) => v != 0,
        (S, SO_TIMESTAMP_NEW..=SO_TIMESTAMPING_NEW) => v != 0,
        (S, libc::SO_PEEK_OFF) => v >= 0,
        (S, libc::SO_ATTACH_FILTER | libc::SO_ATTACH_BPF) => true,
        (T, TCP_INQ | TCP_SAVE_SYN) => v != 0,
        (T, libc::TCP_REPAIR) => v > 0,
        (T, libc::TCP_ULP) => true,
        (libc::IPPROTO_IPV6, IPV6_ADDRFORM) => v == libc::AF_INET,
        _ => false,
    }
}

fn is_mapped(d: &Desc) -> bool {
    name::is_v4(&name::load(&d.sock().local))
}

/// Before the option is set on `d`. `v`: its value, if it is a number.
pub fn before(d: &'static Desc, level: i32, name: i32, v: i32) {
    // Refused but for a connection of IPv4 through a socket of IPv6.
    let has_form = || d.is_conn() && d.family.load(Ordering::Relaxed) == libc::AF_INET6 as u32 && is_mapped(d);
    // What has a path already leaves it. (Before, what matters is known when it gets one.)
    let has_path = d.is_conn() || d.kind() == kind::LISTENER;
    let device = level == S && matches!(name, libc::SO_BINDTODEVICE | libc::SO_BINDTOIFINDEX) && has_path;
    if (device || is_kernel_only(level, name, v))
        && ((level, name) != (libc::IPPROTO_IPV6, IPV6_ADDRFORM) || has_form())
    {
        leave(d);
    }
}

/// The program wants of this socket what only the kernel's can do.
pub fn leave(d: &'static Desc) {
    match d.kind() {
        kind::CONN => {
            stats::count(Counter::FbOption);
            path::materialize_one(d);
        }
        kind::LISTENER => {
            stats::count(Counter::FbOption);
            listen::abandon(d);
        }
        kind::KERNEL => crate::upgrade::give_up(d),
        kind::FRESH | kind::BOUND => d.kernel_only.store(true, Ordering::Relaxed),
        _ => {}
    }
}

fn entry(level: i32, name: i32) -> u32 {
    (level as u32) << 16 | name as u32 & 0xFFFF
}

/// The placeholder keeps this option; what takes its place gets it, too.
pub fn kept(d: &Desc, level: i32, name: i32) {
    if (0..0x8000).contains(&level) && (0..0x8000).contains(&name) {
        enter(&d.extra, entry(level, name));
    }
}

type List = [AtomicU32; COUNT];

fn enter(list: &List, new: u32) {
    for e in list {
        match e.load(Ordering::Relaxed) {
            0 => return e.store(new, Ordering::Relaxed),
            x if x == new => return,
            _ => {}
        }
    }
    // No room: all of them.
    list[COUNT - 1].store(u32::MAX, Ordering::Relaxed);
}

/// What is in `from`, is in `to`, too.
pub fn merge(to: &List, from: &List) {
    from.iter().map(|e| e.load(Ordering::Relaxed)).take_while(|e| *e != 0).for_each(|e| enter(to, e));
}

/// Are there any?
#[inline]
pub fn any(d: &Desc) -> bool {
    d.extra[0].load(Ordering::Relaxed) != 0
}

/// Set on socket `to` what the program has set on `from`, a number of `d`.
fn copy(d: &Desc, from: i32, to: i32) {
    copy_each(d, from, to);
    // IP_TOS has set it, too.
    one(from, to, S, libc::SO_PRIORITY);
}

fn copy_each(d: &Desc, from: i32, to: i32) {
    for e in &d.extra {
        let e = match e.load(Ordering::Relaxed) {
            0 => return,
            u32::MAX => {
                let v6 = d.family.load(Ordering::Relaxed) as i32 == libc::AF_INET6;
                let _ = fsocket_zones::copy::options(from, to, v6);
                return;
            }
            e => e,
        };
        one(from, to, (e >> 16) as i32, (e & 0xFFFF) as i32);
    }
}

fn one(from: i32, to: i32, level: i32, name: i32) {
    let mut value = [0u8; LONG];
    // What cannot be read (a filter, a key) cannot be given on either.
    if let Ok(n) = sys::getsockopt(from, level, name, &mut value) {
        let _ = sys::setsockopt(to, level, name, &value[..n.min(LONG)]);
    }
}

/// An accepted connection has what was set on its listener.
pub fn inherit(listener: &Desc, fd: i32, d: &Desc, placeholder: i32) {
    copy_each(listener, fd, placeholder);
    // But for this one (`sk_clone_lock`).
    let _ = sys::setsockopt(placeholder, S, libc::SO_PRIORITY, &[0; 4]);
    for (to, from) in d.extra.iter().zip(&listener.extra) {
        to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
    }
    d.dirty.store(true, Ordering::Relaxed);
}

/// The kernel end of a switched connection has what was set on the placeholder.
pub fn apply_options(d: &Desc, fd: i32) {
    if any(d) {
        if let Some(from) = table::fd_of(d) {
            copy(d, from, fd);
        }
    }
}

/// MSG_ZEROCOPY counts for sockets with SO_ZEROCOPY, and who sends so waits for the
/// kernel's word that the buffer is free.
pub fn zerocopy(d: &'static Desc) {
    let mut v = [0u8; 4];
    let on = table::fd_of(d).is_some_and(|fd| sys::getsockopt(fd, S, libc::SO_ZEROCOPY, &mut v).is_ok() && v != [0; 4]);
    if on && d.is_conn() {
        leave(d);
    }
}
