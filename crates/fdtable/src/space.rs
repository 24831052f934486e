//! Address space of channels that are no longer used.
//!
//! A thread may still hold a pointer into a channel whose last connection has
//! just been closed. Its range stays ours, without memory, until so many more
//! channels have ended that nobody can be that late; then it is returned. It
//! must be: a server sees a new channel with every client process, and of 2 GiB
//! each there are only 65,536 in 128 TiB.

use core::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use fsocket_abi::channel::CHANNEL_SIZE;
use fsocket_sys as sys;

/// Ranges that wait.
const WAITING: usize = 64;
static RANGES: [AtomicPtr<u8>; WAITING] = [const { AtomicPtr::new(core::ptr::null_mut()) }; WAITING];
static NEXT: AtomicUsize = AtomicUsize::new(0);

/// No descriptor refers to a slot in this range of CHANNEL_SIZE bytes any more: its memory
/// goes, its addresses stay for a while.
///
/// # Safety
/// It is a channel's mapping.
pub unsafe fn retire(range: *mut u8) {
    // SAFETY: the caller's.
    unsafe { blank(range, CHANNEL_SIZE) };
    let i = NEXT.fetch_add(1, Ordering::Relaxed) % WAITING;
    give_back(RANGES[i].swap(range, Ordering::AcqRel));
}

/// Memory of nobody's, none until it is touched. Of a file, because private memory counts
/// in full where `vm.overcommit_memory` is 2, 2 GiB for each channel that has ended; in
/// private memory where a filter of system calls may be set.
///
/// # Safety
/// `range` is a mapping of ours of `len` bytes, and nobody uses what is there.
pub unsafe fn blank(range: *mut u8, len: usize) {
    let writable = libc::PROT_READ | libc::PROT_WRITE;
    if !crate::sealed::filtered() {
        if let Ok(fd) = sys::memfd_create(c"fastsocket-blank", libc::MFD_CLOEXEC) {
            let over = || {
                sys::ftruncate(fd, len)?;
                // SAFETY: the caller's.
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
