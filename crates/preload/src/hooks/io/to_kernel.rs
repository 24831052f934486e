//! Calls that only the kernel can serve (`sendfile`, `aio` and similar ones). A connection over
//! shared memory moves to kernel TCP first.

use super::super::answer::guarded;
use fsocket_fdtable::pool;
use fsocket_lifecycle::exec;
use libc::*;

pub fn to_kernel(fd: c_int) {
    pool::let_go(fd);
    guarded(|| exec::hand_over(fd));
}

/// # Safety
/// `list` has `n` entries, each null or a pointer to an `aiocb`.
pub unsafe fn aio_to_kernel(list: *const *mut c_void, n: c_int) {
    for i in 0..n.max(0) as usize {
        // SAFETY: `i` is below `n`, and the first member of an `aiocb` is the descriptor.
        if let Some(fd) = unsafe { (*list.add(i)).cast::<c_int>().as_ref() } {
            to_kernel(*fd);
        }
    }
}
