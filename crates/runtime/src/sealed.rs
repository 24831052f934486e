//! Whether the program has restricted itself, by a filter of system calls or by Landlock.
//! Connections leave shared memory before either takes effect.

use core::sync::atomic::{AtomicBool, Ordering};

static SEALED: AtomicBool = AtomicBool::new(false);

/// Everything has moved to the kernel, so a filter may be active.
static FILTERED: AtomicBool = AtomicBool::new(false);

/// Has this process, or its parent before the fork, asked for a filter?
pub fn sealed() -> bool {
    SEALED.load(Ordering::Relaxed)
}

static RESTRICTED: AtomicBool = AtomicBool::new(false);

/// Records that a thread of this process has restricted itself by Landlock. Only the kernel knows
/// to which addresses each thread may connect, so a route that another thread has found proves
/// nothing. New connections use the kernel from now on.
pub fn restrict() {
    RESTRICTED.store(true, Ordering::Relaxed);
}

pub fn restricted() -> bool {
    RESTRICTED.load(Ordering::Relaxed)
}

/// May a filter be active?
pub fn filtered() -> bool {
    FILTERED.load(Ordering::Relaxed)
}

/// Records that the program is about to filter its system calls. False: it has set a filter
/// before.
pub fn seal() -> bool {
    !SEALED.swap(true, Ordering::Relaxed)
}

/// Everything has moved to the kernel: the program's filter may be set now.
pub fn let_filter() {
    fsocket_sys::stop_advising();
    FILTERED.store(true, Ordering::Relaxed);
}
