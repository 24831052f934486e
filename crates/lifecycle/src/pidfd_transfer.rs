//! `pidfd_getfd`: a process takes a descriptor of another one, which is not asked.
//!
//! Of a connection over shared memory it would get the placeholder. So the library of
//! the taker asks the monitor, and that the holder, to make it the kernel's; the holder does so
//! when it next waits or asks for readiness (the monitor wakes who sleeps), and the taker takes
//! again until it has the real one. A taker without the library gets the placeholder, as does
//! one whose holder does neither in `PATIENCE_NS`; docs/limits.md says so.

use crate::mailbox::Mailbox;
use crate::signals::Held;
use crate::{close, ctl, inspect, passing, pool, process, stats};
use core::sync::atomic::{AtomicU32, Ordering};
use fsocket_abi::arena::Reason;
use fsocket_proto::{kind as msg, Msg};
use fsocket_sys::{self as sys, Errno, Result};

/// How long the taker waits for the holder, and how often it looks, nanoseconds.
const PATIENCE_NS: u64 = 1_000_000_000;
const LOOK_NS: u64 = 1_000_000;
/// Looks after which the holder is asked again: it may have been on its way to sleep.
const AGAIN: u32 = 50;
/// Requests that wait for the holder to look.
const REQUESTS: usize = 64;

const SYS_PIDFD_GETFD: i64 = 438;

fn get(pidfd: i32, target: i32, flags: u32) -> Result<i32> {
    // SAFETY: numbers only.
    unsafe { sys::raw(SYS_PIDFD_GETFD, [pidfd as usize, target as usize, flags as usize, 0, 0, 0]) }.map(|fd| fd as i32)
}

/// The call. Errors: the kernel's.
pub fn obtain(pidfd: i32, target: i32, flags: u32) -> Result<i32> {
    let mut fd = get(pidfd, target, flags)?;
    if !is_tcp(fd) {
        pool::kernel_allocated(fd);
        return Ok(fd);
    }
    let pid = crate::unhooked::pid_of(pidfd);
    if pid == Some(sys::getpid()) {
        // As `dup`, or what looked like a free number of the program's was ours.
        if process::owns(target) || pool::holds(target) {
            let _ = sys::close(fd);
            return Err(Errno::EBADF);
        }
        let _ = close::duplicated(target, fd);
        return Ok(fd);
    }
    let ask = || {
        let mut m = Msg::new(msg::TRANSFER);
        m.arg0 = target as u32 as u64;
        m.arg1 = pid.unwrap_or(0).max(0) as u64;
        ctl::wanted();
        ctl::request(m, Some(pidfd)).is_ok()
    };
    let deadline = sys::now_ns().saturating_add(PATIENCE_NS);
    let before = DONE.load(Ordering::Relaxed);
    let mut looks = 0;
    // A listener, too: new connections are to come where the taker finds them.
    while (is_listening(fd) || !inspect::is_connected(fd)) && (looks % AGAIN != 0 || ask()) {
        let done = DONE.load(Ordering::Relaxed) != before;
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

fn is_tcp(fd: i32) -> bool {
    matches!(inspect::int_option(fd, libc::SO_DOMAIN), Some(libc::AF_INET | libc::AF_INET6))
        && inspect::int_option(fd, libc::SO_PROTOCOL) == Some(libc::IPPROTO_TCP)
}

fn is_listening(fd: i32) -> bool {
    inspect::int_option(fd, libc::SO_ACCEPTCONN) == Some(1)
}

/// Descriptors of this process that are taken, and by whom.
static ASKED: Mailbox<(i32, u64), REQUESTS> = Mailbox::new();
/// How often a holder has said that it has looked.
static DONE: AtomicU32 = AtomicU32::new(0);

/// Somebody takes a descriptor of this process. Done when nothing is locked.
pub fn asked(m: &Msg) {
    // The taker asks again.
    let _ = ASKED.note((m.arg0 as i32, m.id));
    ctl::defer();
}

/// The holder of one that we take has looked.
pub fn done() {
    DONE.fetch_add(1, Ordering::Relaxed);
}

/// Where nothing is locked.
#[inline]
pub fn answer() {
    ASKED.answer(|(fd, by)| {
        {
            let _held = Held::all();
            passing::passed(fd);
        }
        let mut m = Msg::new(msg::TRANSFERRED);
        m.id = by;
        ctl::tell(m, None);
    });
}

/// In a forked child: what was asked was the parent.
#[link_section = ".text.fsocket_start"]
pub fn become_child() {
    ASKED.become_child(drop);
}
