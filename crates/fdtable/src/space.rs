//! Address space of channels: how much of it they take, and how it is returned.
//!
//! If the program's address space is limited, channels take only a share, because the library's
//! mappings must not make a call of the program fail.
//!
//! When the last connection of a channel is closed, a thread may still hold a pointer into the
//! channel. So the address range stays reserved, without memory, until many other channels have
//! ended. By then no thread can still use the pointer, and the range is returned.

use crate::{process, sealed};
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use fsocket_abi::channel::ADDRESS_SHARE;
use fsocket_sys::{self as sys, Errno};

/// Reserved ranges that wait to be returned: see [`packed`]; 0: none.
const WAITING: usize = 64;
static RANGES: [AtomicU64; WAITING] = [const { AtomicU64::new(0) }; WAITING];
static NEXT: AtomicUsize = AtomicUsize::new(0);
/// Bytes of all mapped channels and of waiting ranges.
static TAKEN: AtomicUsize = AtomicUsize::new(0);

const PAGE: usize = 4096;
/// Bits for the number of pages of a range.
const PAGES: u32 = 24;

/// Packs a range into one word: the number of its first page, and the number of pages.
fn packed(range: *mut u8, len: usize) -> u64 {
    ((range as usize / PAGE) as u64) << PAGES | (len / PAGE) as u64
}
fn unpacked(range: u64) -> (*mut u8, usize) {
    (((range >> PAGES) as usize * PAGE) as *mut u8, (range & ((1 << PAGES) - 1)) as usize * PAGE)
}

/// Maps the first `len` bytes of a file as shared memory.
pub fn map(fd: i32, len: usize) -> Option<*mut u8> {
    let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
    take(len, || sys::mmap(len, libc::PROT_READ | libc::PROT_WRITE, flags, fd, 0))
}

/// Maps the file that is mapped at `at` a second time, starting from there.
pub fn map_again(at: *mut u8, len: usize) -> Option<*mut u8> {
    // A filter of system calls (seccomp) may forbid the call.
    if sealed::filtered() {
        return None;
    }
    take(len, || sys::mmap_again(at, len))
}

fn take(len: usize, map: impl Fn() -> sys::Result<*mut u8>) -> Option<*mut u8> {
    let within_share = || if is_within_share(len) { map() } else { Err(Errno::ENOMEM) };
    let p = within_share().or_else(|_| {
        give_back_all();
        within_share()
    });
    p.ok().inspect(|_| {
        TAKEN.fetch_add(len, Ordering::Relaxed);
    })
}

fn is_within_share(len: usize) -> bool {
    // (If the library is switched off, it cannot read the limit, either.)
    let limit = if process::enabled() { sys::address_space_limit(None) } else { Err(Errno::EPERM) };
    let wanted = (TAKEN.load(Ordering::Relaxed) + len) as u64;
    limit.map_or(true, |(limit, _)| limit == libc::RLIM64_INFINITY || wanted <= limit / ADDRESS_SHARE)
}

/// Is there address space for this many more bytes?
pub fn has_room(len: usize) -> bool {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    is_within_share(len)
        && sys::mmap(len, libc::PROT_NONE, flags, -1, 0).is_ok_and(|p| {
            // SAFETY: the memory was just mapped, and nothing knows it.
            unsafe { sys::munmap(p, len) }.is_ok()
        })
}

/// Unmaps a range of [`map`] or [`map_again`] that no other thread knows yet.
///
/// # Safety
/// `range` must come from one of these functions, with `len` bytes.
pub unsafe fn unmap(range: *mut u8, len: usize) {
    TAKEN.fetch_sub(len, Ordering::Relaxed);
    // SAFETY: the library owns this mapping of `len` bytes, and only late threads still reach it.
    let _ = unsafe { sys::munmap(range, len) };
}

/// Ends a range to which no descriptor refers any more. Its memory is freed at once, and its
/// addresses stay reserved for a while.
///
/// # Safety
/// As [`unmap`], but threads with old pointers may still use the range.
pub unsafe fn retire(range: *mut u8, len: usize) {
    // SAFETY: the library owns this mapping of `len` bytes, and only late threads still reach it.
    unsafe { blank(range, len) };
    let i = NEXT.fetch_add(1, Ordering::Relaxed) % WAITING;
    give_back(RANGES[i].swap(packed(range, len), Ordering::AcqRel));
}

/// [`retire`] for a range that was mapped by other means.
///
/// # Safety
/// As [`retire`].
pub unsafe fn retire_other(range: *mut u8, len: usize) {
    TAKEN.fetch_add(len, Ordering::Relaxed);
    // SAFETY: the library owns this mapping of `len` bytes, and only late threads still reach it.
    unsafe { retire(range, len) };
}

/// Called after the program has locked its memory (`mlockall`): unlocks waiting ranges, and frees
/// the memory that they got by this.
pub fn munlock_waiting() {
    for r in &RANGES {
        let range = r.swap(0, Ordering::AcqRel);
        if range != 0 {
            let (at, len) = unpacked(range);
            sys::munlock(at, len);
            // SAFETY: the library owns this empty range, and the swap has given it to this call alone.
            let _ = unsafe { sys::madvise(at, len, libc::MADV_REMOVE) };
            if r.compare_exchange(0, range, Ordering::AcqRel, Ordering::Relaxed).is_err() {
                give_back(range);
            }
        }
    }
}

/// Replaces memory by an empty mapping, which takes no memory until a thread touches it. The
/// mapping is of an empty file, because private memory would count in full if
/// `vm.overcommit_memory` is 2. It is private memory only if a filter of system calls may be set.
///
/// # Safety
/// `range` is a mapping of the library of `len` bytes, and nothing uses it.
pub unsafe fn blank(range: *mut u8, len: usize) {
    let writable = libc::PROT_READ | libc::PROT_WRITE;
    if !sealed::filtered() {
        if let Ok(fd) = sys::memfd_create(c"fastsocket-blank", libc::MFD_CLOEXEC) {
            let over = || {
                sys::ftruncate(fd, len)?;
                // SAFETY: the library owns this mapping of `len` bytes, and only late threads still reach it.
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
    // SAFETY: the library owns this mapping of `len` bytes, and only late threads still reach it.
    if unsafe { sys::mmap_over(range, len, writable, flags, -1) }.is_err() {
        // SAFETY: the library owns this mapping of `len` bytes, and only late threads still reach it. A fault
        // of such a thread is better than access to foreign memory.
        let _ = unsafe { sys::munmap(range, len) };
    }
}

fn give_back(range: u64) {
    if range != 0 {
        let (range, len) = unpacked(range);
        // SAFETY: the library owns this range, nothing refers to it any more, and the swap has
        // given it to this call alone.
        unsafe { unmap(range, len) };
    }
}

/// Returns all waiting ranges at once, because another channel needs the room.
pub fn give_back_all() {
    for r in &RANGES {
        give_back(r.swap(0, Ordering::AcqRel));
    }
}
