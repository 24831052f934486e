//! The signal by which musl cancels a thread.
//!
//! musl's handler acts upon a thread that is in one of musl's own calls. Everywhere else it blocks the signal and sends
//! it again, to be handled when a handler below it returns. A sleep of ours that begins after that could not be
//! interrupted. So a handler of ours comes first: it drops a signal that has interrupted a sleep of ours, and leaves
//! every other one to musl's. Nothing is lost: `pthread_cancel` notes the request in libc before it sends the signal, the
//! sleep ends, and the hook asks libc.

use crate::asleep;
use core::ffi::c_void;
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use fsocket_runtime::signals::Action;
use libc::{c_int, pthread_attr_t, pthread_t};

/// Address of musl's handler.
static LIBCS: AtomicUsize = AtomicUsize::new(0);

type Start = extern "C" fn(*mut c_void) -> *mut c_void;
type Create = unsafe extern "C" fn(*mut pthread_t, *const pthread_attr_t, Start, *mut c_void) -> c_int;
type Join = unsafe extern "C" fn(pthread_t, *mut *mut c_void) -> c_int;

/// Puts our handler before musl's, once. musl sets its own when a thread is first cancelled, so that is a thread which
/// has nothing to do. `cancel` is libc's `pthread_cancel`.
pub fn take_over(cancel: impl FnOnce(pthread_t) -> c_int) {
    static BEGUN: AtomicBool = AtomicBool::new(false);
    static READY: AtomicBool = AtomicBool::new(false);
    if READY.load(Ordering::Acquire) {
        return;
    }
    if BEGUN.swap(true, Ordering::AcqRel) {
        // Another thread does so; in a child that was forked meanwhile nobody does.
        for _ in 0..crate::cancel::TURNS {
            if READY.load(Ordering::Acquire) {
                break;
            }
            fsocket_sys::nanosleep(crate::cancel::TURN_NS);
        }
        return;
    }
    cancel_helper(cancel);
    if let Ok(now) = Action::swap(crate::cancel::SIGCANCEL_OF_MUSL, None) {
        if !matches!(now.handler, libc::SIG_DFL | libc::SIG_IGN) {
            LIBCS.store(now.handler, Ordering::Release);
            let _ = Action::swap(
                crate::cancel::SIGCANCEL_OF_MUSL,
                Some(&Action { handler: interrupted as *const () as usize, ..now }),
            );
        }
    }
    READY.store(true, Ordering::Release);
}

extern "C" fn nothing(_: *mut c_void) -> *mut c_void {
    core::ptr::null_mut()
}

fn cancel_helper(cancel: impl FnOnce(pthread_t) -> c_int) {
    // SAFETY: NUL-terminated names.
    let [create, join] =
        unsafe { [c"pthread_create", c"pthread_join"].map(|name| libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr())) };
    if create.is_null() || join.is_null() {
        return;
    }
    let mut helper: pthread_t = 0;
    // SAFETY: libc's functions of these names have these types. The thread is joined once, after its last use.
    unsafe {
        let create = core::mem::transmute::<*mut c_void, Create>(create);
        let join = core::mem::transmute::<*mut c_void, Join>(join);
        if create(&raw mut helper, core::ptr::null(), nothing, core::ptr::null_mut()) == 0 {
            cancel(helper);
            join(helper, core::ptr::null_mut());
        }
    }
}

extern "C" fn interrupted(signal: c_int, info: *mut c_void, context: *mut c_void) {
    if asleep::is_interrupted() {
        return;
    }
    type Handler = extern "C" fn(c_int, *mut c_void, *mut c_void);
    let libcs = LIBCS.load(Ordering::Acquire);
    // SAFETY: the address of musl's handler, which was stored before this one was set; it takes three arguments.
    unsafe { core::mem::transmute::<usize, Handler>(libcs)(signal, info, context) };
}
