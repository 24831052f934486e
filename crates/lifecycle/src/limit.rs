//! The program limits its address space. If the limit leaves no room for the library's
//! reservation, the process uses the kernel (ADR 68).

use crate::{chan, epoll, exec, listen, path, process, room, space, table, waker};
use core::sync::atomic::Ordering;
use fsocket_sys as sys;

/// Called before the program limits its address space. If it has a listener for the next program,
/// channels may not fit under the limit, and then their waiting connections could not move any
/// more. So this sets the limit, tests whether there is room, and restores the old limit. If there
/// is no room, the connections move now.
///
/// # Safety
/// `new` is null, or a pointer of the program.
pub unsafe fn limiting(new: *const libc::rlimit64) {
    // SAFETY: any bytes are such numbers, and the guarded copy reports a bad pointer.
    let Ok(Some(new)) = (unsafe { crate::user::get_if(new) }) else { return };
    if process::nonce() == 0 || new.rlim_cur == libc::RLIM64_INFINITY || !listen::any_exec_prepared() {
        return;
    }
    let Ok(old) = sys::address_space_limit(None) else { return };
    if new.rlim_cur > new.rlim_max.min(old.1) || sys::address_space_limit(Some((new.rlim_cur, old.1))).is_err() {
        return; // the kernel refuses the limit, also in the program's own call
    }
    let room = chan::mappable();
    if sys::address_space_limit(Some(old)).is_ok() && !room {
        path::pass_on_exec_prepared();
    }
}

/// Called after the program has set a limit for its address space or its data. If the library's
/// reservation leaves no room under the limit, the library returns all its memory, and the process
/// uses the kernel. `alone`: there is no second thread.
pub fn limited(alone: bool) {
    if process::nonce() == 0 || chan::mappable() && !room::is_narrow() {
        return;
    }
    if alone {
        space::give_back_all();
    }
    if !room::is_narrow() && (chan::mappable() || chan::all().next().is_none()) {
        return;
    }
    process::disable();
    if listen::any() {
        path::give_up_all();
    }
    exec::hand_over_all();
    if alone {
        for c in chan::all() {
            c.retired.store(true, Ordering::Release);
            c.unmap_if_unused();
        }
        space::give_back_all();
    }
    trim_all();
}

/// Frees the unused parts of the library's tables. Afterwards the tables cannot grow.
pub fn trim_all() {
    table::DESCS.trim();
    chan::CHANS.trim();
    waker::trim();
    fsocket_shm::pipes::trim();
    epoll::trim();
}
