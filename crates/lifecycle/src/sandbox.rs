//! Moves everything to the kernel before a filter of system calls. Afterwards the library may make
//! only the system calls that the program itself makes.

use crate::table::{self, DESCS};
use crate::{ctl, epoll, exec, listen, path, pool, process, sealed};

/// Called before the program asks the kernel to filter its system calls. The library does not know
/// what the filter allows, and the filter's author did not consider the library.
pub fn enter() {
    if process::nonce() == 0 || !sealed::seal() {
        return;
    }
    process::disable();
    // Gives up only this process's part: other processes of the fork group that hold the listener
    // continue.
    if listen::any() {
        path::give_up_all();
    }
    crate::upgrade::give_up_all();
    exec::hand_over_all();
    for d in (0..DESCS.len()).filter_map(|i| DESCS.get(i)) {
        if d.is_unconnected() && d.is_used() {
            epoll::leave_to_kernel(d);
            table::forget(d);
        }
    }
    pool::drain();
    crate::credentials::forget_memory();
    // The control socket stays open, so that the monitor counts this process as alive. But the
    // process reads no messages any more.
    ctl::detach();
    sealed::let_filter();
}
