//! Tests whether there is memory at an address by asking the kernel. So no fault handler is
//! needed, and nothing is written.
//!
//! For a process that must not change its signal handlers: it checks arguments once before `exec`,
//! or runs in its parent's memory. [`crate::user`] is faster for many addresses.

use core::ffi::c_char;
use fsocket_sys::{self as sys, Errno};

/// Bytes that one question to the kernel covers; a divisor of the page size.
const WORD: usize = 8;
const PAGE: usize = 4096;

/// Is there memory at `at`?
fn is_there(at: usize) -> bool {
    let word = at & !(WORD - 1);
    if word == 0 {
        return false;
    }
    // The kernel reads the signal set first, and then refuses the invalid `how`.
    let args = [usize::MAX, word, 0, WORD, 0, 0];
    // SAFETY: with an invalid `how` the kernel changes no mask and writes no memory.
    !matches!(unsafe { sys::raw(libc::SYS_rt_sigprocmask, args) }, Err(Errno::EFAULT))
}

/// Is there a complete NUL-terminated string at `p`?
pub fn is_string(p: *const c_char) -> bool {
    let mut at = p as *const u8;
    while is_there(at as usize) {
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
        // An entry of an unaligned array may span two pages.
        if !is_there(at as usize) || !is_there(at as usize + WORD - 1) {
            return false;
        }
        // SAFETY: its first and last byte are mapped, so all its bytes are.
        let p = unsafe { at.read_unaligned() };
        if p.is_null() {
            return true;
        }
        if !is_string(p) {
            return false;
        }
        at = at.wrapping_add(1);
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_knows_what_is_there() {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let page = sys::mmap(2 * PAGE, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0).expect("memory");
        // SAFETY: the range is the second page of the mapping.
        unsafe { sys::mprotect(page.add(PAGE), PAGE, libc::PROT_NONE) }.expect("a page less");
        // SAFETY: the range is the last four bytes of the first page.
        unsafe { page.add(PAGE - 4).copy_from_nonoverlapping(c"abc".as_ptr().cast(), 4) };
        let at = |n: usize| page.wrapping_add(n) as *const c_char;
        assert!(is_string(at(PAGE - 4)) && is_string(c"text".as_ptr()));
        assert!(!is_string(at(PAGE)) && !is_string(core::ptr::null()) && !is_string(4096 as *const c_char));
        // SAFETY: this is the last byte of the first page.
        unsafe { page.add(PAGE - 1).write(b'd') };
        assert!(!is_string(at(PAGE - 4)), "a string without an end");
        let list = [c"a".as_ptr(), core::ptr::null()];
        assert!(are_strings(list.as_ptr()) && are_strings(core::ptr::null()));
        assert!(!are_strings([at(PAGE), core::ptr::null()].as_ptr()));
        assert!(!are_strings(4096 as *const *const c_char));
    }
}
