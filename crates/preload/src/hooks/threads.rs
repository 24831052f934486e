//! Cancellation of threads (`fsocket_shm::cancel`, ADR 31). A cancelled thread ends between two
//! calls of the library, never inside a frame that holds something.

use crate::real;
use fsocket_runtime::musl;
use fsocket_shm::{asleep, cancel};
use libc::*;

const DEFERRED: c_int = 0;
const ASYNCHRONOUS: c_int = 1;

/// Calls libc's `pthread_testcancel` (in glibc before 2.34 it is in libpthread). It may unwind the
/// thread's stack. A frame that has something to clean up would end the process then.
#[inline(always)]
fn test() {
    let address = real::address(c"pthread_testcancel");
    if !address.is_null() {
        // SAFETY: libc's function of that name has this type.
        unsafe { core::mem::transmute::<*const c_void, unsafe extern "C-unwind" fn()>(address)() };
    }
}

/// `pthread_cancel` of musl. Its signal comes only once, and may arrive when the thread is about
/// to sleep in the library. So the request is noted before ([`fsocket_shm::cancel_in_musl`]).
///
/// # Safety
/// As for pthread_cancel(3).
#[cold]
unsafe fn cancel_in_musl(thread: pthread_t) -> c_int {
    {
        let _errno = fsocket_sys::errno::Saved::errno();
        cancel::be_careful();
        fsocket_shm::cancel_in_musl::take_over(|helper| real!(pthread_cancel(helper)));
    }
    // SAFETY: pthread_cancel(3) requires that the thread has not been joined, so its handle is
    // valid.
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
        // SAFETY: pthread_cancel(3) requires that the thread has not been joined, so its handle is
        // valid.
        return unsafe { cancel_in_musl(thread) };
    }
    if thread == cancel::me() as pthread_t {
        // glibc's own functions act upon the request, and the hooks test for it.
        cancel::be_careful();
        let r = real!(pthread_cancel(thread));
        if r == 0 {
            // SAFETY: this is the handle of the calling thread, which is valid.
            asleep::cancelled(thread, unsafe { cancel::tid_of(thread) });
        }
        return r;
    }
    // Read before the cancellation, because the thread may end right after it.
    // SAFETY: pthread_cancel(3) requires that the thread has not been joined, so its handle is
    // valid.
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

/// Begins a hook in a program that cancels threads. `point`: the hook is a cancellation point.
/// Defers cancellation until [`leave`], because nothing may unwind the library's frames. Returns
/// the former type if it must be restored.
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

/// Ends such a hook: restores the former type.
#[cold]
#[inline(never)]
pub fn leave(kind: c_int) {
    // If a request is pending, libc acts upon it here.
    real!(pthread_setcanceltype(kind, core::ptr::null_mut()));
}

/// Called after an operation: ends the thread if it was cancelled.
#[cold]
#[inline(never)]
pub fn after() {
    if cancel::was_hit() {
        test();
    }
}
