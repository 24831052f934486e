//! What changes the process under the sockets.

use crate::real;
use core::sync::atomic::Ordering;
use fsocket_core::table::{self, kind};
use fsocket_core::{epoll, process};
use libc::*;

pub unsafe fn vfork() -> pid_t {
    // Not the real one: its child runs in our memory and would take the
    // parent's connections down with each close().
    unsafe { fork() }
}

pub unsafe fn unshare(flags: c_int) -> c_int {
    let r = unsafe { real::unshare(flags) };
    if r == 0 && flags & CLONE_NEWNET != 0 {
        process::disable();
    }
    r
}

pub unsafe fn setns(fd: c_int, kind: c_int) -> c_int {
    let r = unsafe { real::setns(fd, kind) };
    if r == 0 && (kind == 0 || kind & CLONE_NEWNET != 0) {
        process::disable();
    }
    r
}

pub unsafe fn fdopen(fd: c_int, mode: *const c_char) -> *mut c_void {
    // stdio reads and writes below our hooks.
    if let Some(d) = table::lookup(fd) {
        if matches!(d.kind(), kind::FRESH | kind::BOUND) && d.refs.load(Ordering::Relaxed) > 0 {
            epoll::leave_to_kernel(d);
            table::forget(d);
        }
    }
    unsafe { real::fdopen(fd, mode) }
}
