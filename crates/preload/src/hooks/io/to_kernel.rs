//! Calls that are the kernel's in any case: a connection of ours becomes a kernel connection first.

use super::super::answer::guarded;
use fsocket_fdtable::pool;
use fsocket_lifecycle::exec;
use libc::*;

pub fn to_kernel(fd: c_int) {
    pool::let_go(fd);
    guarded(|| exec::hand_over(fd));
}

/// # Safety
/// `list` has `n` pointers to an `aiocb`, or null.
pub unsafe fn aio_to_kernel(list: *const *mut c_void, n: c_int) {
    for i in 0..n.max(0) as usize {
        // SAFETY: one of the `n`; the descriptor is the first member of an `aiocb`.
        if let Some(fd) = unsafe { (*list.add(i)).cast::<c_int>().as_ref() } {
            to_kernel(*fd);
        }
    }
}
