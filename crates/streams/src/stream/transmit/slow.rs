//! The second rung of a send: everything that a look at the ring does not settle.
//!
//! Another thread, the peer and a path switch may act between any two looks. So the order of the looks matters:
//!
//! 1. Where does the connection go on ([`Transmit::follow`])?
//! 2. Does anything forbid the send ([`Transmit::refusal`])?
//! 3. As much as has room goes into the ring, or the call waits ([`Transmit::put`]).

use super::super::below::{room_behind, zerocopy};
use super::super::news::{News, SHARED_CPU};
use super::super::refuse::{only_shut_both, rather, refused};
use super::super::restart;
use super::super::wait::{interruptible, wait_space, Wait};
use super::super::{left_rings, path_taken, poison, turn, Hold};
use crate::path;
use crate::table::Desc;
use crate::upcalls::watcher;
use crate::{idle, lengths, ready, stuck, token, user, values};
use fsocket_abi::arena::Reason;
use fsocket_abi::channel::POS_START;
use fsocket_abi::flags::FlagSet;
use fsocket_abi::half::Half;
use fsocket_abi::path_switch::PathState;
use fsocket_ring::{self as ring, Failed};
use fsocket_sync::token::Words as _;
use fsocket_sys::{self as sys, cpu, Errno, Result};

/// Does a send with these flags wait for room? A call of several parts asks once: what the flag of the
/// socket is changed to meanwhile is for the next.
pub fn blocks(d: &Desc, flags: i32) -> bool {
    !d.sock().flags.get().has(FlagSet::NONBLOCK) && flags & libc::MSG_DONTWAIT == 0
}

/// # Safety
/// `buf` is the program's for `len` bytes; it need not be there.
#[cold]
#[inline(never)]
pub unsafe fn send_slow(d: &'static Desc, buf: *const u8, len: usize, flags: i32) -> Result<usize> {
    // SAFETY: the program says that `len` bytes are at `buf`; only copies that return EFAULT, and the kernel, reach
    // them.
    unsafe { send_until(d, buf, len, flags, (blocks(d, flags), 0)) }
}

/// `block`: see [`blocks`]. `before`: so much the call has sent in earlier parts.
///
/// # Safety
/// As [`send_slow`].
#[cold]
pub(super) unsafe fn send_until(
    d: &'static Desc,
    buf: *const u8,
    len: usize,
    flags: i32,
    (block, before): (bool, usize),
) -> Result<usize> {
    let len = lengths::buffer(buf, len)?;
    if flags & libc::MSG_FASTOPEN != 0 && d.is_in_rings() {
        return Err(Errno::EISCONN); // it would connect
    }
    stuck::look();
    // A send of no bytes has no urgent byte.
    let urgent = flags & libc::MSG_OOB != 0 && len > 0;
    if urgent {
        if d.is_in_rings() && !only_shut_both(d) {
            if let Some(r) = refused(d, len, 0, flags) {
                return r;
            }
        }
        // The kernel has urgent data, the ring has not.
        path::materialize_one(d, Reason::Option);
    }
    if flags & libc::MSG_ZEROCOPY != 0 && len > 0 && d.is_in_rings() {
        zerocopy(d);
    }
    let (waits, news) = (Wait::default(), News { d, bytes: 0 });
    let mut c = Transmit { d, buf, len, flags, block, before, urgent, done: 0, waits, news, hold: None };
    look_for_raw_calls(c.d, &mut c.hold);
    loop {
        let step = c.follow().or_else(|| c.refusal()).unwrap_or_else(|| c.put());
        if let Step::Return(r) = step {
            return r;
        }
    }
}

/// The consequence of a look.
enum Step {
    /// Look again, from the start.
    Again,
    Return(Result<usize>),
}
use Step::{Again, Return};

/// A send under way. `len` bytes at `buf` are the program's: only the kernel, and copies that return EFAULT, reach them.
struct Transmit {
    d: &'static Desc,
    buf: *const u8,
    len: usize,
    flags: i32,
    block: bool,
    /// The number of bytes that the call has sent in earlier parts.
    before: usize,
    /// Its last byte is urgent, for which the connection has moved to the kernel.
    urgent: bool,
    /// The number of bytes that are in the ring.
    done: usize,
    waits: Wait,
    // (Dropped before the connection may go: what was not told is told then.)
    news: News,
    hold: Option<Hold>,
}

impl Transmit {
    fn hold(&mut self) {
        self.hold.get_or_insert_with(|| Hold::on(self.d));
    }

    /// The call cannot go on; a call that has not begun does so on what its number refers to by now.
    fn stop(&self, e: Errno) -> Step {
        // SAFETY: the program's buffer, as the struct says.
        let again = |fd| unsafe { restart_on_fd(fd, self.buf, self.len, self.flags) };
        Return(restart::stop(self.d, self.done, e, again))
    }

    /// An error is the next call's if this one has sent something.
    fn fail(&self, e: Errno) -> Step {
        Return(restart::after(self.done, Err(e)))
    }

    /// Where the connection goes on, if not in the ring.
    fn follow(&mut self) -> Option<Step> {
        if left_rings(self.d) {
            self.hold();
            self.news.tell();
        }
        let fd = path_taken(self.d, self.flags)?;
        let (rest, mut flags) = (self.buf.wrapping_add(self.done), self.flags);
        if self.before + self.done > 0 {
            if fd.is_ok_and(|fd| !room_behind(self.d, fd, self.block)) {
                return Some(Return(Ok(self.done)));
            }
            flags |= libc::MSG_NOSIGNAL;
        }
        // SAFETY: the rest of the program's buffer.
        let r = fd.and_then(|fd| unsafe { sys::send(fd, rest, self.len - self.done, flags) });
        Some(Return(restart::after(self.done, r)))
    }

