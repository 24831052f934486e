//! A thread gets its own descriptor table (by `unshare`, `close_range` or `clone`). The library
//! has one table for all threads, and would confuse the descriptors. So everything moves to kernel
//! TCP before the call.

use crate::table::{self, DESCS};
use crate::{process, sandbox, zone};
use fsocket_sys as sys;

/// Called before such a call. The process uses the kernel for the rest of its life.
pub fn begin() {
    if !has_one_thread() {
        begin_beside();
    }
}

/// Like [`begin`], called before a call that makes the thread.
pub fn begin_beside() {
    if process::nonce() == 0 {
        return;
    }
    let _errno = sys::errno::Saved::errno();
    table::all().filter(|d| zone::of(d).is_some()).for_each(zone::pass_on);
    sandbox::enter();
    for d in (0..DESCS.len()).filter_map(|i| DESCS.get(i)) {
        if zone::of(d).is_some() {
            zone::closed(d);
        }
        // The description stays, because another thread may be about to use it.
        table::remove_fds(d);
    }
}

/// Has the process only one thread? (Such a process does not share its descriptor table, even if
/// it was forked from one with more threads.)
fn has_one_thread() -> bool {
    /// Links of the directory besides those of the threads.
    const OTHERS: u64 = 2;
    process::is_single_threaded() || sys::links(c"/proc/self/task").is_ok_and(|n| n == OTHERS + 1)
}
