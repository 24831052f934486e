//! SO_ORIGINAL_DST: where a connection was sent before an address was translated.
//!
//! Over shared memory nothing is translated, so that it is the address which the client has connected to; but where
//! the kernel does not track connections it knows none. Whether it does in this network namespace, a connection
//! of a socket with itself shows.

use crate::table::Desc;
use crate::{name, ready};
use core::sync::atomic::{AtomicU64, Ordering};
use fsocket_abi::channel::CLIENT;
use fsocket_sys::{self as sys, Errno, Result};

/// Also IP6T_SO_ORIGINAL_DST.
pub const SO_ORIGINAL_DST: i32 = 80;

/// 127.0.0.1, as the library keeps addresses.
const LOOPBACK: [u8; 16] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 127, 0, 0, 1];
/// How long an answer is believed, nanoseconds.
const BELIEVED: u64 = 1_000_000_000;

/// The address, and its length. `fd`: a number of `d`; `room`: bytes that the caller has.
pub fn original(fd: i32, d: &Desc, level: i32, room: u32) -> Result<([u8; 28], usize)> {
    // The placeholder says whether there is such an option, and is not tracked itself.
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
    /// When it was asked, and in the lowest bit the answer; 0: never.
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

/// Connects `fd` with itself, which takes no listener.
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
