//! Functions for the clock and the CPU number that the kernel maps into every process, called
//! without libc.
//!
//! A program or another preloaded library may replace `clock_gettime` (libfaketime does). The
//! library's own time limits must use the kernel's clock, so the library finds the vDSO's
//! functions itself. Without a vDSO it makes system calls.

use crate::arch::syscall6;
use crate::errno::{Errno, Result};
use core::sync::atomic::{AtomicUsize, Ordering};

/// Addresses of the two functions; 0: not searched for yet; [`NONE`]: there is none.
#[link_section = ".data.fsocket_start"]
static CLOCK: AtomicUsize = AtomicUsize::new(0);
#[link_section = ".data.fsocket_start"]
static GETCPU: AtomicUsize = AtomicUsize::new(0);
const NONE: usize = 1;

const NAMES: [&[u8]; 2] = [b"__vdso_clock_gettime\0", b"__vdso_getcpu\0"];

/// # Safety
/// The arguments are as the system call demands.
unsafe fn raw(n: libc::c_long, args: [usize; 6]) -> Result<usize> {
    // SAFETY: the arguments are as this call demands; the assembly follows the kernel's convention.
    Errno::decode(unsafe { syscall6(n as usize, args) })
}

type ClockGettime = unsafe extern "C" fn(libc::clockid_t, *mut libc::timespec) -> i32;
type Getcpu = unsafe extern "C" fn(*mut u32, *mut u32, usize) -> i32;

/// The time of `clock`, nanoseconds.
#[inline]
pub fn clock_ns(clock: libc::clockid_t) -> u64 {
    let mut ts = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let at = match CLOCK.load(Ordering::Relaxed) {
        0 => find(0),
        at => at,
    };
    if at > NONE {
        // SAFETY: the vDSO's function of that name, which is mapped as long as the process lives; `ts` is a
        // local variable.
        unsafe { core::mem::transmute::<usize, ClockGettime>(at)(clock, &mut ts) };
    } else {
        // SAFETY: `ts` is a local variable.
        let _ = unsafe { raw(libc::SYS_clock_gettime, [clock as usize, &raw mut ts as usize, 0, 0, 0, 0]) };
    }
    ts.tv_sec as u64 * 1_000_000_000 + ts.tv_nsec as u64
}

/// The CPU that the calling thread runs on.
pub fn cpu() -> Option<u32> {
    let mut cpu = 0u32;
    let at = match GETCPU.load(Ordering::Relaxed) {
        0 => find(1),
        at => at,
    };
    let done = match at {
        // SAFETY: `cpu` is a local variable; the other two arguments may be null.
        NONE => unsafe { raw(libc::SYS_getcpu, [&raw mut cpu as usize, 0, 0, 0, 0, 0]) }.is_ok(),
        // SAFETY: the vDSO's function of that name, which is mapped as long as the process lives; `cpu` is a local variable.
        at => unsafe { core::mem::transmute::<usize, Getcpu>(at)(&mut cpu, core::ptr::null_mut(), 0) == 0 },
    };
    done.then_some(cpu)
}

/// Searches for both functions; returns the address of function `i`.
#[cold]
#[inline(never)]
fn find(i: usize) -> usize {
    let base = base();
    let found = NAMES.map(|name| match base {
        // SAFETY: `base` is the address of the kernel's vDSO, which is a whole ELF image.
        Some(base) => unsafe { symbol(base, name) }.unwrap_or(NONE),
        None => NONE,
    });
    CLOCK.store(found[0], Ordering::Relaxed);
    GETCPU.store(found[1], Ordering::Relaxed);
    found[i]
}

/// The vDSO's address.
fn base() -> Option<usize> {
    auxiliary(libc::AT_SYSINFO_EHDR)
}

/// An entry of the auxiliary vector; None: there is none, or it is 0. Reads libc's copy, because
/// a program that emulates the kernel (valgrind) has changed that copy.
pub fn auxiliary(key: libc::c_ulong) -> Option<usize> {
    // SAFETY: the argument is a plain number.
    match unsafe { libc::getauxval(key) } {
        0 => None,
        value => Some(value as usize),
    }
}

const EHDR_PHOFF: usize = 32;
const EHDR_PHNUM: usize = 56;
const PHDR_SIZE: usize = 56;
const DT_HASH: usize = 4;
const DT_STRTAB: usize = 5;
const DT_SYMTAB: usize = 6;
const DT_GNU_HASH: usize = 0x6fff_fef5;
const SYMBOL_SIZE: usize = 24;

