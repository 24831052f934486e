//! A thread gets descriptors of its own (`unshare`, `close_range` and `clone` can do that). The library has one table for
//! all threads, and would take one thread's `close` for another's. Before the call everything becomes kernel TCP.

use crate::table::{self, DESCS};
use crate::{process, sandbox, zone};
use fsocket_sys as sys;

/// Before the call. The process stays with the kernel for good.
pub fn begin() {
    if !has_one_thread() {
        begin_beside();
    }
}

/// The same before the call that makes the thread.
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
        // (Another thread may be about to use the description: it stays.)
        table::remove_fds(d);
    }
}

/// The descriptors of a process with one thread are its own anyway, also if it was forked from one with more.
fn has_one_thread() -> bool {
    /// Links of the directory, with one for each thread.
    const OTHERS: u64 = 2;
    process::is_single_threaded() || sys::links(c"/proc/self/task").is_ok_and(|n| n == OTHERS + 1)
}
