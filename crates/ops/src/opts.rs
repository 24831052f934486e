//! Socket options and descriptor flags of connections.
//!
//! Before the path is chosen, options go to the kernel, which checks them, and the library
//! remembers them. On a connection over shared memory the library handles the common integer
//! options alone; the placeholder (a kernel socket) answers for the others.

mod answer;
pub mod before;
mod effect;
pub mod extra;
mod flags;
mod info;
mod nat;
mod unix;

use crate::kept;
use crate::table::{Desc, Kind};
use crate::{ready, user, Cause, Outcome};
use fsocket_abi::channel::sharing;
use fsocket_abi::path_switch::PathState;
use fsocket_sys::{self as sys, Errno, Result};

use crate::options::*;
use crate::options::{AT_ONCE, V6ONLY};
use crate::values::{learn, size_buffers};
use crate::values::{set_value, size_lowat};
use effect::Effect;
pub use extra::sends;
pub use flags::{fcntl, inquired, ioctl, is_kernels, nonblock_from_below, survives};
use fsocket_abi::sock::{LINGER_ON, LINGER_SECS};

const S: i32 = libc::SOL_SOCKET;
const T: i32 = libc::IPPROTO_TCP;
/// SO_RCVTIMEO and SO_SNDTIMEO with 64-bit seconds. (On this platform the old ones have 64 bits,
/// too.)
const RCVTIMEO_NEW: i32 = 66;
const SNDTIMEO_NEW: i32 = 67;
/// Numbers from include/uapi/linux/tcp.h, which the libc crate lacks.
const TCP_FASTOPEN_NO_COOKIE: i32 = 34;
const TCP_ZEROCOPY_RECEIVE: i32 = 35;
/// Do accepted connections get this option from the fields of [`Desc::options`] or similar ones?
fn is_inherited(level: i32, name: i32) -> bool {
    const FORCED: [i32; 2] = [libc::SO_SNDBUFFORCE, libc::SO_RCVBUFFORCE];
    const TIMES: [i32; 4] = [libc::SO_RCVTIMEO, libc::SO_SNDTIMEO, RCVTIMEO_NEW, SNDTIMEO_NEW];
    let beside = name == libc::SO_LINGER || FORCED.contains(&name) || TIMES.contains(&name);
    find(level, name).is_some() || level == S && beside
}

fn find(level: i32, name: i32) -> Option<usize> {
    TABLE.iter().position(|o| o.level == level && o.name == name)
}

/// # Safety
/// `val` points to `len` bytes, as the program passed it.
pub unsafe fn set(fd: i32, d: &'static Desc, level: i32, name: i32, val: *const u8, len: u32) -> Outcome<Result<()>> {
    if (len as i32) < 0 {
        return Outcome::Kernel(Cause::Invalid); // EINVAL
    }
    if d.is_unix() && crate::path::still_ours(d) {
        // SAFETY: `val` and `len` come from the program, and the kernel checks them.
        return unsafe { unix::set(fd, d, level, name, val, len) };
    }
    let number = |n: u32| len >= n && user::readable(val, n as usize);
    // (Shorter values than 4 bytes: EINVAL, except for names of TCP.)
    let names = [(S, libc::SO_BINDTODEVICE), (T, libc::TCP_CONGESTION), (T, libc::TCP_ULP)];
    if len >= 4 || !matches!(level, S | T) || names.contains(&(level, name)) {
        // SAFETY: `number(4)` has found that many bytes readable.
        extra::before(d, level, name, if number(4) { unsafe { (val as *const i32).read_unaligned() } } else { 1 });
    }
    let conn = crate::path::still_ours(d);
    if !conn && d.is_gone() {
        return Outcome::Kernel(Cause::NotOurs);
    }
    if effect::of(level, name) == Effect::Unknown {
        // SAFETY: `val` and `len` come from the program. Bytes that were not found readable are
        // read only by guarded copies and by the kernel.
        return Outcome::Done(unsafe { extra::set_unknown(fd, d, (level, name), val, len) });
    }
    if !number(4) {
        d.placeholder().mark_changed();
        if number(1) {
            kept::kept(d, level, name);
        }
        return Outcome::Kernel(Cause::Below);
    }
    // SAFETY: `number(4)` has read the first four bytes; only the kernel reads the others.
    let there = unsafe { core::slice::from_raw_parts(val, len as usize) };
    if let PathState::Draining(k) = d.path_state() {
        let _ = sys::setsockopt(k, level, name, there);
    }
    // SAFETY: `number(4)` has found at least four bytes readable.
    let v = unsafe { (val as *const i32).read_unaligned() };
    if !conn {
        return Outcome::Done(set_in_kernel(fd, d, (level, name), v, there));
    }
    if let Some(i) = buffer(level, name) {
        return Outcome::Done(set_buffer(fd, d, (level, name), i, there));
    }
    if let Some(refused) = refused(d, level, name, v) {
        return refused;
    }
    // SAFETY: `val` and `len` come from the program. Bytes that were not found readable are read only by
    // guarded copies and by the kernel.
    if unsafe { remember(d, level, name, v, val, len) } {
        return Outcome::Done(Ok(()));
    }
    kept::kept(d, level, name);
    if (level, name) == (S, libc::SO_REUSEPORT) {
        crate::establish::share(d, sharing::PORT, v != 0);
    }
    // A rare option: the placeholder checks and keeps it.
    d.placeholder().mark_changed();
    Outcome::Kernel(Cause::Below)
}