/// Reads a value of an ELF image.
///
/// # Safety
/// The image has a value of this type at that address.
unsafe fn at<T: Copy>(address: usize) -> T {
    // SAFETY: the image has a `T` there, at any alignment.
    unsafe { (address as *const T).read_unaligned() }
}

/// The address of a function in an ELF image (64-bit) that is mapped at `base`.
///
/// # Safety
/// A whole image is mapped at `base`, for as long as the process lives.
unsafe fn symbol(base: usize, name: &[u8]) -> Option<usize> {
    // SAFETY: the offsets below are those of the ELF-64 format, and they lead to places inside
    // the image.
    unsafe {
        let headers = base + at::<u64>(base + EHDR_PHOFF) as usize;
        let n = at::<u16>(base + EHDR_PHNUM) as usize;
        let header = |i: usize| headers + i * PHDR_SIZE;
        let of_type = |t: u32| (0..n).map(header).find(|h| at::<u32>(*h) == t);
        // Addresses in the image are relative to the address of its first segment.
        let load = of_type(libc::PT_LOAD)?;
        let shift = base + at::<u64>(load + 8) as usize - at::<u64>(load + 16) as usize;
        let mut dynamic = shift + at::<u64>(of_type(libc::PT_DYNAMIC)? + 16) as usize;
        let (mut strings, mut symbols, mut count) = (0, 0, 0);
        while at::<u64>(dynamic) != 0 {
            let value = shift + at::<u64>(dynamic + 8) as usize;
            match at::<u64>(dynamic) as usize {
                DT_STRTAB => strings = value,
                DT_SYMTAB => symbols = value,
                DT_HASH => count = at::<u32>(value + 4) as usize,
                DT_GNU_HASH if count == 0 => count = symbols_of_gnu_hash(value),
                _ => {}
            }
            dynamic += 16;
        }
        let is_it = |s: &usize| {
            let text = strings + at::<u32>(*s) as usize;
            // The symbol is defined in this image, and has this name.
            at::<u16>(s + 6) != 0 && name.iter().enumerate().all(|(i, c)| at::<u8>(text + i) == *c)
        };
        let found = (0..count).map(|i| symbols + i * SYMBOL_SIZE).find(is_it)?;
        Some(shift + at::<u64>(found + 8) as usize)
    }
}

/// Number of symbols that a GNU hash table covers: up to the end of the last chain.
///
/// # Safety
/// The table is whole.
unsafe fn symbols_of_gnu_hash(table: usize) -> usize {
    // SAFETY: the table is whole, and these are the offsets of its format.
    unsafe {
        let word = |i: usize| at::<u32>(table + i * 4) as usize;
        let (buckets, first, bloom) = (word(0), word(1), word(2));
        let list = 4 + bloom * 2;
        let last = (0..buckets).map(|b| word(list + b)).max().unwrap_or(0);
        if last < first {
            return first;
        }
        let chain = list + buckets;
        let end = (last..).find(|i| word(chain + i - first) & 1 != 0);
        end.map_or(first, |i| i + 1)
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;

    #[test]
    fn the_kernels_clock_without_libc() {
        let mut ts = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: `ts` is a local variable.
        unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut ts) };
        let before = ts.tv_sec as u64 * 1_000_000_000 + ts.tv_nsec as u64;
        let now = clock_ns(libc::CLOCK_MONOTONIC);
        assert!(now >= before && now - before < 60_000_000_000, "{before} {now}");
        assert!(CLOCK.load(Ordering::Relaxed) > NONE, "the vDSO has it");
        assert!(cpu().is_some());
    }

    #[test]
    fn an_image_that_lacks_a_name() {
        let base = base().unwrap();
        // SAFETY: `base` is the address of the vDSO, a whole image.
        assert_eq!(unsafe { symbol(base, b"__vdso_clock\0") }, None);
    }

    #[test]
    fn both_hash_tables_count_the_same() {
        // One bucket whose chain begins at symbol 1 and ends at symbol 3.
        let table: [u32; 10] = [1, 1, 1, 0, 0, 0, 1, 2, 4, 7];
        // SAFETY: one bucket and a chain that ends, in the format of the vDSO.
        assert_eq!(unsafe { symbols_of_gnu_hash(table.as_ptr() as usize) }, 4);
    }
}
