//! Address space of channels that are no longer used.
//!
//! A thread may still hold a pointer into a channel whose last connection has
//! just been closed. Its range stays ours, without memory, until so many more
//! channels have ended that nobody can be that late; then it is returned. It
//! must be: a server sees a new channel with every client process, and of 2 GiB
//! each there are only 65,536 in 128 TiB.

use crate::{chan, exec, listen, process};
use core::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use fsocket_abi::channel::CHANNEL_SIZE;
use fsocket_sys as sys;

/// Ranges that wait.
const WAITING: usize = 64;
static RANGES: [AtomicPtr<u8>; WAITING] = [const { AtomicPtr::new(core::ptr::null_mut()) }; WAITING];
static NEXT: AtomicUsize = AtomicUsize::new(0);

/// No descriptor refers to a slot in this range of CHANNEL_SIZE bytes any more: its memory
/// goes, its addresses stay for a while.
pub fn retire(range: *mut u8) {
    blank(range, CHANNEL_SIZE);
    let i = NEXT.fetch_add(1, Ordering::Relaxed) % WAITING;
    give_back(RANGES[i].swap(range, Ordering::AcqRel));
}

/// Memory of nobody's, none until it is touched. Of a file, because private memory counts
/// in full where `vm.overcommit_memory` is 2, 2 GiB for each channel that has ended; in
/// private memory where a filter of system calls may be set.
pub(crate) fn blank(range: *mut u8, len: usize) {
    let writable = libc::PROT_READ | libc::PROT_WRITE;
    if !crate::sandbox::filtered() {
        if let Ok(fd) = sys::memfd_create(c"fastsocket-blank", libc::MFD_CLOEXEC) {
            let over = || {
                sys::ftruncate(fd, len)?;
                // SAFETY: the caller's: nobody uses what is there.
                unsafe { sys::mmap_over(range, len, writable, libc::MAP_SHARED, fd) }
            };
            let done: sys::Result<*mut u8> = over();
            let _ = sys::close(fd);
            if done.is_ok() {
                return;
            }
        }
    }
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: as above.
    if unsafe { sys::mmap_over(range, len, writable, flags, -1) }.is_err() {
        // SAFETY: as above. Rather a fault of a thread that comes late than memory that is others'.
        let _ = unsafe { sys::munmap(range, len) };
    }
}

fn give_back(range: *mut u8) {
    if !range.is_null() {
        // SAFETY: a range of ours that nobody refers to any more; the swap has
        // made it this call's alone.
        let _ = unsafe { sys::munmap(range, CHANNEL_SIZE) };
    }
}

/// All that waits, at once: there is no room for another channel.
pub fn give_back_all() {
    for r in &RANGES {
        give_back(r.swap(core::ptr::null_mut(), Ordering::AcqRel));
    }
}

/// The program is about to set a limit to its address space, and has a listener for the next
/// program. Under the limit no channel may fit any more, and what waits in one could not be
/// moved: so it is tried now, with the limit that can be taken back.
///
/// # Safety
/// `new` is null or the program's.
pub unsafe fn limiting(new: *const libc::rlimit64) {
    // SAFETY: the caller's.
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
        listen::pass_on_exec_prepared();
    }
}

/// The program has set a limit to its address space. If what we have reserved
/// leaves no room below it, it gets everything back and uses the kernel.
/// `alone`: there is no second thread.
pub fn limited(alone: bool) {
    if process::nonce() == 0 || chan::mappable() {
        return;
    }
    if alone {
        give_back_all();
    }
    if chan::all().next().is_none() {
        return;
    }
    process::disable();
    if listen::any() {
        listen::give_up_all();
    }
    exec::hand_over_all();
    if alone {
        for c in chan::all() {
            c.retired.store(true, Ordering::Release);
            c.unmap_if_unused();
        }
        give_back_all();
    }
}
