//! What the kernel says of a connection that may go over: its addresses, and whether it is at rest.

use super::unix_rest as unix;
use crate::table::Desc;
use crate::{name, registry};
use fsocket_proto::Addr;
use fsocket_sys as sys;

pub(super) fn own_of(fd: i32) -> Option<Addr> {
    let mut b = [0u8; 28];
    let n = sys::getsockname(fd, &mut b).ok()?;
    // SAFETY: the buffer is as long as said.
    unsafe { name::parse(b.as_ptr() as *const libc::sockaddr, n as u32) }
}

pub(super) fn peer_of(fd: i32) -> Option<Addr> {
    let mut b = [0u8; 28];
    let n = sys::getpeername(fd, &mut b).ok()?;
    // SAFETY: the buffer is as long as said.
    unsafe { name::parse(b.as_ptr() as *const libc::sockaddr, n as u32) }
}

pub(super) fn is_here(ip: &[u8; 16]) -> bool {
    name::is_loopback(ip) || registry::mapped().is_some_and(|r| r.has_local(ip))
}

fn unread(fd: i32) -> Option<i32> {
    let mut n = -1i32;
    let args = [fd as usize, libc::FIONREAD as usize, &mut n as *mut i32 as usize, 0, 0, 0];
    // SAFETY: the kernel writes an int.
    unsafe { sys::raw(libc::SYS_ioctl, args) }.ok()?;
    Some(n)
}

/// Would a close of it wait? The monitor then takes its time with the copy that it is shown,
/// and for so long a close by the program is not the last one.
pub(super) fn lingers(fd: i32) -> bool {
    let mut v = [0u8; 8];
    let known = sys::getsockopt(fd, libc::SOL_SOCKET, libc::SO_LINGER, &mut v).is_ok();
    known && v[..4] != [0; 4] && v[4..] != [0; 4]
}

/// Bytes of each direction, from the beginning of the connection.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) sent: u64,
    pub(super) received: u64,
}

/// Both ends' addresses.
pub(super) fn ends_of(fd: i32, d: &Desc) -> Option<(Addr, Addr)> {
    match d.is_unix() {
        true => Some((Addr { family: libc::AF_UNIX as u16, ..Addr::default() }, unix::peer_of(fd))),
        false => own_of(fd).zip(peer_of(fd)),
    }
}

/// What has passed, of a connection at rest.
pub(super) fn rest_of(fd: i32, d: &Desc) -> Option<Counts> {
    if d.is_unix() {
        unix::at_rest(fd).then_some(Counts { sent: 0, received: 0 })
    } else {
        at_rest(fd)
    }
}

/// Is one that was at rest still so? Its calls are kept out since.
pub(super) fn still_rests(fd: i32, d: &Desc, counts: Counts) -> bool {
    if d.is_unix() {
        unix::is_empty(fd)
    } else {
        has_passed(fd) == Some(counts)
    }
}

/// Connected, with nothing to read and nothing kept back, and nothing on it that changes
/// what bytes mean: what has passed. If the other side says the same, nothing is on its way. (What
/// is not acknowledged yet says little: the kernel waits with that for a chance to send.)
fn at_rest(fd: i32) -> Option<Counts> {
    const TCP_ULP: i32 = 31;
    let counts = has_passed(fd)?;
    let mut ulp = [0u8; 16];
    let plain = sys::getsockopt(fd, libc::IPPROTO_TCP, TCP_ULP, &mut ulp).is_ok_and(|_| ulp[0] == 0);
    let zero = |name| {
        let mut v = [0u8; 4];
        sys::getsockopt(fd, libc::SOL_SOCKET, name, &mut v).is_ok() && v == [0; 4]
    };
    (unread(fd) == Some(0) && plain && zero(libc::SO_ZEROCOPY) && is_usual(fd)).then_some(counts)
}

/// Is nothing set on it that only a kernel connection has, of what it may have from its listener?
fn is_usual(fd: i32) -> bool {
    const SO_MAX_PACING_RATE: i32 = 47;
    const TCP_TX_DELAY: i32 = 37;
    let usual = |level, name, value: i32| {
        let mut v = [0u8; 4];
        sys::getsockopt(fd, level, name, &mut v).is_err() || i32::from_ne_bytes(v) == value
    };
    let stamps = [libc::SO_TIMESTAMP, libc::SO_TIMESTAMPNS, libc::SO_TIMESTAMPING];
    usual(libc::SOL_SOCKET, SO_MAX_PACING_RATE, -1)
        && stamps.iter().all(|name| usual(libc::SOL_SOCKET, *name, 0))
        && usual(libc::IPPROTO_TCP, TCP_TX_DELAY, 0)
}

/// The bytes that have passed, if it is connected and nothing is kept back. Enough for one that was [`at_rest`] and whose
/// calls are kept out since: nobody has read, and bytes that have come would be counted.
fn has_passed(fd: i32) -> Option<Counts> {
    const ESTABLISHED: u8 = 1;
    /// Offsets into `struct tcp_info` (linux/tcp.h), complete since 4.19.
    const BYTES_RECEIVED: usize = 128;
    const NOTSENT_BYTES: usize = 144;
    const BYTES_SENT: usize = 200;
    const BYTES_RETRANS: usize = 208;
    let mut info = [0u8; 224];
    if sys::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, &mut info).ok()? < info.len() {
        return None;
    }
    let int = |at: usize| info[at..].first_chunk().map_or(0, |b| u32::from_ne_bytes(*b));
    let long = |at: usize| info[at..].first_chunk().map_or(0, |b| u64::from_ne_bytes(*b));
    let rest = info[0] == ESTABLISHED && int(NOTSENT_BYTES) == 0;
    // What was sent twice is counted twice, and then once for that. (Too much of the first never makes two
    // counts equal while something is on its way; the connection stays where it is.)
    let sent = long(BYTES_SENT).wrapping_sub(long(BYTES_RETRANS));
    rest.then(|| Counts { sent, received: long(BYTES_RECEIVED) })
}

/// The addresses are those that a connection of ours would have.
pub(super) fn usual(client: &Addr, server: &Addr) -> bool {
    client.port >= 1024 && name::source_for(&server.ip) == client.ip
}
