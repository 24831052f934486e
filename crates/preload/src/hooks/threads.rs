//! Cancellation of threads; `fsocket_shm::cancel` says how.

use crate::real;
use fsocket_shm::{asleep, cancel};
use libc::*;

const DEFERRED: c_int = 0;
const ASYNCHRONOUS: c_int = 1;

/// glibc's `pthread_testcancel`, which is libpthread's before 2.34. It unwinds the thread's stack: a frame that has
/// something to clean up would end the process.
#[inline(always)]
fn test() {
    let address = real::address(c"pthread_testcancel");
    if !address.is_null() {
        // SAFETY: glibc's function of that name.
        unsafe { core::mem::transmute::<*const c_void, unsafe extern "C-unwind" fn()>(address)() };
    }
}

pub unsafe fn pthread_cancel(thread: pthread_t) -> c_int {
    if thread == cancel::me() as pthread_t {
        // glibc's own functions act upon it, and ours test for it.
        cancel::be_careful();
        let r = real!(pthread_cancel(thread));
        if r == 0 {
            // SAFETY: the calling thread's own.
            asleep::cancelled(thread, unsafe { cancel::tid_of(thread) });
        }
        return r;
    }
    // Before: it may be gone right after.
    // SAFETY: the program says that the thread has not been joined, as for libc's function.
    let tid = unsafe { cancel::tid_of(thread) };
    cancel::be_careful();
    let r = real!(pthread_cancel(thread));
    if r == 0 {
        let _errno = fsocket_sys::errno::Saved::errno();
        asleep::cancelled(thread, tid);
    }
    r
}

pub unsafe fn pthread_setcanceltype(kind: c_int, old: *mut c_int) -> c_int {
    if kind == ASYNCHRONOUS {
        cancel::be_careful();
    }
    real!(pthread_setcanceltype(kind, old))
}

/// The beginning of a hook in a program that cancels threads. `point`: it is a
/// cancellation point. Our frames are not to be unwound from anywhere: the type of
/// cancellation is deferred; returns what it was.
#[cold]
#[inline(never)]
pub fn enter(point: bool) -> Option<c_int> {
    let mut old = DEFERRED;
    real!(pthread_setcanceltype(DEFERRED, &mut old));
    if point && cancel::due() {
        test();
    }
    (old != DEFERRED).then_some(old)
}

/// Its end.
#[cold]
#[inline(never)]
pub fn leave(kind: c_int) {
    // Acts at once, if there is something to act upon.
    real!(pthread_setcanceltype(kind, core::ptr::null_mut()));
}

/// An operation has ended.
#[cold]
#[inline(never)]
pub fn after() {
    if cancel::was_hit() {
        test();
    }
}