    /// Reasons that forbid the send, or end it.
    fn refusal(&mut self) -> Option<Step> {
        let (d, flags, before) = (self.d, self.flags, self.before);
        let (len, done) = (before + self.len, before + self.done);
        if self.urgent {
            return Some(Return(Err(Errno::EOPNOTSUPP)));
        }
        if done == 0 && ready::state(d).closed && !user::readable(self.buf, len.min(values::send_buffer(d))) {
            // What nobody receives is read, too.
            return Some(Return(Err(rather(d, flags, Errno::EFAULT))));
        }
        if let Some(r) = refused(d, len, done, flags) {
            return Some(Return(r.map(|n| n.saturating_sub(before))));
        }
        (done == len).then_some(Return(Ok(self.done)))
    }

    /// Moves into the ring as much as has room.
    fn put(&mut self) -> Step {
        let d = self.d;
        let sent = match token::enter(d.tx().2) {
            Err(fsocket_sync::token::Reentered) => return self.fail(Errno::EAGAIN),
            Ok(_) if !d.is_conn() => {
                return match d.path_state() {
                    PathState::Kernel(_) => Again,
                    _ => self.stop(Errno::EBADF),
                }
            }
            Ok(_) if !d.is_in_rings() || d.sock().flags.get().has(FlagSet::SHUT_WR) => return Again,
            Ok(_token) => self.write(),
        };
        match sent {
            Err(Failed::Hostile) => {
                poison(d);
                Again
            }
            // As the kernel, which takes a piece whole or not at all.
            Err(Failed::Fault) => self.fail(Errno::EFAULT),
            Ok(0) => self.wait(),
            Ok(n) => {
                self.waits.was_not();
                self.done += n;
                self.news.bytes += n;
                if self.done == self.len {
                    return Return(Ok(self.done));
                }
                if self.news.bytes >= SHARED_CPU || ready::peer_cpu(d) != cpu::current() {
                    self.news.tell();
                }
                Again
            }
        }
    }

    /// With the token: bytes into the ring.
    fn write(&self) -> core::result::Result<usize, Failed> {
        let (d, done) = (self.d, self.done);
        let (r, tx, h) = d.tx();
        let (rest, n) = (self.buf.wrapping_add(done), self.len - done);
        idle::populate(d, h, n);
        // SAFETY: the rest of the program's buffer. `put` has entered with the token of `h`.
        let sent = unsafe { ring::send(r, tx, h, rest, n, turn::to(d)) };
        if !matches!(sent, Ok(1..)) {
            turn::back(d);
        }
        give_credit(d, h);
        stuck::sent(d);
        sent
    }

    /// There is no room.
    fn wait(&mut self) -> Step {
        let (d, done) = (self.d, self.done);
        let s = d.sock();
        s.note_blocked_send();
        self.news.tell();
        if !self.block {
            // A thread that waits for EPOLLOUT must look at the ring again.
            (watcher().changed)(d);
            return self.fail(Errno::EAGAIN);
        }
        self.hold();
        self.waits.begun |= done > 0;
        if done > 0 {
            interruptible(&mut self.waits, s.send_timeout());
        }
        if self.waits.was_in_vain() {
            poison(d);
            return Again;
        }
        if let Err(e) = wait_space(d, &mut self.waits) {
            return self.stop(e);
        }
        // One that has waited is told of a reset, and not only that nobody reads (`sock_alloc_send_pskb`).
        match if d.is_unix() && d.is_conn() { ready::take_error(d) } else { 0 } {
            e @ 1.. => self.fail(Errno::new(e)),
            _ => Again,
        }
    }
}

/// Credit for [`super::send_tiny`]. The caller has the token.
pub(in crate::stream) fn give_credit(d: &Desc, h: &Half) {
    if !token::owned(h) {
        return;
    }
    d.set_sender(token::here());
    ring::give_credit(h);
    fsocket_sync::light_fence();
    if !d.sock().flags.get().sends_plainly() {
        // A signal handler on top of us: it could not enter, and there was no credit to withdraw.
        h.withdraw();
    }
}

/// [`restart::restart_on_fd`] for a send.
///
/// # Safety
/// As [`send_slow`].
#[cold]
unsafe fn restart_on_fd(fd: i32, buf: *const u8, len: usize, flags: i32) -> Result<usize> {
    // SAFETY: the program says that `len` bytes are at `buf`; only copies that return EFAULT, and the kernel, reach
    // them.
    unsafe {
        restart::restart_on_fd(
            fd,
            flags,
            |d| send_slow(d, buf, len, flags),
            || sys::send(fd, buf, len, flags),
            || sys::raw(libc::SYS_write, [fd as usize, buf as usize, len, 0, 0, 0]),
        )
    }
}

/// Notices a program that only writes, and then waits by a system call of its own. The call needs the connection after that:
/// `hold` keeps it.
pub(in crate::stream) fn look_for_raw_calls(d: &'static Desc, hold: &mut Option<Hold>) {
    if d.tx().2.pos() == POS_START && !d.has_items() && d.is_conn() {
        hold.get_or_insert_with(|| Hold::on(d));
        crate::unhooked::noticed();
    }
}
