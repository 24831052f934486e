//! Options beyond the common ones: those that the kernel's placeholder keeps, and
//! those that only a kernel connection can have.

use crate::options::IPV6_ADDRFORM;
use crate::table::{self, kind, Desc};
use crate::{name, path};
use core::sync::atomic::Ordering;
use fsocket_abi::arena::Reason;

const S: i32 = libc::SOL_SOCKET;
const T: i32 = libc::IPPROTO_TCP;
// Numbers that the libc crate lacks; include/uapi/asm-generic/socket.h and
// include/uapi/linux/tcp.h.
const SO_TIMESTAMP_NEW: i32 = 63;
const SO_TIMESTAMPING_NEW: i32 = 65;
const TCP_SAVE_SYN: i32 = 27;
const TCP_INQ: i32 = 36;
const IPV6_MINHOPCOUNT: i32 = 73;
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
        // What comes from farther away is dropped, and all of it if it is above what the other side sends with.
        (libc::IPPROTO_IP, libc::IP_MINTTL) | (libc::IPPROTO_IPV6, IPV6_MINHOPCOUNT) => v != 0,
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

/// Before a send with `flags`: with MSG_FASTOPEN it connects the socket, or fails as `connect` does. A socket without a path
/// is then the kernel's.
pub fn sends(fd: i32, flags: i32) {
    if flags & libc::MSG_FASTOPEN != 0 {
        if let Some(d) = table::lookup(fd).filter(|d| matches!(d.kind(), kind::FRESH | kind::BOUND)) {
            leave(d);
        }
    }
}

/// The program wants of this socket what only the kernel's can do.
pub fn leave(d: &'static Desc) {
    match d.kind() {
        kind::CONN => {
            path::materialize_one(d, Reason::Option);
        }
        kind::LISTENER => path::abandon(d, Reason::Option),
        kind::KERNEL => crate::upgrade::give_up(d),
        kind::FRESH | kind::BOUND => d.kernel_only.store(true, Ordering::Relaxed),
        _ => {}
    }
}
