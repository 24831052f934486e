//! Asks the kernel about a connection that may move: its addresses, and whether the connection is
//! at rest.

use super::unix_rest as unix;
use crate::table::Desc;
use crate::{name, registry};
use fsocket_proto::Addr;
use fsocket_sys as sys;

pub(super) fn own_of(fd: i32) -> Option<Addr> {
    let mut b = [0u8; 28];
    let n = sys::getsockname(fd, &mut b).ok()?;
    // SAFETY: the buffer has the given length.
    unsafe { name::parse(b.as_ptr() as *const libc::sockaddr, n as u32) }
}

pub(super) fn peer_of(fd: i32) -> Option<Addr> {
    let mut b = [0u8; 28];
    let n = sys::getpeername(fd, &mut b).ok()?;
    // SAFETY: the buffer has the given length.
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

/// Would a close of the socket wait (SO_LINGER)? Then the monitor's copy matters: until the
/// monitor closes it, a close by the program is not the last one, and does not wait.
pub(super) fn lingers(fd: i32) -> bool {
    let mut v = [0u8; 8];
    let known = sys::getsockopt(fd, libc::SOL_SOCKET, libc::SO_LINGER, &mut v).is_ok();
    known && v[..4] != [0; 4] && v[4..] != [0; 4]
}

/// Number of bytes of each direction since the connection began.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) sent: u64,
    pub(super) received: u64,
}

/// The addresses of this end and of the peer.
pub(super) fn ends_of(fd: i32, d: &Desc) -> Option<(Addr, Addr)> {
    match d.is_unix() {
        true => Some((Addr { family: libc::AF_UNIX as u16, ..Addr::default() }, unix::peer_of(fd))),
        false => own_of(fd).zip(peer_of(fd)),
    }
}

/// If the connection is at rest: the number of bytes that have passed.
pub(super) fn rest_of(fd: i32, d: &Desc) -> Option<Counts> {
    if d.is_unix() {
        unix::at_rest(fd).then_some(Counts { sent: 0, received: 0 })
    } else {
        at_rest(fd)
    }
}

/// Is a connection that was at rest still at rest? No calls were made on it since then.
pub(super) fn still_rests(fd: i32, d: &Desc, counts: Counts) -> bool {
    if d.is_unix() {
        unix::is_empty(fd)
    } else {
        has_passed(fd) == Some(counts)
    }
}

/// Returns the bytes that have passed if the connection is at rest: connected, nothing to read,
/// nothing held back, and no option that changes the meaning of bytes. If the other side reports
/// the same numbers, nothing is in flight. (Unacknowledged bytes say little, because the kernel
/// delays an acknowledgement to send it with data.)
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

/// Has the socket none of those options that need the kernel and that it may have inherited from
/// its listener?
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

/// Returns the byte counts, if the socket is connected and the kernel holds back nothing. After
/// [`at_rest`] this check is enough if no calls were made since: no thread has read, and new
/// bytes would change the counts.
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
    // Retransmitted bytes count twice in the first number and once in the second. (If the first
    // number is too large, the counts of both sides never agree, and the connection stays in the
    // kernel.)
    let sent = long(BYTES_SENT).wrapping_sub(long(BYTES_RETRANS));
    rest.then(|| Counts { sent, received: long(BYTES_RECEIVED) })
}

/// Would a connection over shared memory have the same addresses?
pub(super) fn usual(client: &Addr, server: &Addr) -> bool {
    client.port >= 1024 && name::source_for(&server.ip) == client.ip
}
