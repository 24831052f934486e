//! Access to the program's arguments. A pointer may be bad: then each function returns EFAULT, as
//! the kernel does.

use crate::faults;
use core::ffi::c_char;
use core::mem::MaybeUninit;
use fsocket_sys::{Errno, Result};
use fsocket_uaccess as uaccess;

/// Reads the value at `p`.
///
/// # Safety
/// Any bytes must be a valid `T`. `p` may be bad; otherwise the memory there belongs to the
/// program.
#[inline]
pub unsafe fn get<T: Copy>(p: *const T) -> Result<T> {
    let mut v = MaybeUninit::<T>::uninit();
    // SAFETY: any bytes are a `T`. The guarded copy reports a bad `p`, and otherwise writes every
    // byte of `v`.
    unsafe {
        read(p as *const u8, v.as_mut_ptr() as *mut u8, size_of::<T>())?;
        Ok(v.assume_init())
    }
}

/// Reads the value at `p`, if `p` is not null.
///
/// # Safety
/// As for [`get`].
#[inline]
pub unsafe fn get_if<T: Copy>(p: *const T) -> Result<Option<T>> {
    match p.is_null() {
        true => Ok(None),
        // SAFETY: any bytes are a `T`, and the guarded copy reports a bad `p`.
        false => unsafe { get(p) }.map(Some),
    }
}

/// Writes `v` to `p`.
///
/// # Safety
/// `p` may be bad; otherwise the memory there belongs to the program.
#[inline]
pub unsafe fn put<T: Copy>(p: *mut T, v: T) -> Result<()> {
    // SAFETY: `v` has that many bytes, and the guarded copy reports a bad `p`.
    unsafe { write(&raw const v as *const u8, p as *mut u8, size_of::<T>()) }
}

/// Copies `n` bytes from the program's memory to `dst`.
///
/// # Safety
/// As for [`get`]; `dst` has room for `n` bytes.
#[inline]
pub unsafe fn read(src: *const u8, dst: *mut u8, n: usize) -> Result<()> {
    // SAFETY: `dst` has room for `n` bytes, and the guarded copy reports a bad `src`.
    unsafe { copied(src, dst, n) }
}

/// Copies `n` bytes from `src` to the program's memory.
///
/// # Safety
/// As for [`put`]; `src` has `n` bytes.
#[inline]
pub unsafe fn write(src: *const u8, dst: *mut u8, n: usize) -> Result<()> {
    // SAFETY: `src` has `n` bytes, and the guarded copy reports a bad `dst`.
    unsafe { copied(src, dst, n) }
}

#[inline]
unsafe fn copied(src: *const u8, dst: *mut u8, n: usize) -> Result<()> {
    faults::are_handled();
    // SAFETY: the library's own pointer is valid for `n` bytes. The fault handlers are installed,
    // so a fault at the other pointer ends the copy.
    match n == 0 || unsafe { uaccess::copy(src, dst, n) } {
        true => Ok(()),
        false => Err(Errno::EFAULT),
    }
}

/// Are there `n` values at `p`? For values that are read in many places: after this check, only
/// another thread could unmap them.
#[inline]
pub fn readable<T>(p: *const T, n: usize) -> bool {
    faults::are_handled();
    // SAFETY: the guarded read reports a bad address.
    n.checked_mul(size_of::<T>()).is_some_and(|n| unsafe { uaccess::readable(p as *const u8, n) })
}

/// Is there a complete NUL-terminated string at `p`?
pub fn is_string(p: *const c_char) -> bool {
    const PAGE: usize = 4096;
    let mut at = p as *const u8;
    while readable(at, 1) {
        let n = PAGE - at as usize % PAGE;
        // SAFETY: one byte of this page is mapped, so the whole page is.
        if unsafe { core::slice::from_raw_parts(at, n) }.contains(&0) {
            return true;
        }
        at = at.wrapping_add(n);
    }
    false
}

/// Is `list` null, or a complete null-terminated array of strings?
pub fn are_strings(list: *const *const c_char) -> bool {
    let mut at = list;
    while !at.is_null() {
        // SAFETY: any bytes are a pointer, and the guarded copy reports a bad address.
        match unsafe { get(at) } {
            Ok(p) if p.is_null() => return true,
            Ok(p) if is_string(p) => at = at.wrapping_add(1),
            _ => return false,
        }
    }
    true
}

/// Returns an address to the program as the kernel does: writes at most `*len` bytes of `b`, then
/// the true length `says` into `*len`.
///
/// # Safety
/// `out` and `len` come from the program and may be bad pointers.
pub unsafe fn give(b: &[u8], out: *mut u8, len: *mut u32, says: u32) -> Result<()> {
    // SAFETY: the guarded copies report bad pointers; otherwise the memory belongs to the program.
    unsafe {
        let room = get(len)?;
        if (room as i32) < 0 {
            return Err(Errno::EINVAL);
        }
        write(b.as_ptr(), out, b.len().min(room as usize))?;
        put(len, says)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    extern crate std;
    use std::vec::Vec;

    /// Two pages that are followed by an inaccessible one.
    fn pages() -> *mut u8 {
        // SAFETY: a new mapping, of which the last page becomes inaccessible.
        unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let p = libc::mmap(core::ptr::null_mut(), 3 * 4096, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
            assert_ne!(p, libc::MAP_FAILED);
            assert_eq!(libc::mprotect(p.byte_add(2 * 4096), 4096, libc::PROT_NONE), 0);
            p as *mut u8
        }
    }

    /// Tests all distances modulo a page, because the method of a copy depends on the distance.
    #[test]
    fn copies_and_finds_what_is_not_there() {
        let from: Vec<u8> = (0..12288usize).map(|i| (i * 7 + i / 256) as u8).collect();
        let at = from.as_ptr().align_offset(4096);
        let there = pages();
        for ahead in [0, 1, 7, 8, 15, 16, 17, 48, 63, 64, 65, 4032, 4095] {
            for n in [1, 8, 15, 2048, 2049, 2112, 2113, 3000, 4096] {
                let source = &from[at..at + n];
                // SAFETY: at most 8191 bytes of the two pages are written; a copy that goes beyond
                // them is reported.
                unsafe {
                    there.write_bytes(0xee, 2 * 4096);
                    assert_eq!(read(source.as_ptr(), there.add(ahead), n), Ok(()));
                    let to = core::slice::from_raw_parts(there, 2 * 4096);
                    assert_eq!(&to[ahead..ahead + n], source, "{n} bytes, {ahead} ahead");
                    let rest = to[..ahead].iter().chain(&to[ahead + n..]);
                    assert!(rest.into_iter().all(|b| *b == 0xee), "{n} bytes, {ahead} ahead: more than that");
                    // At the same distance modulo a page, but one byte beyond the end.
                    let short = there.add(2 * 4096 - n + 1);
                    let source = from.as_ptr().add(at + (short as usize).wrapping_sub(ahead) % 4096);
                    assert_eq!(read(source, short, n), Err(Errno::EFAULT), "{n} bytes, {ahead} ahead: write");
                    let mut to = std::vec![0u8; n + 2 * 4096];
                    let aligned = to.as_mut_ptr().align_offset(4096);
                    let target = to.as_mut_ptr().add(aligned + (short as usize + ahead) % 4096);
                    assert_eq!(read(short, target, n), Err(Errno::EFAULT), "{n} bytes, {ahead} ahead: read");
                }
            }
        }
    }
}