/// Sets an option of a socket that is not a connection over shared memory. The kernel decides,
/// and the library remembers the options that the kernel accepts.
fn set_in_kernel(fd: i32, d: &'static Desc, (level, name): (i32, i32), v: i32, val: &[u8]) -> Result<()> {
    if d.kind() == Kind::Listener && is_inherited(level, name) {
        before::changes(fd, d);
    }
    sys::setsockopt(fd, level, name, val)?;
    d.placeholder().mark_changed();
    // SAFETY: `val` is a slice.
    let known = || unsafe { remember(d, level, name, v, val.as_ptr(), val.len() as u32) };
    if buffer(level, name).is_none_or(|i| !learn(d, fd, i)) && !known() {
        kept::kept(d, level, name);
    }
    Ok(())
}

/// Sets option `i`, the size of a buffer. The placeholder knows the system's limits.
fn set_buffer(fd: i32, d: &'static Desc, (level, name): (i32, i32), i: usize, val: &[u8]) -> Result<()> {
    d.placeholder().mark_changed();
    sys::setsockopt(fd, level, name, val)?;
    if !learn(d, fd, i) {
        return Ok(());
    }
    size_buffers(d);
    if i == RCVLOWAT {
        size_lowat(d);
        // The bytes in the ring may be enough now (SO_RCVLOWAT), or the stream has ended.
        if crate::ready::wanted(d) {
            d.sock().note_edge();
        }
    }
    // With a larger buffer, there may be room for a waiting sender.
    if matches!(i, RCVLOWAT | SNDBUF) {
        crate::conn::wake_own(d);
    }
    Ok(())
}

/// The result for an option that a connection refuses. None: it does not.
fn refused(d: &Desc, level: i32, name: i32, v: i32) -> Option<Outcome<Result<()>>> {
    if (level, name) == (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY) {
        // An IPv6 socket refuses this once it has a port. For an IPv4 socket the kernel has the
        // right error.
        match d.family() == libc::AF_INET6 as u32 {
            true if ready::over(d) => {}
            true => return Some(Outcome::Done(Err(Errno::EINVAL))),
            false => return Some(Outcome::Kernel(Cause::Below)),
        }
    }
    if (level, name) == (T, libc::TCP_MAXSEG) {
        // The value has no effect on a connection, but the kernel still checks its range
        // (TCP_MIN_MSS, MAX_TCP_WINDOW).
        let legal = v == 0 || (88..=32767).contains(&v);
        return Some(Outcome::Done(if legal { Ok(()) } else { Err(Errno::EINVAL) }));
    }
    // From here on: options that only a closed or listening socket accepts.
    match (level, name) {
        _ if ready::over(d) => {}
        (T, libc::TCP_QUEUE_SEQ) => return Some(Outcome::Done(Err(Errno::new(libc::EPERM)))),
        (T, libc::TCP_FASTOPEN | libc::TCP_FASTOPEN_CONNECT | TCP_FASTOPEN_NO_COOKIE) => {
            return Some(Outcome::Done(Err(Errno::EINVAL)));
        }
        _ => {}
    }
    if (level, name, v) == (T, libc::TCP_WINDOW_CLAMP, 0) {
        return Some(Outcome::Done(Err(Errno::EINVAL))); // not while the socket is connected
    }
    None
}

/// Index of an option that is the size of a buffer.
fn buffer(level: i32, name: i32) -> Option<usize> {
    match (level, name) {
        (S, libc::SO_SNDBUF | libc::SO_SNDBUFFORCE) => Some(SNDBUF),
        (S, libc::SO_RCVBUF | libc::SO_RCVBUFFORCE) => Some(RCVBUF),
        (S, libc::SO_RCVLOWAT) => Some(RCVLOWAT),
        _ => None,
    }
}

