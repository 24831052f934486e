//! Processes: children that borrow memory, descriptors of one's own, limits, and who collects the dead.

use super::errno;
use crate::shared::{state, Slot};
use libc::{c_char, c_int, c_void};
use std::ptr::{null, null_mut};
use std::sync::atomic::Ordering::Release;

/// What the child does ([`crate::symbols::VFORK`]).
mod what {
    pub const CLOSE: i64 = 1;
    pub const DUP: i64 = 2;
    pub const CLOSE_ALL: i64 = 3;
    pub const EXEC: i64 = 4;
    pub const EXEC_CLOSED: i64 = 5;
    pub const EXEC_ALL_CLOSED: i64 = 6;
    pub const EXEC_FAILS: i64 = 7;
}

const STACK: usize = 64 << 10;
/// A number that no program here has.
const FREE: c_int = 200;

/// All that the child needs, made before it: it runs in the memory of its parent.
struct Order {
    fd: c_int,
    what: i64,
    path: *const c_char,
    argv: [*const c_char; 2],
    env: [*const c_char; 1],
}

/// How the child ended: its status, or 1000 and the signal.
pub(super) fn vfork(s: &Slot, fd: c_int, what: i64, cloned: bool) -> i64 {
    let path = if what == what::EXEC_FAILS { c"/nowhere" } else { c"/bin/true" };
    let order = Order { fd, what, path: path.as_ptr(), argv: [path.as_ptr(), null()], env: [null()] };
    let pid = if cloned {
        by_clone(&order)
    } else {
        // SAFETY: the child ends in `child`, which returns nothing and writes to its own frames only.
        unsafe { by_libc(&order) }
    };
    if pid < 0 {
        return -1;
    }
    s.state.store(state::SETTLING, Release);
    let mut status = 0;
    // SAFETY: a status of ours.
    while unsafe { libc::waitpid(pid, &mut status, 0) } != pid {
        if errno() != libc::EINTR {
            break;
        }
    }
    s.state.store(state::BUSY, Release);
    let signal = status & 0x7f;
    i64::from(if signal == 0 { status >> 8 } else { 1000 + signal })
}

#[inline(never)]
unsafe fn by_libc(order: &Order) -> libc::pid_t {
    // SAFETY: the order outlives the child; nothing of this frame is written between the two returns.
    unsafe {
        #[allow(deprecated)]
        match libc::vfork() {
            0 => child(order),
            pid => pid,
        }
    }
}

fn by_clone(order: &Order) -> libc::pid_t {
    extern "C" fn begin(order: *mut c_void) -> c_int {
        // SAFETY: the parent waits, with what it points to.
        unsafe { child(&*(order as *const Order)) }
    }
    let mut stack = vec![0u64; STACK / 8];
    // SAFETY: a stack that is freed when the child is gone; its end is aligned as the ABI wants it, or made so.
    unsafe {
        let top = (stack.as_mut_ptr().add(stack.len()) as usize & !15) as *mut c_void;
        let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
        libc::clone(begin, top, flags, order as *const Order as *mut c_void)
    }
}

/// The child: calls of libc alone.
unsafe fn child(order: &Order) -> ! {
    // SAFETY: plain calls with what was made before.
    unsafe {
        match order.what {
            what::CLOSE | what::EXEC_CLOSED => drop(libc::close(order.fd)),
            what::DUP => {
                libc::dup2(order.fd, FREE);
                libc::close(order.fd);
            }
            what::CLOSE_ALL | what::EXEC_ALL_CLOSED => drop(libc::close_range(3, !0, 0)),
            _ => {}
        }
        if order.what >= what::EXEC {
            libc::execve(order.path, order.argv.as_ptr(), order.env.as_ptr());
        }
        libc::_exit(7)
    }
}

/// As [`crate::symbols::UNSHARE`] numbers them.
pub(super) fn unshare_files(how: i64) -> i64 {
    const CLOSE_RANGE_UNSHARE: c_int = 2;
    // SAFETY: plain calls; no descriptor has a number that high.
    unsafe {
        if how == 0 {
            libc::unshare(libc::CLONE_FILES).into()
        } else {
            libc::close_range(1_000_000, 1_000_001, CLOSE_RANGE_UNSHARE).into()
        }
    }
}

/// How many have ended; then 0, or the error.
pub(super) fn reap(s: &Slot) -> i64 {
    let mut n = 0;
    loop {
        // SAFETY: no status is asked for.
        match unsafe { libc::waitpid(-1, null_mut(), libc::WNOHANG) } {
            1.. => n += 1,
            0 => break s.put_aux(0),
            _ => break s.put_aux(errno().into()),
        }
    }
    n
}

pub(super) fn limit(which: i64, value: i64) -> i64 {
    let new = libc::rlimit { rlim_cur: value as libc::rlim_t, rlim_max: value as libc::rlim_t };
    // SAFETY: a value of ours.
    unsafe { libc::setrlimit(which as libc::__rlimit_resource_t, &new).into() }
}
