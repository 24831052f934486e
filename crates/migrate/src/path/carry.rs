//! Bytes that change over from a ring to the kernel connection.

use super::pair::is_across;
use super::patience::PATIENCE_NS;
use crate::stage::peer_status;
use crate::table::Desc;
use crate::{conn, stats, token};
use core::sync::atomic::Ordering;
use fsocket_abi::arena::Counter;
use fsocket_abi::channel::{status, Dir, RING_CAP};
use fsocket_abi::half::Half;
use fsocket_ring::{self as ring, Mapped};
use fsocket_sys::{self as sys, Errno};

/// Bytes moved per step; stack memory. A Unix socket counts the memory that such a message takes, and with what the kernel
/// puts beside it, 8 KiB of bytes take 16 KiB: what [`crate::values::size_buffers`] lets into a ring would not fit.
const STEP: usize = 8 * 1024 - 512;

/// The bytes that the other side has not read come first in its kernel socket. It goes on reading the ring until it follows, and
/// then passes over what it has read ([`pass_over`]). Left in the ring it would keep the socket from whatever needs it whole:
/// nothing can be put in front of what that has received. (Where it cannot be told what is unread, or the socket
/// has no room for it, it stays: [`Path::Draining`]. So it does where the connection has been another one in the kernel at each
/// side, as those to other hosts have, with an agent's stand-in: what is sent in the one does not come out of the other.)
pub(super) fn carry(d: &'static Desc, own: i32) {
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
    // SAFETY: atomics only; zero is valid. The reader's own stay as they are.
    let (copy, from): (Half, Dir) = unsafe { (core::mem::zeroed(), core::mem::zeroed()) };
    copy.pos.store(unread.pos, Ordering::Relaxed);
    copy.base.store(unread.base, Ordering::Relaxed);
    copy.limit.store(unread.limit, Ordering::Relaxed);
    let nodelay = |on: i32| sys::setsockopt(own, libc::IPPROTO_TCP, libc::TCP_NODELAY, &on.to_ne_bytes());
    let _ = nodelay(1);
    if !pour_all(r, &from, &copy, own) {
        return conn::poison(d);
    }
    let _ = nodelay(0);
    let at = &d.slot().migrated[d.side()];
    at.base.store(h.bytes.load(Ordering::Relaxed).wrapping_sub(unread.bytes), Ordering::Relaxed);
    at.limit.store(unread.bytes, Ordering::Relaxed);
    // Release: the two above.
    tx.prod.status.fetch_or(status::CARRIED, Ordering::Release);
}

/// The other side of [`carry`]: `fd`, this side's kernel socket, begins behind what was read of the ring, and nothing of that
/// is read any more. False: nonsense, or it does not come.
pub(super) fn pass_over(d: &Desc, fd: i32) -> bool {
    if peer_status(d) & status::CARRIED == 0 {
        return true;
    }
    let rxh = d.rx().2;
    let Ok(_t) = token::enter(rxh) else { return false };
    let at = &d.slot().migrated[(1 - d.side()) & 1];
    let (first, n) = (at.base.load(Ordering::Relaxed), at.limit.load(Ordering::Relaxed));
    let mut read = rxh.bytes.load(Ordering::Relaxed).wrapping_sub(first);
    if n > RING_CAP as u64 || read > n {
        stats::count(Counter::HostilePeer);
        return false;
    }
    d.sock().flags.drain();
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
        // SAFETY: STEP bytes are there; the caller is the ring's only consumer, or `dir` and `h` are copies of its own.
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
