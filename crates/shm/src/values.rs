//! Recorded options of a connection: their values, and their way from and to a kernel socket.

use crate::kept;
use crate::options::{AT_ONCE, NOTSENT_LOWAT, RCVBUF, RCVLOWAT, SNDBUF, TABLE, WINDOW_CLAMP};
use crate::table::Desc;
use core::sync::atomic::Ordering;
use fsocket_abi::flags::FlagSet;
use fsocket_abi::sock::{LINGER_ON, LINGER_SECS};
use fsocket_sys as sys;

const S: i32 = libc::SOL_SOCKET;
const T: i32 = libc::IPPROTO_TCP;

/// The value of the recorded option at place `i`: of the connection that the fork group shares, or of a socket before
/// that.
pub fn value(d: &Desc, i: usize) -> i32 {
    match d.is_conn() {
        true => d.sock().option(i),
        false => d.options().value(i),
    }
}

pub fn set_value(d: &Desc, i: usize, value: i32) {
    match d.is_conn() {
        true => d.sock().set_option(i, value),
        false => d.options().set_value(i, value),
    }
}

/// Remembers the buffer size that the kernel has made of the program's.
pub fn learn(d: &Desc, fd: i32, i: usize) -> bool {
    let mut b = [0u8; 4];
    let known = sys::getsockopt(fd, TABLE[i].level, TABLE[i].name, &mut b).is_ok();
    if known {
        set_value(d, i, i32::from_ne_bytes(b));
    }
    known
}

/// The least TCP_WINDOW_CLAMP: SOCK_MIN_RCVBUF / 2.
pub const LEAST_CLAMP: i32 = 1152;

/// Bounds the bytes in flight by the buffers that the program has chosen. The kernel counts memory,
/// not bytes. On loopback three quarters of a send buffer are data, and the receiver takes its
/// buffer and a quarter. (Measured with messages of 100 bytes to 1 MiB and buffers of 2 to 512 KiB:
/// within a factor of two.)
///
/// Without `SO_SNDBUF` the kernel's send buffer is larger than a ring, whatever the receiver's size
/// is.
pub fn size_buffers(d: &Desc) {
    let s = d.sock();
    if d.is_unix() {
        // A Unix socket's send buffer bounds the peer's unread bytes, whatever the peer's receive buffer is. All of
        // them must fit into the kernel's socket again. A quarter is for what the kernel counts beside the bytes.
        let room = s.option(SNDBUF).max(4608) as u32 / 4 * 3;
        d.tx().2.set_cap(room);
        d.rx().1.cons.window.store(0, Ordering::Relaxed);
        if s.option(RCVLOWAT) > 1 {
            size_lowat(d);
        }
        return;
    }
    let bytes = |i: usize, part: u64| (s.option(i).max(0) as u64 * part / 4) as u32;
    let chosen = |i: usize| s.option(i) != TABLE[i].default;
    let (_, _, h) = d.tx();
    h.set_cap(if chosen(SNDBUF) { bytes(SNDBUF, 3) } else { 0 });
    h.set_lowat(s.option(NOTSENT_LOWAT) as u32);
    let clamp = match s.option(WINDOW_CLAMP) {
        0 => u32::MAX,
        clamp => clamp.max(LEAST_CLAMP) as u32,
    };
    // The rest of the step granted under the old size is used first.
    d.rx().1.cons.window.store(bytes(RCVBUF, 5).min(clamp), Ordering::Relaxed);
    if s.option(RCVLOWAT) > 1 {
        size_lowat(d);
    }
}

/// The size that the kernel's send buffer would have, in bytes.
pub fn send_buffer(d: &Desc) -> usize {
    d.sock().option(SNDBUF).max(1) as usize
}

/// Notes whether the connection has a low-water mark.
pub fn size_lowat(d: &Desc) {
    let s = d.sock();
    match s.option(RCVLOWAT) > 1 {
        true => s.flags.set(FlagSet::LOWAT),
        false => s.flags.clear(FlagSet::LOWAT),
    };
}