/// # Safety
/// `val` is readable for `len` bytes.
unsafe fn remember(d: &'static Desc, level: i32, name: i32, v: i32, val: *const u8, len: u32) -> bool {
    let number = |n: u32| len >= n && user::readable(val, n as usize);
    match (level, name) {
        (S, libc::SO_LINGER) if number(8) => {
            // SAFETY: `number(8)` has found eight bytes readable.
            let secs = unsafe { (val as *const i32).add(1).read_unaligned() };
            set_value(d, LINGER_ON, (v != 0) as i32);
            set_value(d, LINGER_SECS, secs);
            true
        }
        (S, libc::SO_RCVTIMEO | libc::SO_SNDTIMEO | RCVTIMEO_NEW | SNDTIMEO_NEW) if number(16) => {
            // SAFETY: a timeval was found readable at `val`.
            let t = unsafe { (val as *const libc::timeval).read_unaligned() };
            set_timeout(d, matches!(name, libc::SO_RCVTIMEO | RCVTIMEO_NEW), &t)
        }
        _ => find(level, name).is_some_and(|i| set_number(d, i, v)),
    }
}

/// Sets a timeout. False: the kernel refuses the value.
fn set_timeout(d: &Desc, receive: bool, t: &libc::timeval) -> bool {
    if !(0..1_000_000).contains(&t.tv_usec) {
        return false;
    }
    let ns = (t.tv_sec.max(0) as u64).saturating_mul(1_000_000_000).saturating_add(t.tv_usec as u64 * 1000);
    let ns = match sys::clock_tick_ns() {
        _ if t.tv_sec < 0 => AT_ONCE,
        _ if ns == u64::MAX => 0, // too long to count: no timeout
        0 => ns,
        tick => ns.div_ceil(tick).saturating_mul(tick), // the kernel counts in ticks
    };
    match (d.is_conn(), receive) {
        (true, true) => d.sock().set_receive_timeout(ns),
        (true, false) => d.sock().set_send_timeout(ns),
        (false, true) => d.options().set_receive_timeout(ns),
        (false, false) => d.options().set_send_timeout(ns),
    }
    true
}

/// Sets option `i` of the table. False: the kernel refuses the value.
fn set_number(d: &'static Desc, i: usize, v: i32) -> bool {
    let t = &TABLE[i];
    if (t.min, t.max) == (i32::MIN, 1) {
        set_value(d, i, (v != 0) as i32);
        if i == REUSEADDR && d.is_conn() {
            crate::establish::share(d, sharing::ADDRESS, v != 0);
        }
        return true;
    }
    if v < t.min || v > t.max {
        return false;
    }
    let v = match i {
        // As the kernel does: it doubles buffer sizes, and has a minimum.
        SNDBUF => v.min(212_992).saturating_mul(2).max(4608),
        RCVBUF => v.min(212_992).saturating_mul(2).max(2304),
        RCVLOWAT => v.max(1),
        _ => v,
    };
    set_value(d, i, v);
    if i == USER_TIMEOUT && d.is_conn() {
        crate::stuck::sent(d);
    }
    if matches!(i, NOTSENT_LOWAT | WINDOW_CLAMP) && d.is_conn() {
        size_buffers(d);
        // There may be room for a waiting sender now.
        crate::conn::wake_own(d);
    }
    true
}

/// The bytes of a `struct timeval`.
fn pair(seconds: i64, microseconds: i64) -> [u8; 16] {
    let mut bytes = [0u8; 16];
    bytes[..8].copy_from_slice(&seconds.to_ne_bytes());
    bytes[8..].copy_from_slice(&microseconds.to_ne_bytes());
    bytes
}

/// The answer contains pages with received data, or says that none will come. Only a kernel connection has these, so the
/// connection moves there.
fn gives_pages(d: &'static Desc) {
    if d.is_conn() && (crate::conn::ring_has(d) || crate::ready::state(d).fin) {
        extra::leave(d);
    }
}

