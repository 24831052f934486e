//! Putting the kernel socket behind the program's own descriptor numbers.

use crate::table::{self, Desc};
use crate::upcalls::{upcalls, watcher};
use crate::values;
use crate::{chan, conn, process, socks, token};
use core::sync::atomic::{fence, Ordering};
use fsocket_abi::channel::status;
use fsocket_abi::flags::FlagSet;
use fsocket_proto::switch::act;
use fsocket_sync::token::Words as _;
use fsocket_sys::{self as sys, Result};

/// Give a kernel end what the program has set on the connection.
pub fn apply_options(d: &Desc, fd: i32) {
    if d.sock().flags.get().has(FlagSet::NONBLOCK) {
        let _ = sys::fcntl(fd, libc::F_SETFL, libc::O_NONBLOCK as usize);
    }
    if d.is_unix() {
        return; // the kernel's socket has been asked for all of them
    }
    values::apply(d, fd);
    // The buffers were made large enough for a whole ring; from here on they
    // grow and shrink like any other's.
    const SO_BUF_LOCK: i32 = 72;
    let _ = sys::setsockopt(fd, libc::SOL_SOCKET, SO_BUF_LOCK, &0i32.to_ne_bytes());
}

/// Repeat the program's `shutdown` in the kernel, behind its last byte. `both`: for receives, too. (A Unix socket takes
/// nothing after that, not even what its peer sends again.)
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

/// Has the program been told of the error with which the connection ended?
pub fn error_is_reported(d: &Desc) -> bool {
    let s = d.sock();
    let f = s.flags.get();
    f.has(FlagSet::RST_REPORTED) || f.has(FlagSet::SENT_AFTER_CLOSE) && s.error() == 0
}

pub fn forget_error(fd: i32) {
    let _ = sys::getsockopt(fd, libc::SOL_SOCKET, libc::SO_ERROR, &mut [0u8; 4]);
}

/// Of two sides that are both there one has shut down both directions, and answers what is
/// sent to it with a reset. If that has happened it happens again between the kernel's sockets,
/// so that each shows what it would. When everything has been poured; the mover's part.
pub fn replay_reset(d: &Desc, theirs: u32, own: i32) {
    // (Alive and with a reset: this end had shut down both ways.)
    let reset = theirs & status::RST != 0;
    if d.is_unix() {
        // A peer that does not receive any more repeats that when it follows; what this side sends next must not arrive.
        if theirs & status::SHUT_BOTH != 0 {
            let _ = sys::shutdown(own, libc::SHUT_WR);
        }
        return;
    }
    if theirs & status::CLOSED != 0 || !reset && theirs & status::SHUT_BOTH == 0 {
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

/// Its last close sends RST.
pub fn reset_on_close(fd: i32) {
    let mut l = [0u8; 8];
    l[0] = 1;
    let _ = sys::setsockopt(fd, libc::SOL_SOCKET, libc::SO_LINGER, &l);
}

/// Everything is read out of the ring: `fd` (ours) takes over all numbers and
/// all epoll registrations, and the descriptor is the kernel's alone. Returns a
/// number of the kernel connection.
pub fn complete(d: &'static Desc, fd: i32) -> Result<i32> {
    // Of a mixed connection `fd` stays open as long as anybody may be in an
    // operation on it, like any descriptor; `table::release` closes it.
    let surplus = || {
        if d.path().kernel_end() != Some(fd) {
            process::close_own(fd);
        }
    };
    if !d.path().begin_settling() {
        surplus();
        while d.is_conn() {
            sys::sched_yield();
        }
        return crate::stage::went_to(d).ok_or(sys::Errno::EBADF);
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
    // Release: who sees that it is no connection of ours knows where it went.
    d.disconnect();
    // Behind whatever other threads are in the middle of: the slot may be
    // somebody else's right after.
    let s = d.sock();
    let tokens = (token::enter(&s.tx), token::enter(&s.rx));
    s.tx.withdraw();
    s.rx.withdraw();
    drop(tokens);
    let next = if d.path().comes_back() && n == 1 { (upcalls().kernel_for_now)(d) } else { None };
    (watcher().migrated_to_kernel)(d, d.path().kernel_end());
    table::remove_fds(d);
    if let (Some(next), Some(fd)) = (next, kept) {
        table::install(fd, next);
    }
    // Threads that sleep on it go on in the kernel.
    conn::wake_own(d);
    leave(d);
    surplus();
    table::retire(d);
    d.drop_refs(n);
    kept.ok_or(sys::Errno::EBADF)
}

/// This process no longer holds the connection as one of ours.
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

/// The last holder of a side that has gone over to the kernel has let go of it.
pub fn gone(d: &Desc) {
    // Before CLOSED: from then on the slot can be somebody else's.
    super::pair::release(d, d.side());
    let moved = status::MIGRATING | status::MIGRATED | status::CLOSED;
    d.tx().1.prod.status.fetch_or(moved, Ordering::Release);
}

/// The last holder of a side closes it. If the other side is just switching the path it may have
/// taken its last look before that, and have left an end for this side with the monitor: nobody
/// would come for it, and the other side's program would wait for an end of stream for ever.
pub struct Beside(fsocket_proto::request::Release);

impl Beside {
    /// Before CLOSED: from then on the slot can be somebody else's, and this names whose it was.
    pub fn of(d: &Desc) -> Beside {
        Beside(super::pair::releasing(d, d.side()))
    }
    /// After CLOSED. Either the mover has seen that, or this sees MIGRATING: it fences heavily
    /// in between.
    pub fn closed(self, d: &Desc, read_all: bool) {
        fence(Ordering::SeqCst);
        if d.rx().1.prod.status.load(Ordering::Acquire) & (status::MIGRATING | status::MIGRATED) != 0 {
            super::patience::await_peer(d);
            super::pair::send_release(fsocket_proto::request::Release { read_all, ..self.0 });
        }
    }
}

/// The program closes a connection whose ring still has something. `last`: no
/// other process has it.
pub fn close_draining(d: &Desc, last: bool, reset: bool) {
    let Some(fd) = table::take_end(d) else { return };
    if last {
        if reset {
            reset_on_close(fd);
        }
        super::pair::release(d, d.side());
        let moved = status::MIGRATING | status::MIGRATED;
        d.tx().1.prod.status.fetch_or(moved, Ordering::Release);
    }
    process::close_own(fd);
}
