//! `splice` from a pipe into a ring: a send whose bytes the kernel copies to the ring.
//!
//! The checks come in the same order as for a send (`transmit/slow.rs`), but the pipe comes
//! before errors of the socket.

use super::super::news::{News, SHARED_CPU};
use super::super::refuse::{refused, takes_sends};
use super::super::restart;
use super::super::transmit::{give_credit, look_for_raw_calls};
use super::super::wait::{interruptible, wait_space, Wait};
use super::super::{blocks, left_rings, path_taken, poison, throughout, turn, Hold};
use super::{again, is_valid, leave};
use crate::lengths::MOST;
use crate::pipe::{is_refused, splice, Pipe};
use crate::table::Desc;
use crate::upcalls::watcher;
use crate::{idle, ready, stuck, token};
use fsocket_abi::flags::FlagSet;
use fsocket_abi::path_switch::PathState;
use fsocket_ring::{self as ring, Failed};
use fsocket_runtime::{Cause, Outcome};
use fsocket_sys::{cpu, Errno, Result};

/// Bytes that one step discards. They are on the stack, and a hook takes less than 16 KiB of it.
const STEP: usize = 4096;

/// `splice` from `input` to a connection.
pub fn splice_to(d: &'static Desc, input: i32, len: usize, flags: u32) -> Outcome<Result<usize>> {
    let Some(pipe) = Pipe::of(input).filter(|p| is_valid(len, flags) && p.can_read()) else {
        return Outcome::Kernel(Cause::Invalid);
    };
    Outcome::Done(into_ring(d, &pipe, len.min(MOST), flags))
}

fn into_ring(d: &'static Desc, pipe: &Pipe, len: usize, flags: u32) -> Result<usize> {
    if pipe.is_for_both() {
        let _hold = Hold::on(d);
        leave(d)?;
    }
    stuck::look();
    let (waits, news) = (Wait::default(), News { d, bytes: 0 });
    let mut c = Into { d, pipe, len, flags, block: blocks(d, 0), done: 0, there: 0, waits, news, hold: None };
    look_for_raw_calls(c.d, &mut c.hold);
    loop {
        let step = c.follow().or_else(|| c.look()).or_else(|| c.refusal()).unwrap_or_else(|| c.put());
        if let Step::Return(r) = step {
            return r;
        }
    }
}

/// The next action after a check.
enum Step {
    /// Check again, from the start.
    Again,
    Return(Result<usize>),
}
use Step::{Again, Return};

/// A running `splice`.
struct Into<'a> {
    d: &'static Desc,
    pipe: &'a Pipe,
    len: usize,
    flags: u32,
    block: bool,
    /// Number of bytes that were moved to the ring.
    done: usize,
    /// Number of bytes that the last check has found in the pipe.
    there: usize,
    waits: Wait,
    // (Dropped before `hold`: the peer must be told while the connection still exists.)
    news: News,
    hold: Option<Hold>,
}