/// SO_RCVLOWAT in bytes, limited to what a ring can hold beside bytes in flight.
pub fn lowat(d: &Desc) -> usize {
    const MOST: i32 = fsocket_abi::channel::RING_CAP as i32 / 2;
    d.sock().option(RCVLOWAT).clamp(1, MOST) as usize
}

/// Reads the options of a listener that another program has made.
pub fn adopt(fd: i32, d: &Desc) {
    let int = |level: i32, name: i32| {
        let mut v = [0u8; 4];
        sys::getsockopt(fd, level, name, &mut v).ok().map(|_| i32::from_ne_bytes(v))
    };
    const SO_BUF_LOCK: i32 = 72;
    let chosen = int(S, SO_BUF_LOCK).unwrap_or(0);
    for (i, o) in TABLE.iter().enumerate() {
        // Sizes that the program has not chosen are those of the kernel's listener; QUICKACK is a
        // state rather than an option.
        let skip = match i {
            SNDBUF if d.is_unix() => false,
            SNDBUF => chosen & 1 == 0,
            RCVBUF => chosen & 2 == 0,
            _ => o.name == libc::TCP_QUICKACK && o.level == T,
        };
        if let Some(now) = int(o.level, o.name).filter(|_| !skip) {
            d.options().set_value(i, now);
        }
    }
    let mut linger = [0u8; 8];
    if sys::getsockopt(fd, S, libc::SO_LINGER, &mut linger).is_ok() {
        for (i, at) in [(LINGER_ON, 0), (LINGER_SECS, 4)] {
            let v = [linger[at], linger[at + 1], linger[at + 2], linger[at + 3]];
            d.options().set_value(i, i32::from_ne_bytes(v));
        }
    }
    let timeout = |name| {
        let mut t = [0u8; 16];
        sys::getsockopt(fd, S, name, &mut t).ok()?;
        let part = |at: usize| t[at..at + 8].try_into().map_or(0, u64::from_ne_bytes);
        Some(part(0).saturating_mul(1_000_000_000).saturating_add(part(8) * 1000))
    };
    if let Some(ns) = timeout(libc::SO_RCVTIMEO) {
        d.options().set_receive_timeout(ns);
    }
    if let Some(ns) = timeout(libc::SO_SNDTIMEO) {
        d.options().set_send_timeout(ns);
    }
    let flags = sys::fcntl(fd, libc::F_GETFL, 0).unwrap_or(0);
    d.placeholder().set_nonblock(flags & libc::O_NONBLOCK != 0);
}

/// Sets on a kernel socket what the program has set on the connection.
pub fn apply(d: &Desc, fd: i32) {
    let s = d.sock();
    kept::apply_options(d, fd);
    for (i, o) in TABLE.iter().enumerate() {
        let v = s.option(i);
        if v != o.default && (o.level, o.name) != (T, libc::TCP_DEFER_ACCEPT) {
            // The kernel doubles buffer sizes, and the recorded value is doubled, too.
            let v = if matches!(i, SNDBUF | RCVBUF) { v / 2 } else { v };
            let _ = sys::setsockopt(fd, o.level, o.name, &v.to_ne_bytes());
        }
    }
    let linger = s.option(LINGER_ON);
    if linger != 0 {
        let mut l = [0u8; 8];
        l[..4].copy_from_slice(&linger.to_ne_bytes());
        l[4..].copy_from_slice(&s.option(LINGER_SECS).to_ne_bytes());
        let _ = sys::setsockopt(fd, S, libc::SO_LINGER, &l);
    }
    for (name, ns) in [(libc::SO_RCVTIMEO, s.receive_timeout()), (libc::SO_SNDTIMEO, s.send_timeout())] {
        if ns != 0 {
            let mut t = [0u8; 16];
            let secs = if ns == AT_ONCE { -1 } else { (ns / 1_000_000_000) as i64 };
            t[..8].copy_from_slice(&secs.to_ne_bytes());
            t[8..].copy_from_slice(&(ns / 1000 % 1_000_000).to_ne_bytes());
            let _ = sys::setsockopt(fd, S, name, &t);
        }
    }
}
