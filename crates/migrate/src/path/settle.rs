//! Puts the kernel socket behind the program's own descriptors.

use crate::table::{self, Desc};
use crate::upcalls::{upcalls, watcher};
use crate::values;
use crate::{chan, conn, process, socks, token};
use fsocket_abi::channel::status;
use fsocket_abi::flags::FlagSet;
use fsocket_abi::path_switch::{self, PeerStatus};
use fsocket_proto::switch::act;
use fsocket_ring as ring;
use fsocket_sync::token::Words as _;
use fsocket_sys::{self as sys, Result};

/// Sets the options on a kernel end that the program has set on the connection.
pub fn apply_options(d: &Desc, fd: i32) {
    // (The kernel socket of a Unix connection has the mode that it had before it went over.)
    let mode = if d.sock().flags.get().has(FlagSet::NONBLOCK) { libc::O_NONBLOCK } else { 0 };
    if let Some(flags) = sys::fcntl(fd, libc::F_GETFL, 0).ok().filter(|flags| flags & libc::O_NONBLOCK != mode) {
        let _ = sys::fcntl(fd, libc::F_SETFL, (flags ^ libc::O_NONBLOCK) as usize);
    }
    if d.is_unix() {
        return; // the kernel socket of a Unix connection has all options already
    }
    values::apply(d, fd);
    // The buffers were made large enough for a whole ring; from now on the kernel may resize them
    // as those of any socket.
    const SO_BUF_LOCK: i32 = 72;
    let _ = sys::setsockopt(fd, libc::SOL_SOCKET, SO_BUF_LOCK, &0i32.to_ne_bytes());
}

/// Repeats the program's `shutdown` on the kernel socket, after the last byte was sent. `both`:
/// also for receiving. (A Unix socket that is shut down for receiving accepts nothing, not even
/// bytes that its peer sends again.)
pub fn shut(d: &Desc, fd: i32, both: bool) {
    let f = d.sock().flags.get();
    let how = match (both && f.has(FlagSet::SHUT_RD), f.has(FlagSet::SHUT_WR)) {
        (true, true) => libc::SHUT_RDWR,
        (true, false) => libc::SHUT_RD,
        (false, true) => libc::SHUT_WR,
        (false, false) => return,
    };
    let _ = sys::shutdown(fd, how);
}

/// Repeats shutdowns and a reset on the mover's kernel socket, when all unread bytes have been sent.
pub fn repeat_ends(d: &Desc, own: i32) {
    if d.is_unix() {
        shut(d, own, all_is_here(d));
        replay_reset(d, own);
    } else {
        // A reset that the peer's program has not noticed yet needs a last byte of this side.
        replay_reset(d, own);
        shut(d, own, true);
    }
}

/// Is everything that the peer has sent in this side's kernel socket? The mover asks this after
/// the monitor has sent the unread bytes there.
fn all_is_here(d: &Desc) -> bool {
    let (r, rx, _) = d.rx();
    let rest = path_switch::resume_at(rx, &d.slot().migrated[(1 - d.side()) & 1]);
    rest.is_some_and(|h| !ring::readable(r, rx, &h))
}

/// Has the program got the error with which the connection ended?
pub fn error_is_reported(d: &Desc) -> bool {
    let s = d.sock();
    let f = s.flags.get();
    f.has(FlagSet::RST_REPORTED) || f.has(FlagSet::SENT_AFTER_CLOSE) && s.error() == 0
}

pub fn forget_error(fd: i32) {
    let _ = sys::getsockopt(fd, libc::SOL_SOCKET, libc::SO_ERROR, &mut [0u8; 4]);
}

/// One of the two living sides may have shut down both directions; it then answers what is sent
/// to it with a reset. If this has happened over shared memory, the mover repeats it between the
/// kernel's sockets, so that each side sees the same.
fn replay_reset(d: &Desc, own: i32) {
    let peer = d.peer_status();
    // (The peer is alive and has sent a reset, so this end had shut down both directions.)
    let reset = peer.has(status::RST);
    if d.is_unix() {
        if peer.has(status::CLOSED) {
            return await_reset(d, peer, own);
        }
        // A peer that does not receive any more repeats its shutdown when it follows. What this
        // side sends before that must not arrive, either.
        if peer.has(status::SHUT_BOTH) {
            let _ = sys::shutdown(own, libc::SHUT_WR);
        }
        return;
    }
    if peer.has(status::CLOSED) || !reset && !peer.has(status::SHUT_BOTH) {
        return;
    }
    if reset {
        let _ = sys::shutdown(own, libc::SHUT_RDWR);
        return super::pair::act(d, act::SPEAK);
    }
    super::pair::act(d, act::SHUT_BOTH);
    let sent = d.sock().flags.get().has(FlagSet::SENT_AFTER_CLOSE);
    let mut p = libc::pollfd { fd: own, events: 0, revents: 0 };
    // SAFETY: one pollfd.
    let once = sent && unsafe { sys::ppoll(&mut p, 1, Some(0), core::ptr::null()) } == Ok(0);
    if once {
        // SAFETY: one byte.
        let _ = unsafe { sys::send(own, &0u8, 1, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) };
    }
}

/// Has the peer of a Unix connection closed it with unread bytes, and the program not got that
/// error yet?
fn unix_reset_is_due(d: &Desc, peer: PeerStatus) -> bool {
    d.is_unix() && peer.has(status::RST) && !error_is_reported(d)
}

