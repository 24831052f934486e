//! `pidfd_getfd`: a process (the *taker*) takes a descriptor of another process (the *holder*).
//! The kernel does not ask the holder.
//!
//! For a connection over shared memory the taker would get the placeholder. So the taker's library
//! asks the monitor, and the monitor asks the holder, to move the connection to the kernel. The
//! holder does so when it next waits or asks for readiness (the monitor wakes a sleeping holder).
//! The taker tries again until it has the connected socket. A taker without the library gets the
//! placeholder, and so does a taker whose holder does not answer within `PATIENCE_NS`
//! (docs/limits.md).

use crate::mailbox::Mailbox;
use crate::signals::Held;
use crate::{close, ctl, inspect, passing, pool, process, stats, successor};
use core::sync::atomic::{AtomicU64, Ordering};
use fsocket_abi::arena::Reason;
use fsocket_proto::{answer, request};
use fsocket_sys::{self as sys, Errno, Result};

/// How long the taker waits for the holder, and how often it tries, in nanoseconds.
const PATIENCE_NS: u64 = 1_000_000_000;
const LOOK_NS: u64 = 1_000_000;
/// After this many attempts the taker asks again, because the holder may have been about to sleep.
const AGAIN: u32 = 50;
/// The most requests that wait until the holder can answer.
const REQUESTS: usize = 64;

const SYS_PIDFD_GETFD: i64 = 438;

fn get(pidfd: i32, target: i32, flags: u32) -> Result<i32> {
    // SAFETY: the call takes numbers only.
    unsafe { sys::raw(SYS_PIDFD_GETFD, [pidfd as usize, target as usize, flags as usize, 0, 0, 0]) }.map(|fd| fd as i32)
}

/// Takes the descriptor. Errors are those of the kernel.
pub fn obtain(pidfd: i32, target: i32, flags: u32) -> Result<i32> {
    let mut fd = get(pidfd, target, flags)?;
    if !is_tcp(fd) {
        pool::kernel_allocated(fd);
        return Ok(fd);
    }
    let pid = crate::unhooked::pid_of(pidfd);
    if pid == Some(sys::getpid()) {
        // As for `dup`: the program regards this number as free, because the descriptor belongs to
        // the library.
        if process::owns(target) || pool::holds(target) {
            let _ = sys::close(fd);
            return Err(Errno::EBADF);
        }
        let _ = close::duplicated(target, fd);
        return Ok(fd);
    }
    let pid = pid.unwrap_or(0).max(0) as u32;
    let named = request::Transfer { number: 0, descriptor: target as u32, pid, shown: false };
    let deadline = sys::now_ns().saturating_add(PATIENCE_NS);
    let mut asking = Asking::default();
    let mut looks = 0;
    // Also for listeners, because their new connections must arrive where the taker finds them.
    while (is_listening(fd) || !inspect::is_connected(fd)) && (looks % AGAIN != 0 || asking.ask(named, pidfd, fd)) {
        let done = asking.is_done();
        if !done && sys::now_ns() >= deadline {
            stats::fall_back(Reason::Switch);
            break;
        }
        looks += 1;
        sys::nanosleep(if done { 0 } else { LOOK_NS });
        ctl::readable();
        let _ = sys::close(fd);
        fd = get(pidfd, target, flags)?;
        if done {
            break;
        }
    }
    passing::arrived(fd);
    Ok(fd)
}

/// Numbers of requests of this process; 0: free.
static TAKES: [AtomicU64; TAKERS] = [const { AtomicU64::new(0) }; TAKERS];
/// Replaces the number when the holder has answered.
const DONE: u64 = u64::MAX;
/// The most threads that can take descriptors at the same time.
const TAKERS: usize = 16;

/// The request of one thread.
#[derive(Default)]
struct Asking(Option<&'static AtomicU64>);

impl Asking {
    /// Names the holder to the monitor, and shows the socket that was taken from there. False:
    /// another attempt does not help.
    fn ask(&mut self, named: request::Transfer, pidfd: i32, got: i32) -> bool {
        ctl::wanted();
        let show = |number| {
            let shown = request::Transfer { number, descriptor: 0, pid: 0, shown: true };
            ctl::request(shown, Some(got)).map(drop)
        };
        if let Some(place) = self.0 {
            // ENOENT: the request was answered, or there is another monitor.
            return match show(place.load(Ordering::Acquire)) {
                Err(Errno::ENOENT) => self.is_done(),
                r => r.is_ok(),
            };
        }
        let Ok((answer, _)) = ctl::request(named, Some(pidfd)) else { return false };
        let number = answer.number;
        let free = |t: &&AtomicU64| t.compare_exchange(0, number, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        self.0 = TAKES.iter().find(free);
        self.0.is_some() && show(number).is_ok()
    }

    fn is_done(&self) -> bool {
        self.0.is_some_and(|place| place.load(Ordering::Acquire) == DONE)
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        if let Some(place) = self.0 {
            place.store(0, Ordering::Release);
        }
    }
}

fn is_tcp(fd: i32) -> bool {
    matches!(inspect::int_option(fd, libc::SO_DOMAIN), Some(libc::AF_INET | libc::AF_INET6))
        && inspect::int_option(fd, libc::SO_PROTOCOL) == Some(libc::IPPROTO_TCP)
}

fn is_listening(fd: i32) -> bool {
    inspect::int_option(fd, libc::SO_ACCEPTCONN) == Some(1)
}

/// A descriptor of this process that another one takes: its number, the SO_COOKIE of the socket
/// that the taker has got, and the number of the request.
type Asked = (i32, u64, u64);
static ASKED: Mailbox<Asked, REQUESTS> = Mailbox::new();

/// Another process takes a descriptor of this one. Notes that, to be answered where the thread
/// holds no lock.
pub fn asked(m: answer::Transfer) {
    // If there is no room, the taker asks again.
    let _ = ASKED.note((m.descriptor as i32, m.cookie, m.number));
    ctl::defer();
}

/// The holder has answered a request of this process.
pub fn done(number: u64) {
    let is =
        |t: &&AtomicU64| number != 0 && t.compare_exchange(number, DONE, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    let _ = TAKES.iter().find(is);
}

/// Answers the noted requests. Called where the thread holds no lock.
#[inline]
pub fn answer() {
    ASKED.answer(|(fd, cookie, number)| {
        // The taker has proved its right to this socket. If another socket has the number now,
        // the taker has not got that one.
        if successor::cookie(fd) == Some(cookie) {
            let _held = Held::all();
            passing::passed(fd);
        }
        ctl::tell(request::Transferred { number }, None);
    });
}

/// In a forked child: the requests were for the parent.
#[link_section = ".text.fsocket_start"]
pub fn become_child() {
    ASKED.become_child(drop);
    for place in &TAKES {
        if place.load(Ordering::Relaxed) != 0 {
            place.store(0, Ordering::Relaxed);
        }
    }
}
