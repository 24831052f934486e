//! Processes: children that borrow memory, private descriptor tables, resource limits, and
//! collecting ended children.

use super::errno;
#[cfg(not(target_env = "gnu"))]
use crate::lacking::close_range;
use crate::shared::{state, Slot};
#[cfg(target_env = "gnu")]
use libc::close_range;
use libc::{c_char, c_int, c_void};
use std::ptr::{null, null_mut};
use std::sync::atomic::Ordering::Release;

/// Actions of the child ([`crate::symbols::VFORK`]).
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
/// A descriptor number that no program here uses.
const FREE: c_int = 200;

/// All that the child needs. It is made before the child, which runs in the memory of its parent.
struct Order {
    fd: c_int,
    what: i64,
    path: *const c_char,
    argv: [*const c_char; 2],
    env: [*const c_char; 1],
}

/// Runs a child. Returns its exit status, or 1000 plus the signal that ended it.
pub(super) fn vfork(s: &Slot, fd: c_int, what: i64, cloned: bool) -> i64 {
    let path = if what == what::EXEC_FAILS { c"/nowhere" } else { c"/bin/true" };
    let order = Order { fd, what, path: path.as_ptr(), argv: [path.as_ptr(), null()], env: [null()] };
    let pid = if cloned {
        by_clone(&order)
    } else {
        // SAFETY: the child ends in `child`, which never returns and writes to its own frames only.
        unsafe { by_libc(&order) }
    };
    if pid < 0 {
        return -1;
    }
    s.state.store(state::SETTLING, Release);
    let mut status = 0;
    // SAFETY: the call writes one local status.
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
    // SAFETY: the order outlives the child, and this frame is not written between the two returns.
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
        // SAFETY: `order` is valid, because the parent waits until the child has ended.
        unsafe { child(&*(order as *const Order)) }
    }
    let mut stack = vec![0u64; STACK / 8];
    // SAFETY: the stack is freed after the child has ended, and its end is aligned to 16 bytes.
    unsafe {
        let top = (stack.as_mut_ptr().add(stack.len()) as usize & !15) as *mut c_void;
        let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
        libc::clone(begin, top, flags, order as *const Order as *mut c_void)
    }
}

/// The child. It makes only calls of libc.
unsafe fn child(order: &Order) -> ! {
    // SAFETY: the calls use numbers and the order, which the parent has made.
    unsafe {
        match order.what {
            what::CLOSE | what::EXEC_CLOSED => drop(libc::close(order.fd)),
            what::DUP => {
                libc::dup2(order.fd, FREE);
                libc::close(order.fd);
            }
            what::CLOSE_ALL | what::EXEC_ALL_CLOSED => drop(close_range(3, !0, 0)),
            _ => {}
        }
        if order.what >= what::EXEC {
            libc::execve(order.path, order.argv.as_ptr(), order.env.as_ptr());
        }
        libc::_exit(7)
    }
}

/// Makes the descriptor table private, in a way numbered as in [`crate::symbols::UNSHARE`].
pub(super) fn unshare_files(how: i64) -> i64 {
    const CLOSE_RANGE_UNSHARE: c_int = 2;
    // SAFETY: the calls take numbers only, and no descriptor is in that range.
    unsafe {
        if how == 0 {
            libc::unshare(libc::CLONE_FILES).into()
        } else {
            close_range(1_000_000, 1_000_001, CLOSE_RANGE_UNSHARE).into()
        }
    }
}

/// Collects all children that have ended. Returns their number; the second result is 0 or the error
/// of the last call.
pub(super) fn reap(s: &Slot) -> i64 {
    let mut n = 0;
    loop {
        // SAFETY: the status pointer is null.
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
    // SAFETY: the call reads one local value.
    unsafe { libc::setrlimit(which as _, &new).into() }
}