impl Into<'_> {
    fn hold(&mut self) {
        self.hold.get_or_insert_with(|| Hold::on(self.d));
    }

    /// The call cannot go on. If it has not begun yet, it starts again with the present file
    /// behind its descriptor.
    fn stop(&self, e: Errno) -> Step {
        let (pipe, len, flags) = (self.pipe, self.len, self.flags);
        let restarted = |fd| again(fd, |d| into_ring(d, pipe, len, flags), || splice(pipe.fd, fd, len, flags));
        Return(restart::stop(self.d, self.done, e, restarted))
    }

    /// An error is reported by the next call if this one has moved bytes.
    fn fail(&self, e: Errno) -> Step {
        Return(restart::after(self.done, Err(e)))
    }

    /// Continues where the connection went, if it has left the ring.
    fn follow(&mut self) -> Option<Step> {
        if left_rings(self.d) {
            self.hold();
            self.news.tell();
            if self.done > 0 {
                return Some(Return(Ok(self.done)));
            }
        }
        let fd = path_taken(self.d, if self.block { 0 } else { libc::MSG_DONTWAIT })?;
        Some(Return(fd.and_then(|fd| splice(self.pipe.fd, fd, self.len, self.flags))))
    }

    /// Checks for bytes in the pipe. If there are none, the kernel does not check the socket.
    fn look(&mut self) -> Option<Step> {
        self.there = self.pipe.has();
        match self.there == 0 && (self.done > 0 || !takes_sends(self.d)) {
            true => Some(self.wait_for_bytes()),
            false => None,
        }
    }

    /// Checks whether something forbids or ends the send.
    fn refusal(&mut self) -> Option<Step> {
        if self.there == 0 {
            return None;
        }
        let more = if self.flags & libc::SPLICE_F_MORE != 0 { libc::MSG_MORE } else { 0 };
        let r = refused(self.d, self.done + self.step(), self.done, more)?;
        Some(Return(r.map(|k| self.done + discard(self.pipe, k.saturating_sub(self.done)))))
    }

    /// Number of bytes to move next. (At least one, even if the pipe is empty: the kernel then
    /// reports if it has no writer.)
    fn step(&self) -> usize {
        self.there.clamp(1, self.len - self.done)
    }

    /// Moves as many bytes into the ring as have room.
    fn put(&mut self) -> Step {
        let d = self.d;
        let mut took = Ok(0);
        let sent = match token::enter(d.tx().2) {
            Err(fsocket_sync::token::Reentered) => return self.fail(Errno::EAGAIN),
            Ok(_) if !d.is_conn() => {
                return match d.path_state() {
                    PathState::Kernel(_) => Again,
                    _ => self.stop(Errno::EBADF),
                }
            }
            Ok(_) if !d.is_in_rings() || d.sock().flags.get().has(FlagSet::SHUT_WR) => return Again,
            Ok(_token) => self.read(&mut took),
        };
        match sent {
            Err(Failed::Hostile) => {
                poison(d);
                Again
            }
            Err(Failed::Fault) => self.took_none(took),
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

    /// Copies bytes of the pipe to the ring, with the token held. `took`: receives the pipe's
    /// result.
    fn read(&self, took: &mut Result<usize>) -> core::result::Result<usize, Failed> {
        let (d, n) = (self.d, self.step());
        let (r, tx, h) = d.tx();
        idle::populate(d, h, n);
        let sent = ring::send_by(r, tx, h, n, turn::to(d), |off, n| {
            // SAFETY: the ring has room for `n` bytes there, and no reader looks at them before
            // they are published.
            *took = unsafe { self.pipe.take(r.place(off), n) };
            took.unwrap_or(0)
        });
        if !matches!(sent, Ok(1..)) {
            turn::back(d);
        }
        give_credit(d, h);
        stuck::sent(d);
        sent
    }

    /// The pipe gave no bytes.
    fn took_none(&mut self, took: Result<usize>) -> Step {
        match took {
            Ok(_) => Return(Ok(self.done)),
            Err(_) if self.done > 0 => Return(Ok(self.done)),
            Err(Errno::EAGAIN) if !self.pipe.waits(self.flags) => Return(Err(Errno::EAGAIN)),
            Err(Errno::EAGAIN) => self.wait_for_bytes(),
            Err(e) if is_refused(e) => {
                self.hold();
                leave(self.d).map_or_else(|e| Return(Err(e)), |()| Again)
            }
            Err(e) => Return(Err(e)),
        }
    }

    /// The ring has no room: waits for some, or ends the call.
    fn wait(&mut self) -> Step {
        let (d, done) = (self.d, self.done);
        let s = d.sock();
        self.hold();
        if self.there == 0 {
            return self.wait_for_bytes();
        }
        s.note_blocked_send();
        self.news.tell();
        if !self.block {
            // A thread that waits for EPOLLOUT must check the ring again.
            (watcher().changed)(d);
            return self.fail(Errno::EAGAIN);
        }
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
        match if d.is_unix() && d.is_conn() { ready::take_error(d) } else { 0 } {
            e @ 1.. => self.fail(Errno::new(e)),
            _ => Again,
        }
    }

    /// Sleeps until the pipe has bytes, unless the call has moved some already.
    fn wait_for_bytes(&mut self) -> Step {
        self.hold();
        if self.done > 0 {
            return Return(Ok(self.done));
        }
        match self.pipe.events(libc::POLLIN) {
            Err(e) => return Return(Err(e)),
            Ok(events) if events & libc::POLLIN != 0 => return Again,
            // The pipe has no writer.
            Ok(events) if events & libc::POLLHUP != 0 => return Return(Ok(0)),
            Ok(_) if !self.pipe.waits(self.flags) => return Return(Err(Errno::EAGAIN)),
            Ok(_) => {}
        }
        self.waits.begun = true;
        throughout(self.d, |_| self.pipe.wait(libc::POLLIN)).map_or_else(|e| Return(Err(e)), |()| Again)
    }
}

/// Reads and discards bytes, because the peer is gone. (The kernel also reads them from the pipe
/// and sends them in vain.)
#[cold]
fn discard(pipe: &Pipe, n: usize) -> usize {
    let mut buf = core::mem::MaybeUninit::<[u8; STEP]>::uninit();
    let mut done = 0;
    while done < n {
        // SAFETY: the buffer has STEP bytes.
        match unsafe { pipe.take(buf.as_mut_ptr().cast(), (n - done).min(STEP)) } {
            Ok(k @ 1..) => done += k,
            _ => break,
        }
    }
    done
}
