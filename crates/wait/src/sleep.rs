//! One sleep in the kernel.

use crate::call::{Call, Mask, Room, Sleep};
use crate::deadline::Deadline;
use crate::limits::Limited;
use crate::sleeper::Sleeper;
use crate::word::Word;
use fsocket_abi::arena::Counter;
use fsocket_fdtable::ctl;
use fsocket_runtime::stats;
use fsocket_shm::asleep::{self, On};
use fsocket_shm::{idle, trim};
use fsocket_sys::{self as sys, Errno, Result};

/// Calls whose sleeps are counted.
const COUNTED: u16 =
    Call::Stream.bit() | Call::PollOne.bit() | Call::Poll.bit() | Call::Accept.bit() | Call::Epoll.bit();

/// The objects to sleep on.
pub enum Source<'a> {
    /// The futex word of one direction of a connection.
    Word(Word<'a>),
    /// Descriptors. The waker and the monitor's socket use the last [`BESIDE`] entries. The
    /// caller calls [`heed`] afterwards.
    Set { fds: &'a mut [libc::pollfd], sleeper: Option<&'a mut Sleeper>, mask: Mask },
    /// Descriptors that only the kernel serves.
    Kernel { fds: &'a mut [libc::pollfd], mask: Mask },
    /// An epoll instance.
    Epoll { fd: i32, room: Room, mask: Mask, on: On<'static> },
}

/// Number of free entries that an array for [`Source::Set`] has at its end.
pub const BESIDE: usize = 2;

/// Sleeps once, until something happens on `source`, at most as long as [`Sleep::left`] and the
/// limits allow. Returns the number of descriptors or events, or 1 for a word. 0: nothing
/// happened; the caller checks whether its time is over.
///
/// Errors: EINTR; EAGAIN if the word had another value already; the kernel's errors for the
/// descriptors.
pub fn sleep(source: Source, mut s: Sleep) -> Result<usize> {
    before(&source, &mut s);
    let limit = Limited::of(&mut s);
    // If the library has set no limit, the kernel itself restarts a sleep on a word after a
    // signal.
    let ours = !matches!(&source, Source::Word(w) if !w.teased && limit.cut.is_none());
    let r = match source {
        Source::Word(w) => w.sleep(limit.left, limit.cut),
        Source::Set { fds, sleeper, mask } => in_set(fds, sleeper, limit.at_most(), mask),
        Source::Kernel { fds, mask } => asleep::sleep(&On::default(), || ppoll(fds, limit.at_most(), mask)),
        Source::Epoll { fd, room: Room(events, n), mask, on } => {
            // SAFETY: `Room` and `Mask` were made from memory that the kernel may write and read.
            asleep::sleep(&on, || unsafe { sys::epoll_wait(fd, events, n as i32, limit.at_most(), mask.0) })
        }
    };
    match r {
        Ok(0) if limit.idle => idle::give_back(),
        Err(Errno::EINTR) if ours && s.restarts() => return Ok(0),
        _ => {}
    }
    r
}

fn before(source: &Source, s: &mut Sleep) {
    if s.call.bit() & COUNTED != 0 {
        stats::count(Counter::Sleeps);
    }
    match source {
        Source::Word(w) => {
            s.long = *w.long;
            idle::before_sleep();
        }
        Source::Set { sleeper, .. } => {
            s.has_waker = sleeper.is_some();
            trim::look_if_due();
        }
        Source::Epoll { .. } => s.has_waker = true,
        Source::Kernel { .. } => {}
    }
}

fn ppoll(fds: &mut [libc::pollfd], ns: Option<u64>, mask: Mask) -> Result<usize> {
    // SAFETY: a slice; `Mask` was made from memory that the kernel may read.
    unsafe { sys::ppoll(fds.as_mut_ptr(), fds.len(), ns, mask.0) }
}

/// `ppoll` on the descriptors in `p`, the waker and the monitor's socket.
fn in_set(p: &mut [libc::pollfd], sleeper: Option<&mut Sleeper>, ns: Option<u64>, mask: Mask) -> Result<usize> {
    let at = p.len() - BESIDE;
    let control = if ctl::dead() { -1 } else { ctl::fd() };
    for (p, fd) in p[at..].iter_mut().zip([sleeper.as_ref().map_or(-1, |s| s.waker.fd()), control]) {
        *p = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    }
    let on = On { waker: sleeper.as_ref().map(|s| s.waker), ..On::default() };
    let r = asleep::sleep(&on, || ppoll(p, ns, mask));
    if let Some(s) = sleeper {
        s.rang |= p[at].revents != 0;
    }
    r
}

/// Called after a sleep on [`Source::Set`], once the waker is given back: reads what the monitor
/// has sent.
pub fn heed(p: &[libc::pollfd]) {
    if p.last().is_some_and(|control| control.revents != 0) {
        ctl::readable();
    }
}

/// `poll` of kernel descriptors only, until one of them has an event or `deadline` is over.
pub fn in_kernel(fds: &mut [libc::pollfd], deadline: Deadline, mask: Mask) -> Result<usize> {
    loop {
        match sleep(Source::Kernel { fds, mask }, Sleep::of(Call::Kernel, deadline.left()))? {
            0 if !deadline.is_over() => {}
            n => return Ok(n),
        }
    }
}
