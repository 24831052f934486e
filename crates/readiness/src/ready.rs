//! Readiness of a connection or listener over shared memory, as `poll` and `epoll` report it. All waiting calls ask
//! here, so they agree.

use crate::listen;
use crate::table::{Desc, Kind};
use crate::upcalls::watcher;
use crate::values;
use core::sync::atomic::Ordering;
use fsocket_abi::channel::{status, Dir};
use fsocket_abi::flags::FlagSet;
use fsocket_abi::half::Half;
use fsocket_abi::path_switch::{Event, Next};
use fsocket_abi::sock::Sock;
use fsocket_ring as ring;
use fsocket_sys::{self as sys, Errno};

pub const IN: u32 = libc::EPOLLIN as u32;
pub const OUT: u32 = libc::EPOLLOUT as u32;
pub const ERR: u32 = libc::EPOLLERR as u32;
pub const HUP: u32 = libc::EPOLLHUP as u32;
pub const RDHUP: u32 = libc::EPOLLRDHUP as u32;
pub const RDNORM: u32 = libc::EPOLLRDNORM as u32;
pub const WRNORM: u32 = libc::EPOLLWRNORM as u32;

/// Properties of the peer's side of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State {
    /// No more data will come; bytes in the ring can still be read.
    pub eof: bool,
    /// The peer has sent a FIN before anything else.
    pub fin: bool,
    pub reset: bool,
    /// The peer reads no more, and answers further bytes with a reset.
    pub closed: bool,
}

#[inline]
pub fn state(d: &Desc) -> State {
    // Data published before FIN or RST is visible after this.
    let peer = d.peer_status();
    let poisoned = d.sock().flags.get().is_poisoned();
    let reset = peer.has(status::RST) || poisoned;
    let fin = peer.has(status::FIN);
    State { eof: fin || reset, fin, reset, closed: peer.refuses_data() }
}

/// Is the connection over, so that the kernel's socket would be in state CLOSE?
/// True after a reset, after both FINs, and when a reset has answered a send.
///
/// A Unix socket has no such state.
pub fn over(d: &Desc) -> bool {
    if d.is_unix() {
        return false;
    }
    let st = state(d);
    let f = d.sock().flags.get();
    st.reset
        || (st.fin && f.has(FlagSet::SHUT_WR))
        || (st.closed && f.has(FlagSet::SENT_AFTER_CLOSE))
        || f.has(FlagSet::TIMED_OUT)
}

/// The error of a reset: with the peer's FIN received before it, a broken pipe.
pub fn reset_error(st: State) -> i32 {
    if st.fin {
        libc::EPIPE
    } else {
        libc::ECONNRESET
    }
}

/// Are there as many bytes as the program wants (SO_RCVLOWAT)?
#[inline(always)]
fn readable(d: &Desc, r: ring::Mapped, rx: &Dir, h: &Half) -> bool {
    crate::conn::ring_has(d) && (!d.sock().flags.get().has(FlagSet::LOWAT) || enough(d, r, rx, h))
}

/// Would the kernel report something if it were asked again?
pub fn wanted(d: &Desc) -> bool {
    let (r, rx, h) = d.rx();
    readable(d, r, rx, h) || state(d).fin
}

#[cold]
fn enough(d: &Desc, r: ring::Mapped, rx: &Dir, h: &Half) -> bool {
    if d.is_unix() {
        return true; // `unix_poll` says whether there is something
    }
    let want = values::lowat(d);
    ring::available(r, rx, h, want).map_or(true, |n| n >= want)
}

/// Is there something to receive: data, end or error?
#[inline(always)]
pub fn can_recv(d: &Desc) -> bool {
    let (r, rx, h) = d.rx();
    // (A peer that has stopped receiving is no reason to receive.)
    readable(d, r, rx, h) || rx.prod.status.load(Ordering::Acquire) & !status::SHUT_BOTH != 0 || local_rx(d)
}

#[inline]
fn local_rx(d: &Desc) -> bool {
    let s = d.sock();
    s.flags.get().ends_receives() || s.error() != 0
}

/// Would a send make progress, or fail?
#[inline(always)]
pub fn can_send(d: &Desc) -> bool {
    let (_, tx, h) = d.tx();
    ring::writable(tx, h) || !d.peer_status().sends_plainly() || d.sock().flags.get().ends_sends()
}

/// No event: the path was switched, so [`crate::path::follow`] comes first.
pub const PENDING: u32 = 1 << 27;

