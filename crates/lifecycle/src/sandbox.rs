//! Before a system-call filter: afterwards the library may make no call that
//! the program would not make itself, so everything becomes the kernel's.

use crate::table::{self, DESCS};
use crate::{ctl, epoll, exec, listen, path, pool, process, sealed};

/// The program asks the kernel to filter its system calls from now on. What it
/// allows we do not know; it was not written with us in mind.
pub fn enter() {
    if process::nonce() == 0 || !sealed::seal() {
        return;
    }
    process::disable();
    // This process's share: processes of the fork group that hold the listener go on.
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
    // The socket stays open, so that the monitor knows us alive, but what it
    // says is not read any more.
    ctl::detach();
    sealed::let_filter();
}
