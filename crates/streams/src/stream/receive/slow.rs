//! The second rung of a receive: everything that a look into the ring does not settle.
//!
//! Another thread, the peer and a path switch may act between any two looks. So the order of the looks matters:
//!
//! 1. Where does the connection go on? The kernel's bytes come behind those of the ring ([`Receive::follow`]).
//! 2. What is in the ring? ([`Receive::take`])
//! 3. Does anything still come? An end that is seen here came behind the bytes that step 2 did not find, so the ring
//!    is looked at again ([`Receive::find_end`]).
//! 4. Nothing, and more will come: wait ([`Receive::wait`]).

use super::super::below::{at_mark, has_failed, something_behind};
use super::super::restart;
use super::super::wait::{ended, interruptible, wait_any, wait_data, wait_more, Wait};
use super::super::{is_nonsense, left_rings, low_water, path_taken, poison, ring_has, Hold};
use super::after::{consumed, peek_rest, rest, ELSEWHERE, WITH_CONTROL};
use crate::table::Desc;
use crate::{lengths, ready, stuck, token, values};
use fsocket_abi::flags::FlagSet;
use fsocket_abi::path_switch::PathState;
use fsocket_ring::{self as ring, Failed};
use fsocket_sys::{self as sys, Errno, Result};

/// The place of a receive in a call of several.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// The first or only one.
    First,
    /// Bytes of earlier parts are before these. `enough`: the call waits for no more than those.
    Later { enough: bool },
    /// A message behind others: it leaves an error to the next call.
    Message,
}

/// # Safety
/// `buf` is the program's for `len` bytes; it need not be there.
#[cold]
pub unsafe fn recv_slow(d: &'static Desc, buf: *mut u8, len: usize, flags: i32) -> Result<usize> {
    // SAFETY: `buf` is the program's for `len` bytes, and only copies that return EFAULT reach them.
    unsafe { recv_part_slow(d, buf, len, flags, Part::First) }
}