/// Sends one byte, if a reset is due. A Unix socket gets a reset only if its peer is closed while
/// bytes are unread. The monitor closes the peer's end, which is empty otherwise.
pub fn leave_unread(d: &Desc, peer: PeerStatus, own: i32) {
    if unix_reset_is_due(d, peer) {
        // SAFETY: one byte.
        let _ = unsafe { sys::send(own, &0u8, 1, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) };
    }
}

/// Waits for the reset that is due: the monitor closes such sockets when it has time, and before
/// that a call would see no reset.
fn await_reset(d: &Desc, peer: PeerStatus, own: i32) {
    const MOST_NS: u64 = 100_000_000;
    if unix_reset_is_due(d, peer) {
        let mut p = libc::pollfd { fd: own, events: 0, revents: 0 };
        // SAFETY: one pollfd.
        let _ = unsafe { sys::ppoll(&mut p, 1, Some(MOST_NS), core::ptr::null()) };
    }
}

/// Makes the last close of `fd` send RST.
pub fn reset_on_close(fd: i32) {
    let mut l = [0u8; 8];
    l[0] = 1;
    let _ = sys::setsockopt(fd, libc::SOL_SOCKET, libc::SO_LINGER, &l);
}

/// Everything was read out of the ring: the library's socket `fd` replaces all descriptors of the
/// connection, in epoll instances, too, and the library has no part in the connection any more.
/// Returns a descriptor of the kernel connection.
pub fn complete(d: &'static Desc, fd: i32) -> Result<i32> {
    // If `fd` is the kernel end of a connection that still had bytes in its ring, other threads
    // may be in an operation on it, so it stays open; `table::release` closes it.
    let surplus = || {
        if table::end_of(d) != Some(fd) {
            process::close_own(fd);
        }
    };
    if !d.path().begin_settling() {
        surplus();
        while d.is_conn() {
            sys::sched_yield();
        }
        return d.path_state().kernel_socket().ok_or(sys::Errno::EBADF);
    }
    let mut kept = None;
    let mut n = 0;
    table::each_fd(d, |own| {
        let cloexec = sys::fcntl(own, libc::F_GETFD, 0).unwrap_or(0) & libc::FD_CLOEXEC;
        let flags = if cloexec != 0 { libc::O_CLOEXEC } else { 0 };
        if sys::dup3(fd, own, flags).is_ok() {
            kept.get_or_insert(own);
        }
        n += 1;
    });
    d.path().set_went_to(kept);
    // Release: a thread that sees that this is no connection any more also sees which descriptor
    // replaced it.
    d.disconnect();
    // Taking the tokens waits for operations of other threads, because another connection may get
    // the slot right after this.
    let s = d.sock();
    let tokens = (token::enter(&s.tx), token::enter(&s.rx));
    s.tx.withdraw();
    s.rx.withdraw();
    drop(tokens);
    let watched = table::end_of(d);
    let next = if d.path().comes_back() && n == 1 { (upcalls().kernel_for_now)(d, watched) } else { None };
    (watcher().migrated_to_kernel)(d, watched);
    table::remove_fds(d);
    if let (Some(next), Some(fd)) = (next, kept) {
        table::install(fd, next);
    }
    // Threads that sleep on the connection wake up, and go on in the kernel.
    conn::wake_own(d);
    leave(d);
    surplus();
    table::retire(d);
    d.drop_refs(n);
    kept.ok_or(sys::Errno::EBADF)
}

/// This process no longer holds the connection over shared memory.
pub fn leave(d: &'static Desc) {
    let s = d.sock();
    let slot = d.conn().slot_index();
    let channel = chan::of(d);
    if let Some(c) = channel {
        c.set_desc(slot, None);
    }
    if socks::let_go(s) && s.begin_close() {
        gone(d);
        socks::free_sock(s);
    }
    if let Some(c) = channel {
        c.retire_slot(slot);
        c.unmap_if_unused();
    }
}

/// Called for the last holder of a side that has moved to the kernel.
pub fn gone(d: &Desc) {
    // Before CLOSED is set, because another connection may get the slot from then on.
    super::pair::release(d, d.side());
    path_switch::leave(&d.tx_dir().prod, true);
}

/// Handles a close by the last holder of a side. The other side may be switching the path at this
/// moment: it took its last look before the close, and has left a kernel end for this side with
/// the monitor. No process would ask for that end, and the other side's program would wait for
/// the end of the stream for ever.
pub struct Beside(fsocket_proto::request::Release);

impl Beside {
    /// Called before CLOSED is set. From then on another connection may get the slot, so the
    /// request is made now.
    pub fn of(d: &Desc) -> Beside {
        Beside(super::pair::releasing(d, d.side()))
    }
    /// Called after CLOSED is set. Either the mover has seen CLOSED, or this function sees that
    /// the mover works.
    pub fn closed(self, d: &Desc, read_all: bool) {
        if path_switch::closes_beside_mover(&d.rx_dir().prod) {
            super::patience::await_peer(d);
            super::pair::send_release(fsocket_proto::request::Release { read_all, ..self.0 });
        } else if d.is_unix() && d.peer_status().has(status::CLOSED) {
            super::pair::forget_ends(self.0);
        }
    }
}

/// The program closes a connection while its ring still has unread bytes. `last`: no other
/// process has the connection.
pub fn close_draining(d: &Desc, last: bool, reset: bool) {
    let Some(fd) = table::take_end(d) else { return };
    if last {
        if reset {
            reset_on_close(fd);
        }
        super::pair::release(d, d.side());
        path_switch::leave(&d.tx_dir().prod, false);
    }
    process::close_own(fd);
}
