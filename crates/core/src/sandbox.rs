//! Before a system-call filter: afterwards the library may make no call that
//! the program would not make itself, so everything becomes the kernel's.

use crate::table::{self, kind, DESCS};
use crate::{ctl, epoll, exec, listen, pool, process};
use core::sync::atomic::{AtomicBool, Ordering};

static SEALED: AtomicBool = AtomicBool::new(false);
/// With that all has been done.
static FILTERED: AtomicBool = AtomicBool::new(false);

/// Has this process, or the one that it was forked from, been sealed?
pub fn sealed() -> bool {
    SEALED.load(Ordering::Relaxed)
}

static RESTRICTED: AtomicBool = AtomicBool::new(false);

/// A thread of ours has given up rights by Landlock: what it may connect to the kernel knows, for
/// each thread, and a route that another thread has found says nothing of it. New connections are
/// the kernel's from now on.
pub fn restrict() {
    RESTRICTED.store(true, Ordering::Relaxed);
}

pub fn restricted() -> bool {
    RESTRICTED.load(Ordering::Relaxed)
}

/// May a filter be set by now?
pub fn filtered() -> bool {
    FILTERED.load(Ordering::Relaxed)
}

/// The program asks the kernel to filter its system calls from now on. What it
/// allows we do not know; it was not written with us in mind.
pub fn enter() {
    if process::nonce() == 0 || SEALED.swap(true, Ordering::Relaxed) {
        return;
    }
    process::disable();
    // This process's share: processes of the fork group that hold the listener go on.
    if listen::any() {
        listen::give_up_all();
    }
    crate::upgrade::give_up_all();
    exec::hand_over_all();
    for d in (0..DESCS.len()).filter_map(|i| DESCS.get(i)) {
        if matches!(d.kind(), kind::FRESH | kind::BOUND) && d.refs.load(Ordering::Relaxed) > 0 {
            epoll::leave_to_kernel(d);
            table::forget(d);
        }
    }
    pool::drain();
    crate::rights::forget_memory();
    // The socket stays open, so that the monitor knows us alive, but what it
    // says is not read any more.
    ctl::detach();
    FILTERED.store(true, Ordering::Relaxed);
}
