//! SO_ORIGINAL_DST: the destination of a connection before address translation.
//!
//! Over shared memory no address is translated, so the answer is the address to which the client
//! has connected. But a kernel without connection tracking returns an error. The library connects
//! a socket with itself to see whether the kernel tracks connections in this network namespace.

use crate::table::Desc;
use crate::{name, ready};
use core::sync::atomic::{AtomicU64, Ordering};
use fsocket_abi::channel::CLIENT;
use fsocket_sys::{self as sys, Errno, Result};

/// IP6T_SO_ORIGINAL_DST has the same number.
pub const SO_ORIGINAL_DST: i32 = 80;

/// 127.0.0.1 in the form in which the library keeps addresses.
const LOOPBACK: [u8; 16] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 127, 0, 0, 1];
/// How long an answer stays valid, nanoseconds.
const BELIEVED: u64 = 1_000_000_000;

/// Returns the address and its length. `fd`: a descriptor of `d`; `room`: size of the program's
/// buffer.
pub fn original(fd: i32, d: &Desc, level: i32, room: u32) -> Result<([u8; 28], usize)> {
    // The placeholder shows whether the kernel has this option. Its own connection is not tracked
    // (ENOENT).
    let mut b = [0u8; 28];
    let room = room as usize;
    match sys::getsockopt(fd, level, SO_ORIGINAL_DST, &mut b[..room.min(28)]) {
        Err(Errno::ENOENT) => {}
        r => return r.and(Err(Errno::ENOENT)),
    }
    let s = d.sock();
    let client = d.side() == CLIENT;
    let (ip, port) = if client { s.peer() } else { s.local() };
    let v6 = level == libc::IPPROTO_IPV6;
    if ready::over(d) || v6 == name::is_v4(&ip) || !is_tracking() {
        return Err(Errno::ENOENT);
    }
    let family = if v6 { libc::AF_INET6 } else { libc::AF_INET };
    Ok(name::sockaddr(family, &ip, port))
}

/// Does the kernel track connections over the loopback device here?
fn is_tracking() -> bool {
    /// The time of the last check, with its result in the lowest bit; 0: not checked yet.
    static ASKED: AtomicU64 = AtomicU64::new(0);
    let (last, now) = (ASKED.load(Ordering::Relaxed), sys::now_ns());
    if last != 0 && now.saturating_sub(last) < BELIEVED {
        return last & 1 != 0;
    }
    let tracks =
        sys::socket(libc::AF_INET, libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK, 0).is_ok_and(|fd| {
            let r = with_itself(fd);
            let _ = sys::close(fd);
            r.is_ok()
        });
    ASKED.store(now & !1 | u64::from(tracks), Ordering::Relaxed);
    tracks
}

/// Connects `fd` with itself, for which no listener is needed.
fn with_itself(fd: i32) -> Result<()> {
    let mut own = [0u8; 16];
    let (loopback, len) = name::sockaddr(libc::AF_INET, &LOOPBACK, 0);
    sys::bind(fd, &loopback[..len])?;
    sys::getsockname(fd, &mut own)?;
    match sys::connect(fd, &own) {
        Err(e) if e.raw() != libc::EINPROGRESS => return Err(e),
        _ => {}
    }
    sys::getsockopt(fd, libc::IPPROTO_IP, SO_ORIGINAL_DST, &mut own).map(drop)
}
