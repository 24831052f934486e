//! Address space of channels: how much they take, and what becomes of it when they end.
//!
//! Of a limited address space they take a part only: a call of the program's shall not fail for what we have reserved.
//!
//! A thread may still hold a pointer into a channel whose last connection has
//! just been closed. Its ranges stay ours, without memory, until so many more
//! have ended that nobody can be that late; then they are returned.

use crate::{process, sealed};
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use fsocket_abi::channel::ADDRESS_SHARE;
use fsocket_sys::{self as sys, Errno};

/// Ranges that wait: see [`packed`]; 0: none.
const WAITING: usize = 64;
static RANGES: [AtomicU64; WAITING] = [const { AtomicU64::new(0) }; WAITING];
static NEXT: AtomicUsize = AtomicUsize::new(0);
/// Bytes of all channels that are mapped, and of what waits.
static TAKEN: AtomicUsize = AtomicUsize::new(0);

const PAGE: usize = 4096;
/// Bits for the number of pages of a range.
const PAGES: u32 = 24;

/// A range in a word: the number of its first page, and how many there are.
fn packed(range: *mut u8, len: usize) -> u64 {
    ((range as usize / PAGE) as u64) << PAGES | (len / PAGE) as u64
}
fn unpacked(range: u64) -> (*mut u8, usize) {
    (((range >> PAGES) as usize * PAGE) as *mut u8, (range & ((1 << PAGES) - 1)) as usize * PAGE)
}

/// Shared memory from the beginning of a file.
pub fn map(fd: i32, len: usize) -> Option<*mut u8> {
    let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
    take(len, || sys::mmap(len, libc::PROT_READ | libc::PROT_WRITE, flags, fd, 0))
}

/// The same of the file that is mapped at `at`, from there on.
pub fn map_again(at: *mut u8, len: usize) -> Option<*mut u8> {
    // A filter may forbid the call.
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
    // (Nor may it be asked for the limit then.)
    let limit = if process::enabled() { sys::address_space_limit(None) } else { Err(Errno::EPERM) };
    let wanted = (TAKEN.load(Ordering::Relaxed) + len) as u64;
    limit.map_or(true, |(limit, _)| limit == libc::RLIM64_INFINITY || wanted <= limit / ADDRESS_SHARE)
}

/// Is there address space for so many bytes more?
pub fn has_room(len: usize) -> bool {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    is_within_share(len)
        && sys::mmap(len, libc::PROT_NONE, flags, -1, 0).is_ok_and(|p| {
            // SAFETY: just mapped, nobody knows it.
            unsafe { sys::munmap(p, len) }.is_ok()
        })
}

/// A range of [`map`] or [`map_again`] that nobody has seen.
///
/// # Safety
/// It is one, of `len` bytes.
pub unsafe fn unmap(range: *mut u8, len: usize) {
    TAKEN.fetch_sub(len, Ordering::Relaxed);
    // SAFETY: the range is a mapping of ours, of `len` bytes, that at most threads that come late still reach.
    let _ = unsafe { sys::munmap(range, len) };
}

/// No descriptor refers to a slot in this range any more: its memory goes, its addresses stay for a while.
///
/// # Safety
/// As [`unmap`], but for threads that come late.
pub unsafe fn retire(range: *mut u8, len: usize) {
    // SAFETY: the range is a mapping of ours, of `len` bytes, that at most threads that come late still reach.
    unsafe { blank(range, len) };
    let i = NEXT.fetch_add(1, Ordering::Relaxed) % WAITING;
    give_back(RANGES[i].swap(packed(range, len), Ordering::AcqRel));
}

/// [`retire`], of a range that was mapped by other means.
///
/// # Safety
/// As [`retire`].
pub unsafe fn retire_other(range: *mut u8, len: usize) {
    TAKEN.fetch_add(len, Ordering::Relaxed);
    // SAFETY: the range is a mapping of ours, of `len` bytes, that at most threads that come late still reach.
    unsafe { retire(range, len) };
}

/// The program has locked its memory: what waits is none of it.
pub fn munlock_waiting() {
    for r in &RANGES {
        let range = r.swap(0, Ordering::AcqRel);
        if range != 0 {
            let (at, len) = unpacked(range);
            sys::munlock(at, len);
            // SAFETY: a range of ours, in which there is nothing: the swap has made it this call's alone.
            let _ = unsafe { sys::madvise(at, len, libc::MADV_REMOVE) };
            if r.compare_exchange(0, range, Ordering::AcqRel, Ordering::Relaxed).is_err() {
                give_back(range);
            }
        }
    }
}

/// Memory of nobody's, none until it is touched. Of a file, because private memory counts
/// in full where `vm.overcommit_memory` is 2; in private memory where a filter of system calls may be set.
///
/// # Safety
/// `range` is a mapping of ours of `len` bytes, and nobody uses what is there.
pub unsafe fn blank(range: *mut u8, len: usize) {
    let writable = libc::PROT_READ | libc::PROT_WRITE;
    if !sealed::filtered() {
        if let Ok(fd) = sys::memfd_create(c"fastsocket-blank", libc::MFD_CLOEXEC) {
            let over = || {
                sys::ftruncate(fd, len)?;
                // SAFETY: the range is a mapping of ours, of `len` bytes, that at most threads that come late still reach.
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
    // SAFETY: the range is a mapping of ours, of `len` bytes, that at most threads that come late still reach.
    if unsafe { sys::mmap_over(range, len, writable, flags, -1) }.is_err() {
        // SAFETY: the range is a mapping of ours, of `len` bytes, that at most threads that come late still reach.
        // Rather a fault of such a thread than memory that is others'.
        let _ = unsafe { sys::munmap(range, len) };
    }
}

fn give_back(range: u64) {
    if range != 0 {
        let (range, len) = unpacked(range);
        // SAFETY: a range of ours that nobody refers to any more; the swap has
        // made it this call's alone.
        unsafe { unmap(range, len) };
    }
}

/// All that waits, at once: there is no room for another channel.
pub fn give_back_all() {
    for r in &RANGES {
        give_back(r.swap(0, Ordering::AcqRel));
    }
}
