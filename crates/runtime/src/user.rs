//! The program's arguments, which may point to nothing: EFAULT then, as from the kernel.

use crate::faults;
use core::ffi::c_char;
use core::mem::MaybeUninit;
use fsocket_sys::{Errno, Result};
use fsocket_uaccess as uaccess;

/// The value at `p`.
///
/// # Safety
/// Any bytes are a `T`, and if there is memory at `p` it is the program's.
#[inline]
pub unsafe fn get<T: Copy>(p: *const T) -> Result<T> {
    let mut v = MaybeUninit::<T>::uninit();
    // SAFETY: any bytes are a `T`; what is at `p` is the program's, or nothing is; then every byte of `v` is written.
    unsafe {
        read(p as *const u8, v.as_mut_ptr() as *mut u8, size_of::<T>())?;
        Ok(v.assume_init())
    }
}

/// The value at `p`, if that is not null.
///
/// # Safety
/// As [`get`].
#[inline]
pub unsafe fn get_if<T: Copy>(p: *const T) -> Result<Option<T>> {
    match p.is_null() {
        true => Ok(None),
        // SAFETY: any bytes are a `T`; what is at `p` is the program's, or nothing is.
        false => unsafe { get(p) }.map(Some),
    }
}

/// `v` to `p`.
///
/// # Safety
/// If there is memory at `p` it is the program's.
#[inline]
pub unsafe fn put<T: Copy>(p: *mut T, v: T) -> Result<()> {
    // SAFETY: `v` has that many bytes; what is at `p` is the program's, or nothing is.
    unsafe { write(&raw const v as *const u8, p as *mut u8, size_of::<T>()) }
}

/// `n` bytes of the program's to `dst`.
///
/// # Safety
/// As [`get`]; `dst` has room for them.
#[inline]
pub unsafe fn read(src: *const u8, dst: *mut u8, n: usize) -> Result<()> {
    // SAFETY: one of the two is ours and has `n` bytes; the other is the program's, or nothing is there.
    unsafe { copied(src, dst, n) }
}

/// `n` bytes from `src` to the program's memory.
///
/// # Safety
/// As [`put`]; `src` has them.
#[inline]
pub unsafe fn write(src: *const u8, dst: *mut u8, n: usize) -> Result<()> {
    // SAFETY: one of the two is ours and has `n` bytes; the other is the program's, or nothing is there.
    unsafe { copied(src, dst, n) }
}

#[inline]
unsafe fn copied(src: *const u8, dst: *mut u8, n: usize) -> Result<()> {
    faults::are_handled();
    // SAFETY: one of the two is ours and has `n` bytes; a fault at the other one ends the copy, as handlers are there
    // now.
    match n == 0 || unsafe { uaccess::copy(src, dst, n) } {
        true => Ok(()),
        false => Err(Errno::EFAULT),
    }
}

/// Are there `n` values at `p`? For what is read in many places: between this and them, only another
/// thread can take it away.
#[inline]
pub fn readable<T>(p: *const T, n: usize) -> bool {
    faults::are_handled();
    // SAFETY: the program's memory, or none.
    n.checked_mul(size_of::<T>()).is_some_and(|n| unsafe { uaccess::readable(p as *const u8, n) })
}

/// Is there a string that ends?
pub fn is_string(p: *const c_char) -> bool {
    const PAGE: usize = 4096;
    let mut at = p as *const u8;
    while readable(at, 1) {
        let n = PAGE - at as usize % PAGE;
        // SAFETY: of a page of which one byte is there all are.
        if unsafe { core::slice::from_raw_parts(at, n) }.contains(&0) {
            return true;
        }
        at = at.wrapping_add(n);
    }
    false
}

/// Is there an array of strings that null ends, or none (null)?
pub fn are_strings(list: *const *const c_char) -> bool {
    let mut at = list;
    while !at.is_null() {
        // SAFETY: the program's memory, or none.
        match unsafe { get(at) } {
            Ok(p) if p.is_null() => return true,
            Ok(p) if is_string(p) => at = at.wrapping_add(1),
            _ => return false,
        }
    }
    true
}

/// As much of `b` as fits into `*len` bytes, and then `says` there: how the kernel returns addresses.
///
/// # Safety
/// Both are the program's, or nothing is there.
pub unsafe fn give(b: &[u8], out: *mut u8, len: *mut u32, says: u32) -> Result<()> {
    // SAFETY: what is at the program's addresses is its own, or nothing is.
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

    /// Two pages, and none behind them.
    fn pages() -> *mut u8 {
        // SAFETY: new mappings.
        unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let p = libc::mmap(core::ptr::null_mut(), 3 * 4096, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
            assert_ne!(p, libc::MAP_FAILED);
            assert_eq!(libc::mprotect(p.byte_add(2 * 4096), 4096, libc::PROT_NONE), 0);
            p as *mut u8
        }
    }

    /// At all distances modulo a page: which way a copy is made depends on that.
    #[test]
    fn copies_and_finds_what_is_not_there() {
        let from: Vec<u8> = (0..12288usize).map(|i| (i * 7 + i / 256) as u8).collect();
        let at = from.as_ptr().align_offset(4096);
        let there = pages();
        for ahead in [0, 1, 7, 8, 15, 16, 17, 48, 63, 64, 65, 4032, 4095] {
            for n in [1, 8, 15, 2048, 2049, 2112, 2113, 3000, 4096] {
                let source = &from[at..at + n];
                // SAFETY: 8191 bytes at most; the page behind is not there.
                unsafe {
                    there.write_bytes(0xee, 2 * 4096);
                    assert_eq!(read(source.as_ptr(), there.add(ahead), n), Ok(()));
                    let to = core::slice::from_raw_parts(there, 2 * 4096);
                    assert_eq!(&to[ahead..ahead + n], source, "{n} bytes, {ahead} ahead");
                    let rest = to[..ahead].iter().chain(&to[ahead + n..]);
                    assert!(rest.into_iter().all(|b| *b == 0xee), "{n} bytes, {ahead} ahead: more than that");
                    // Modulo a page as before, and one byte too many.
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