/// # Safety
/// Both pointers come from the program; they may be bad.
pub unsafe fn get(
    fd: i32,
    d: &'static Desc,
    level: i32,
    name: i32,
    out: *mut u8,
    len: *mut u32,
) -> Outcome<Result<()>> {
    // SAFETY: the program says that this is its memory; the copy returns EFAULT where nothing is.
    let room = unsafe { user::get(len) };
    if (level, name) == (T, TCP_ZEROCOPY_RECEIVE) && room.is_ok_and(|n| n >= 12) {
        gives_pages(d);
    }
    if (level, name) == (T, libc::TCP_INFO) && d.kind() == Kind::Listener {
        // SAFETY: the program says that this is its memory; the copy returns EFAULT where nothing is.
        return Outcome::Done(unsafe { info::of_listener(fd, d, out, len) });
    }
    if !crate::path::still_ours(d) {
        return Outcome::Kernel(Cause::NotOurs);
    }
    if d.is_unix() {
        // SAFETY: the program says that this is its memory; the copy returns EFAULT where nothing is.
        return unsafe { unix::get(d, level, name, out, len) };
    }
    if extra::answers_below(level, name) {
        // SAFETY: the program says that this is its memory; the copy returns EFAULT where nothing is.
        return unsafe { extra::get_below(fd, d, (level, name), out, len) };
    }
    // (A negative length: the kernel returns EINVAL, and a pending error stays pending.)
    let Some(room) = room.ok().filter(|n| *n as i32 >= 0) else { return Outcome::Kernel(Cause::Invalid) };
    let to = Place { level, out, len, room };
    match answer::of(fd, d, level, name, room) {
        Some(Ok(answer::Answer::Int(v))) => to.int(v),
        Some(Ok(answer::Answer::Bytes(b, n))) => to.put(&b[..n]),
        Some(Err(e)) => Outcome::Done(Err(e)),
        None => own(fd, d, level, name, &to),
    }
}

/// Where `getsockopt` puts its answer. Both pointers come from the program and may be bad: only
/// copies that return EFAULT use them.
struct Place {
    level: i32,
    out: *mut u8,
    len: *mut u32,
    room: u32,
}

impl Place {
    fn put(&self, b: &[u8]) -> Outcome<Result<()>> {
        let n = b.len().min(self.room as usize);
        self.give(&b[..n], n as u32)
    }
    /// `len`: the length that the program gets.
    fn give(&self, b: &[u8], len: u32) -> Outcome<Result<()>> {
        // SAFETY: the program says that this is its memory; the copy returns EFAULT where nothing is.
        Outcome::Done(unsafe { user::give(b, self.out, self.len, len) })
    }
    fn int(&self, v: i32) -> Outcome<Result<()>> {
        match u8::try_from(v) {
            // (If there is no room for an int, options of IP are returned as one byte:
            // `do_ip_getsockopt`.)
            Ok(byte) if self.level == libc::IPPROTO_IP && (1..4).contains(&self.room) => self.put(&[byte]),
            _ => self.put(&v.to_ne_bytes()),
        }
    }
    fn time(&self, ns: u64) -> Outcome<Result<()>> {
        self.put(&pair((ns / 1_000_000_000) as i64, (ns / 1000 % 1_000_000) as i64))
    }
}

/// The options that a connection answers itself.
fn own(fd: i32, d: &'static Desc, level: i32, name: i32, to: &Place) -> Outcome<Result<()>> {
    let s = d.sock();
    match (level, name) {
        fsocket_proto::agent::SOCKOPT => to.put(&answer::place(d)),
        (S, libc::SO_ERROR) => to.int(ready::take_error(d)),
        (S, libc::SO_DOMAIN) => to.int(s.family() as i32),
        (S, libc::SO_ACCEPTCONN) => to.int(0),
        (S, libc::SO_RCVTIMEO | RCVTIMEO_NEW) => to.time(s.receive_timeout()),
        (S, libc::SO_SNDTIMEO | SNDTIMEO_NEW) => to.time(s.send_timeout()),
        (S, libc::SO_LINGER) => {
            let mut b = [0u8; 8];
            b[..4].copy_from_slice(&s.option(LINGER_ON).to_ne_bytes());
            b[4..].copy_from_slice(&s.option(LINGER_SECS).to_ne_bytes());
            to.put(&b)
        }
        (T, libc::TCP_INFO) => match info::of_connection(fd, d) {
            Ok((info, n)) => to.put(&info[..n]),
            Err(e) => Outcome::Done(Err(e)),
        },
        (libc::IPPROTO_IP | libc::IPPROTO_IPV6, nat::SO_ORIGINAL_DST) => match nat::original(fd, d, level, to.room) {
            // As in the kernel, the length stays unchanged.
            Ok((a, n)) => to.give(&a[..n], to.room),
            Err(e) => Outcome::Done(Err(e)),
        },
        _ => match find(level, name) {
            Some(V6ONLY) if s.family() != libc::AF_INET6 as u16 => Outcome::Kernel(Cause::Below),
            Some(i) => to.int(s.option(i)),
            None => Outcome::Kernel(Cause::Below),
        },
    }
}
