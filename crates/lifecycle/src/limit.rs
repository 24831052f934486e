//! The program limits its address space: what we have reserved must leave room below the limit.

use crate::{chan, epoll, exec, listen, path, process, room, space, table, waker};
use core::sync::atomic::Ordering;
use fsocket_sys as sys;

/// The program is about to set a limit to its address space, and has a listener for the next
/// program. Under the limit no channel may fit any more, and what waits in one could not be
/// moved: so it is tried now, with the limit that can be taken back.
///
/// # Safety
/// `new` is null or the program's.
pub unsafe fn limiting(new: *const libc::rlimit64) {
    // SAFETY: the program says that this is its memory; the copy returns EFAULT where nothing is.
    let Ok(Some(new)) = (unsafe { crate::user::get_if(new) }) else { return };
    if process::nonce() == 0 || new.rlim_cur == libc::RLIM64_INFINITY || !listen::any_exec_prepared() {
        return;
    }
    let Ok(old) = sys::address_space_limit(None) else { return };
    if new.rlim_cur > new.rlim_max.min(old.1) || sys::address_space_limit(Some((new.rlim_cur, old.1))).is_err() {
        return; // refused, and so will the program's own call be
    }
    let room = chan::mappable();
    if sys::address_space_limit(Some(old)).is_ok() && !room {
        path::pass_on_exec_prepared();
    }
}

/// The program has set a limit to its address space or its data. If what we have reserved
/// leaves no room below it, it gets everything back and uses the kernel.
/// `alone`: there is no second thread.
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

/// Tables become no longer than they are.
pub fn trim_all() {
    table::DESCS.trim();
    chan::CHANS.trim();
    waker::trim();
    fsocket_shm::pipes::trim();
    epoll::trim();
}
