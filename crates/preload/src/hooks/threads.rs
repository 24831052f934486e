//! Cancellation of threads; `fsocket_shm::cancel` says how.

use crate::real;
use fsocket_runtime::musl;
use fsocket_shm::{asleep, cancel};
use libc::*;

const DEFERRED: c_int = 0;
const ASYNCHRONOUS: c_int = 1;

/// libc's `pthread_testcancel`, which is libpthread's in glibc before 2.34. That unwinds the thread's stack: a frame that has
/// something to clean up would end the process.
#[inline(always)]
fn test() {
    let address = real::address(c"pthread_testcancel");
    if !address.is_null() {
        // SAFETY: libc's function of that name.
        unsafe { core::mem::transmute::<*const c_void, unsafe extern "C-unwind" fn()>(address)() };
    }
}

/// `pthread_cancel` of musl. Its signal may arrive while the thread is on its way to sleep in us, and once only, so the
/// request is noted before ([`fsocket_shm::cancel_in_musl`]).
///
/// # Safety
/// As pthread_cancel(3).
#[cold]
unsafe fn cancel_in_musl(thread: pthread_t) -> c_int {
    {
        let _errno = fsocket_sys::errno::Saved::errno();
        cancel::be_careful();
        fsocket_shm::cancel_in_musl::take_over(|helper| real!(pthread_cancel(helper)));
    }
    // SAFETY: the program says that the thread has not been joined, as for libc's function.
    let tid = unsafe { cancel::tid_of(thread) };
    let request = cancel::announce(thread, tid);
    let r = real!(pthread_cancel(thread));
    if let Some(request) = request {
        let _errno = fsocket_sys::errno::Saved::errno();
        request.decided(r == 0);
        if r == 0 && thread != cancel::me() as pthread_t {
            asleep::wake_cancelled(thread, tid);
        }
    }
    r
}

pub unsafe fn pthread_cancel(thread: pthread_t) -> c_int {
    if musl::is_here() {
        // SAFETY: the contract is this function's, with the same argument.
        return unsafe { cancel_in_musl(thread) };
    }
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
