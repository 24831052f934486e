//! The signal with which musl cancels a thread.
//!
//! musl's handler cancels a thread only inside musl's own calls. Elsewhere it blocks the signal
//! and sends it again, to be handled after the interrupted signal handler has returned. Until then
//! the signal cannot interrupt a sleep of the library. So the library installs its own handler in
//! front of musl's. This handler drops a signal that has interrupted a sleep of the library, and
//! passes every other signal to musl's handler. No request is lost: `pthread_cancel` notes the
//! request in libc before it sends the signal; the sleep ends, and the hook asks libc.

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

/// Installs the library's handler in front of musl's, once. musl installs its own at the first
/// cancellation, so this first cancels an idle helper thread. `cancel` is libc's `pthread_cancel`.
pub fn take_over(cancel: impl FnOnce(pthread_t) -> c_int) {
    static BEGUN: AtomicBool = AtomicBool::new(false);
    static READY: AtomicBool = AtomicBool::new(false);
    if READY.load(Ordering::Acquire) {
        return;
    }
    if BEGUN.swap(true, Ordering::AcqRel) {
        // Another thread is installing the handler. (In a child forked meanwhile, that thread does
        // not exist.)
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
    // SAFETY: the names are NUL-terminated.
    let [create, join] =
        unsafe { [c"pthread_create", c"pthread_join"].map(|name| libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr())) };
    if create.is_null() || join.is_null() {
        return;
    }
    let mut helper: pthread_t = 0;
    // SAFETY: libc's functions of these names have these types. The thread is joined once, after
    // its last use.
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
    // SAFETY: `libcs` is the address of musl's handler, which takes three arguments. It was stored
    // before the library's handler was installed.
    unsafe { core::mem::transmute::<usize, Handler>(libcs)(signal, info, context) };
}