/// Events of a connection that this process has followed: the ring's part and those of its kernel socket.
fn behind_ring(d: &Desc, fd: i32, wanted: u32) -> u32 {
    let mut p = libc::pollfd { fd, events: wanted as u16 as i16, revents: 0 };
    // SAFETY: one pollfd.
    let _ = unsafe { sys::ppoll(&mut p, 1, Some(0), core::ptr::null()) };
    let data = if crate::conn::ring_has(d) { IN | RDNORM } else { 0 };
    p.revents as u16 as u32 | data & wanted
}

/// Events of a connection, restricted to `wanted` (ERR and HUP always).
pub fn conn_events(d: &Desc, wanted: u32) -> u32 {
    crate::stuck::look();
    match d.path_state().next(Event::Look) {
        Next::Stay | Next::Move => {}
        Next::Later => return 0,
        Next::Follow => return PENDING,
        Next::Both(fd) | Next::Kernel(fd) => return behind_ring(d, fd, wanted),
    }
    let mut ev = 0;
    let f = d.sock().flags.get();
    let st = state(d);
    let (r, rx, h) = d.rx();
    let rd_closed = st.eof || f.has(FlagSet::SHUT_RD);
    if wanted & (IN | RDNORM) != 0 && (rd_closed || readable(d, r, rx, h)) {
        ev |= IN | RDNORM;
    }
    if rd_closed {
        ev |= RDHUP;
    }
    // Shut down in both directions, or reset.
    let wr_closed = f.has(FlagSet::SHUT_WR) || st.closed && d.is_unix();
    if st.reset || (rd_closed && wr_closed) || (st.closed && f.has(FlagSet::SENT_AFTER_CLOSE)) {
        ev |= HUP;
    }
    if (st.reset && !f.has(FlagSet::RST_REPORTED)) || d.sock().error() != 0 {
        ev |= ERR;
    }
    if wanted & (OUT | WRNORM) != 0 && can_send(d) {
        ev |= OUT | WRNORM;
    }
    ev & (wanted | ERR | HUP)
}

/// Events of any descriptor of the library that `poll` can ask about, without a listener's kernel
/// queue.
pub fn events(d: &Desc, wanted: u32) -> u32 {
    match d.kind() {
        Kind::Shm => conn_events(d, wanted),
        Kind::Epoll if wanted & (IN | RDNORM) != 0 && (watcher().readable)(d) => (IN | RDNORM) & wanted,
        Kind::Listener => match listen::of(d) {
            Some(l) if wanted & (IN | RDNORM) != 0 && l.has_syn(true) => (IN | RDNORM) & wanted,
            _ => 0,
        },
        _ => 0,
    }
}

/// The CPU on which the peer runs, for spinning.
#[inline]
pub fn peer_cpu(d: &Desc) -> u32 {
    let (_, rx, _) = d.rx();
    let (_, tx, _) = d.tx();
    match rx.prod.cpu.load(Ordering::Relaxed) {
        0 => tx.cons.cpu.load(Ordering::Relaxed),
        c => c,
    }
}

/// Takes the error that this side has set itself. Nearly always there is none, and then the load
/// waits for no earlier store.
pub fn swap_error(s: &Sock) -> i32 {
    match s.error() {
        0 => 0,
        _ => s.take_error(),
    }
}

/// `SO_ERROR`: takes the pending error.
pub fn take_error(d: &Desc) -> i32 {
    let s = d.sock();
    let e = swap_error(s);
    if e != 0 {
        return e;
    }
    if let Some(k) = d.path_state().kernel_socket() {
        let mut v = [0u8; 4];
        return fsocket_sys::getsockopt(k, libc::SOL_SOCKET, libc::SO_ERROR, &mut v)
            .map_or(0, |_| i32::from_ne_bytes(v));
    }
    let st = state(d);
    if st.reset && !s.flags.set(FlagSet::RST_REPORTED).has(FlagSet::RST_REPORTED) {
        return if d.is_unix() { libc::ECONNRESET } else { reset_error(st) };
    }
    0
}

/// The error that `recvmmsg` reports before anything else.
pub fn pending_error(d: &Desc, flags: i32) -> Option<Errno> {
    if flags & libc::MSG_ERRQUEUE != 0 {
        return None;
    }
    match take_error(d) {
        0 => None,
        e => Some(Errno::new(e)),
    }
}