/// # Safety
/// As [`recv_slow`].
#[cold]
#[inline(never)]
pub(super) unsafe fn recv_part_slow(
    d: &'static Desc,
    buf: *mut u8,
    len: usize,
    flags: i32,
    part: Part,
) -> Result<usize> {
    let len = lengths::buffer(buf, len)?;
    if flags & libc::MSG_OOB != 0 {
        return match path_taken(d, flags) {
            // SAFETY: `len` bytes at `buf` are the program's: only the kernel, and copies that return EFAULT, reach them.
            Some(fd) => fd.and_then(|fd| unsafe { sys::recv(fd, buf, len, flags) }),
            // Nobody has sent any, or the path would have been switched.
            None => Err(Errno::EINVAL),
        };
    }
    if flags & libc::MSG_ERRQUEUE != 0 && !d.is_unix() {
        return Err(Errno::EAGAIN);
    }
    let mut c = Receive::new(d, buf, len, flags, part);
    loop {
        let step = c.follow().or_else(|| c.take()).or_else(|| c.find_end()).unwrap_or_else(|| c.wait());
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

/// A receive under way. `len` bytes at `buf` are the program's: only the kernel, and copies that return EFAULT, reach them.
struct Receive {
    d: &'static Desc,
    buf: *mut u8,
    len: usize,
    flags: i32,
    part: Part,
    is_unix: bool,
    peek: bool,
    block: bool,
    /// This many bytes end a sleep.
    target: usize,
    /// The number of bytes that the call has, or that a look ahead has seen.
    done: usize,
    /// In this turn it was asked where the connection goes on.
    looked: bool,
    waits: Wait,
    hold: Option<Hold>,
}

impl Receive {
    fn new(d: &'static Desc, buf: *mut u8, len: usize, flags: i32, part: Part) -> Receive {
        let (s, is_unix, peek) = (d.sock(), d.is_unix(), flags & libc::MSG_PEEK != 0);
        let block = !s.flags.get().has(FlagSet::NONBLOCK) && flags & libc::MSG_DONTWAIT == 0;
        let target = match block {
            // A look at a Unix socket waits for the first byte alone.
            _ if is_unix && peek => 1,
            // (A Unix socket looks for an error behind less than that, also where it does not wait.)
            _ if flags & libc::MSG_WAITALL != 0 && (block || is_unix) => len,
            _ if s.flags.get().has(FlagSet::LOWAT) && (block || is_unix) => values::lowat(d).min(len),
            _ => 1,
        };
        let waits = Wait::default();
        Receive { d, buf, len, flags, part, is_unix, peek, block, target, done: 0, looked: false, waits, hold: None }
    }

    fn hold(&mut self) {
        self.hold.get_or_insert_with(|| Hold::on(self.d));
    }

    /// Where byte `at` goes. None: the bytes are discarded, as by MSG_TRUNC on TCP.
    fn dst(&self, at: usize) -> Option<*mut u8> {
        (self.is_unix || self.flags & libc::MSG_TRUNC == 0).then_some(self.buf.wrapping_add(at))
    }

    /// The call cannot go on; a call that has not begun does so on what its number refers to by now.
    fn stop(&self, e: Errno) -> Step {
        // SAFETY: the program's buffer, as the struct says.
        let again = |fd| unsafe { restart_on_fd(fd, self.buf, self.len, self.flags) };
        Return(restart::stop(self.d, self.done, e, again))
    }

    /// An error is the next call's if this one has something.
    fn fail(&self, e: Errno) -> Option<Step> {
        Some(Return(restart::after(self.done, Err(e))))
    }

    /// The call has bytes already.
    fn has_some(&self) -> bool {
        self.done > 0 || matches!(self.part, Part::Later { .. })
    }

    /// An error is the next call's. (A Unix socket looks for one until it has all that it waits for.)
    fn leaves_error(&self) -> bool {
        match self.part {
            Part::First => self.done > 0 && !self.is_unix,
            Part::Later { enough } => enough || !self.is_unix,
            Part::Message => true,
        }
    }

    /// Does the call end before what comes next in the kernel?
    fn ends_before(&self, fd: i32) -> bool {
        let (d, has_some) = (self.d, self.has_some());
        has_some && at_mark(fd)
            || (has_some || self.part == Part::Message) && self.block && !something_behind(d, fd)
            || self.leaves_error() && has_failed(fd)
    }

    /// Where the connection goes on, if not in the ring.
    fn follow(&mut self) -> Option<Step> {
        let (d, flags) = (self.d, self.flags);
        if self.peek && d.path_state().is_pending() {
            // All that it can see is in one place then, and it starts over.
            self.hold();
            let _ = path_taken(d, flags);
            self.done = 0;
        }
        self.looked = !ring_has(d);
        if !self.looked {
            return None;
        }
        if left_rings(d) {
            self.hold();
        }
        let fd = path_taken(d, flags)?;
        let done = self.done;
        if flags & WITH_CONTROL != 0 && fd.is_ok() {
            return Some(Return(if done > 0 { Ok(done) } else { Err(ELSEWHERE) }));
        }
        if fd.is_ok_and(|fd| self.ends_before(fd)) {
            return Some(Return(if self.has_some() { Ok(done) } else { Err(Errno::EAGAIN) }));
        }
        let rest = self.buf.wrapping_add(done);
        // SAFETY: the rest of the program's buffer.
        let r = fd.and_then(|fd| unsafe { sys::recv(fd, rest, self.len - done, flags) });
        Some(Return(restart::after(done, r)))
    }

    /// Bytes of the ring.
    fn take(&mut self) -> Option<Step> {
        let d = self.d;
        let s = d.sock();
        if s.flags.get().is_poisoned() {
            return None;
        }
        let got = match token::enter(d.rx().2) {
            Err(fsocket_sync::token::Reentered) => return Some(Return(Err(Errno::EAGAIN))),
            Ok(_) if !d.is_conn() => {
                return Some(match d.path_state() {
                    PathState::Kernel(_) => Again,
                    _ => self.stop(Errno::EBADF),
                })
            }
            Ok(_) if s.flags.get().is_drained() => return Some(Again),
            Ok(_token) => self.read(),
        };
        match got {
            Err(Failed::Hostile) => {
                poison(d);
                Some(Again)
            }
            Err(Failed::Fault) => self.fail(Errno::EFAULT),
            Ok(usize::MAX) => Some(Return(Ok(0))),
            Ok(n) if self.peek => self.seen(n),
            Ok(0) => None,
            Ok(n) => Some(self.taken(n)),
        }
    }

    /// With the token: bytes out of the ring. usize::MAX: there are some, for a receive of none.
    fn read(&self) -> core::result::Result<usize, Failed> {
        let (r, rx, h) = self.d.rx();
        if self.len == 0 {
            return ring::available(r, rx, h, 1).map(|n| if n > 0 { usize::MAX } else { 0 });
        }
        // A look ahead always starts over.
        let from = if self.peek { 0 } else { self.done };
        // SAFETY: within the program's buffer. `take` has entered with the token of `h`.
        unsafe { ring::recv(r, rx, h, self.dst(from), self.len - from, self.peek) }
    }

    /// A look ahead has seen `n` bytes.
    fn seen(&mut self, n: usize) -> Option<Step> {
        if n > 0 && n < self.len && left_rings(self.d) {
            let at = self.dst(n).unwrap_or(core::ptr::null_mut());
            // SAFETY: the rest of the program's buffer.
            return Some(Return(Ok(n + unsafe { peek_rest(self.d, at, self.len - n, self.flags) })));
        }
        if n > 0 && n >= self.target {
            return Some(Return(Ok(n)));
        }
        self.done = n;
        None
    }

    /// The ring gave `n` bytes more.
    fn taken(&mut self, n: usize) -> Step {
        let (_, rx, h) = self.d.rx();
        self.waits.was_not();
        self.done += n;
        consumed(self.d, rx, h);
        if self.done < self.target {
            return Again;
        }
        if self.done < self.len && left_rings(self.d) {
            let at = self.dst(self.done).unwrap_or(core::ptr::null_mut());
            // SAFETY: the rest of the program's buffer.
            return Return(Ok(self.done + unsafe { rest(self.d, at, self.len - self.done, self.flags) }));
        }
        Return(Ok(self.done))
    }

    /// Whether no more bytes will come.
    fn find_end(&mut self) -> Option<Step> {
        let (d, done) = (self.d, self.done);
        if !ended(d) {
            if done == 0 && !d.has_items() {
                self.hold();
                return crate::unhooked::noticed().then_some(Again);
            }
            return None;
        }
        if !self.looked && left_rings(d) {
            // The path was switched while we waited for the token: the rest, which was in the
            // ring a moment ago, is in the kernel.
            return Some(Again);
        }
        if ring_has(d) && !d.sock().flags.get().is_poisoned() && !(self.peek && done > 0) {
            return Some(Again); // data came before the end that we have just seen
        }
        if !self.has_some() {
            return Some(Return(end_of_stream(d, self.leaves_error())));
        }
        if !self.leaves_error() {
            // `unix_stream_read_generic` takes the error, and returns what it has.
            let _ = ready::take_error(d);
        }
        Some(Return(Ok(done)))
    }

    /// Nothing is there, and more may come.
    fn wait(&mut self) -> Step {
        let (d, done) = (self.d, self.done);
        if !self.block {
            stuck::look();
            if ended(d) {
                return Again;
            }
            return Return(restart::after(done, Err(Errno::EAGAIN)));
        }
        self.hold();
        self.waits.begun |= done > 0;
        let timeout = d.sock().receive_timeout();
        if done > 0 || self.len == 0 {
            interruptible(&mut self.waits, timeout);
        }
        if self.len == 0 {
            if timeout == crate::options::AT_ONCE {
                return Return(Err(Errno::EAGAIN));
            }
            let _ = wait_any(d, &mut self.waits);
            return Return(Ok(0)); // whatever has ended the wait
        }
        if is_nonsense(d) || self.waits.was_in_vain() {
            // Nothing to read, and no end: the wait would be over at once, each time.
            poison(d);
            return Again;
        }
        let r = match self.peek && done > 0 {
            true => wait_more(d, done, &mut self.waits),
            false => wait_data(d, &mut self.waits),
        };
        match r {
            Ok(()) => Again,
            Err(_) if (done == 0 || !self.peek) && low_water(d) > 1 && ring_has(d) => {
                // Less than was waited for is better than nothing, and all that is there better
                // than what was there before.
                (self.block, self.target) = (false, 1);
                Again
            }
            Err(e) => self.stop(e),
        }
    }
}

/// [`restart::restart_on_fd`] for a receive.
///
/// # Safety
/// As [`recv_slow`].
#[cold]
unsafe fn restart_on_fd(fd: i32, buf: *mut u8, len: usize, flags: i32) -> Result<usize> {
    // SAFETY: `len` bytes at `buf` are the program's: only the kernel, and copies that return EFAULT, reach them.
    unsafe {
        restart::restart_on_fd(
            fd,
            flags,
            |d| recv_slow(d, buf, len, flags),
            || sys::recv(fd, buf, len, flags),
            || sys::read(fd, buf, len),
        )
    }
}

/// Nothing is left to read: an error once, then the end. After a FIN there is
/// only the end, whatever error is pending. `leaves`: the error stays for the next call.
fn end_of_stream(d: &Desc, leaves: bool) -> Result<usize> {
    let st = ready::state(d);
    if st.fin && !d.is_unix() {
        return Ok(0);
    }
    if leaves {
        let fails = ready::conn_events(d, 0) & ready::ERR != 0;
        return if fails { Err(Errno::EAGAIN) } else { Ok(0) };
    }
    match ready::take_error(d) {
        0 => Ok(0),
        e => Err(Errno::new(e)),
    }
}
