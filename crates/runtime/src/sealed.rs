//! Has the program given up system calls, or rights by Landlock?

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

/// The program is about to filter its system calls. False: it was before.
pub fn seal() -> bool {
    !SEALED.swap(true, Ordering::Relaxed)
}

/// Everything is the kernel's by now: the filter may be set.
pub fn let_filter() {
    fsocket_sys::stop_advising();
    FILTERED.store(true, Ordering::Relaxed);
}
