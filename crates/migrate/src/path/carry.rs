//! Bytes that change over from a ring to the kernel connection.

use super::pair::is_across;
use super::patience::PATIENCE_NS;
use crate::table::Desc;
use crate::{conn, stats, token};
use fsocket_abi::arena::Counter;
use fsocket_abi::channel::Dir;
use fsocket_abi::half::Half;
use fsocket_abi::path_switch::{Looked, Skip};
use fsocket_ring::{self as ring, Mapped};
use fsocket_sys::{self as sys, Errno};

/// Bytes moved per step; stack memory. A Unix socket counts the memory that such a message takes, and with what the kernel
/// puts beside it, 8 KiB of bytes take 16 KiB: what [`crate::values::size_buffers`] lets into a ring would not fit.
const STEP: usize = 8 * 1024 - 512;

/// The bytes that the other side has not read come first in its kernel socket. It goes on reading the ring until it follows, and
/// then passes over what it has read ([`pass_over`]). Left in the ring it would keep the socket from whatever needs it whole:
/// nothing can be put in front of what that has received. (Where it cannot be told what is unread, or the socket
/// has no room for it, it stays: `PathState::Draining`. So it does where the connection has been another one in the kernel at each
/// side, as those to other hosts have, with an agent's stand-in: what is sent in the one does not come out of the other.)
pub(super) fn carry(d: &'static Desc, own: i32, words: &Looked) {
    if is_across(d) && !d.is_unix() {
        return;
    }
    let (r, tx, h) = d.tx();
    let Some(unread) = ring::unread_records(r, tx, h).filter(|u| u.bytes > 0) else { return };
    let mut room = [0u8; 4];
    let asked = sys::getsockopt(own, libc::SOL_SOCKET, libc::SO_SNDBUF, &mut room);
    if asked.is_err() || u64::from(u32::from_ne_bytes(room)) < unread.bytes * 3 {
        return;
    }
    let copy = Half::default();
    // SAFETY: atomics only; zero is valid. The reader's own stay as they are.
    let from: Dir = unsafe { core::mem::zeroed() };
    copy.set_pos(unread.pos);
    copy.set_base(unread.base);
    copy.set_limit(unread.limit);
    let nodelay = |on: i32| sys::setsockopt(own, libc::IPPROTO_TCP, libc::TCP_NODELAY, &on.to_ne_bytes());
    let _ = nodelay(1);
    if !pour_all(r, &from, &copy, own) {
        return conn::poison(d);
    }
    let _ = nodelay(0);
    let first = h.bytes().wrapping_sub(unread.bytes);
    words.carried(&d.slot().migrated[d.side()], first, unread.bytes);
}

/// The other side of [`carry`]: `fd`, this side's kernel socket, begins behind what was read of the ring, and nothing of that
/// is read any more. False: nonsense, or it does not come.
// (Not inlined: its buffer would be on the stack together with that of [`pour_all`].)
#[inline(never)]
pub(super) fn pass_over(d: &Desc, fd: i32) -> bool {
    let peer = d.peer_status();
    if !peer.has_carried() {
        return true;
    }
    let rxh = d.rx().2;
    let Ok(_t) = token::enter(rxh) else { return false };
    let from = &d.slot().migrated[(1 - d.side()) & 1];
    let Skip::Bytes(mut read) = Skip::begin(&d.sock().flags, peer, from, rxh) else {
        stats::count(Counter::HostilePeer);
        return false;
    };
    let until = sys::now_ns() + PATIENCE_NS;
    let mut over = core::mem::MaybeUninit::<[u8; STEP]>::uninit();
    while read > 0 && sys::now_ns() < until {
        // (A Unix socket knows no MSG_TRUNC.)
        let n = if d.is_unix() { read.min(STEP as u64) } else { read };
        // SAFETY: TCP writes nothing with MSG_TRUNC, and a Unix socket no more than there is room for.
        match unsafe { sys::recv(fd, over.as_mut_ptr().cast(), n as usize, libc::MSG_TRUNC | libc::MSG_DONTWAIT) } {
            Ok(0) => return false,
            Ok(k) => read -= (k as u64).min(read),
            Err(Errno::EAGAIN) => {
                let mut p = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
                // SAFETY: one pollfd.
                let _ = unsafe { sys::ppoll(&mut p, 1, Some(100_000_000), core::ptr::null()) };
            }
            Err(Errno::EINTR) => {}
            Err(_) => return false,
        }
    }
    read == 0
}

/// Take what can be read out of a ring and send it on in a kernel socket. False:
/// something is left.
fn pour(r: Mapped, dir: &Dir, h: &Half, to: i32) -> bool {
    let mut buf = core::mem::MaybeUninit::<[u8; STEP]>::uninit();
    let p = buf.as_mut_ptr() as *mut u8;
    loop {
        // SAFETY: STEP bytes are there. The ring has one consumer, who is here with its token, or `dir` and `h` are copies.
        let n = match unsafe { ring::recv(r, dir, h, Some(p), STEP, true) } {
            Ok(0) => return true,
            Ok(n) => n,
            Err(_) => return false,
        };
        // SAFETY: `n` bytes were written.
        match unsafe { sys::send(to, p, n, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) } {
            Ok(k) => {
                // SAFETY: nothing is written.
                let _ = unsafe { ring::recv(r, dir, h, None, k, false) };
            }
            Err(Errno::EINTR) => {}
            // Gone: as in the kernel, nobody gets it any more.
            Err(Errno::EPIPE | Errno::ECONNRESET) => return true,
            Err(_) => return false,
        }
    }
}

/// [`pour`] until nothing is left; the kernel's buffer takes a whole ring unless
/// the monitor has no privilege to enlarge it.
pub(super) fn pour_all(r: Mapped, dir: &Dir, h: &Half, to: i32) -> bool {
    let until = sys::now_ns() + PATIENCE_NS;
    while !pour(r, dir, h, to) {
        let mut p = libc::pollfd { fd: to, events: libc::POLLOUT, revents: 0 };
        // SAFETY: one pollfd.
        let _ = unsafe { sys::ppoll(&mut p, 1, Some(100_000_000), core::ptr::null()) };
        if sys::now_ns() > until {
            return false;
        }
    }
    true
}
