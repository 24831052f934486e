//! Copies from and to the program's memory, which may not be there.
//!
//! The kernel answers EFAULT; a library faults. So each instruction here that touches such memory
//! stands in a table (section `fsocket_faults`), as in the kernel's exception table, together with
//! where to go on. A handler of SIGSEGV and SIGBUS asks [`resume`] and changes the program counter; then
//! the copy returns false. A copy that succeeds pays nothing for it.
//!
//! What is longer than a few bytes is copied by libc's `memcpy`. It is a leaf that keeps no state but
//! in registers that a call may change, so it can be left at any instruction: the handler returns from
//! it with 0, which `memcpy` itself never returns. The table has the address behind the call.
//!
//! Without a handler a bad address ends the process, as anywhere.
#![no_std]

use core::arch::asm;
use core::sync::atomic::{AtomicPtr, Ordering};

/// libc's.
pub type Memcpy = unsafe extern "C" fn(*mut u8, *const u8, usize) -> *mut u8;
extern "C" {
    fn memcpy(dst: *mut u8, src: *const u8, n: usize) -> *mut u8;
}
/// What copies; called like any function of another library, through a pointer.
static MEMCPY: AtomicPtr<u8> = AtomicPtr::new(memcpy as *mut u8);
/// `memcpy` is no longer than this, nor are parts of it further before its beginning, bytes.
const LENGTH: usize = 8192;
const BEFORE: usize = 1024;

/// Copies by another function than the program's `memcpy`, which may be one that watches: a
/// sanitizer does not see the order that a ring's own words give, and would call it a race.
pub fn copy_by(f: Memcpy) {
    MEMCPY.store(f as *mut u8, Ordering::Relaxed);
}

/// A line of the table: the instruction at label `$at`, and where to go on. Both are relative to
/// their own place, so that nothing is relocated.
#[cfg(target_arch = "x86_64")]
macro_rules! entry {
    ($at:literal, $to:literal) => {
        concat!(
            ".pushsection fsocket_faults,\"aR\",@progbits\n.balign 4\n.long ",
            $at,
            " - .\n.long ",
            $to,
            " - .\n.popsection"
        )
    };
}

/// memcpy with the smallest sizes in line: a call costs as much as the bytes. False: one of the two
/// places is not there, and anything may have been written to `dst`.
///
/// # Safety
/// Where there is memory, it is `n` bytes that this call may read at `src`, and write at `dst`; they
/// do not overlap. `n` is not 0.
#[inline(always)]
pub unsafe fn copy(src: *const u8, dst: *mut u8, n: usize) -> bool {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: `n` bytes at `src` and at `dst`, if there is memory; a fault there goes on at its entry. Of 9 to 16 bytes the two
    // words overlap, and stay within them.
    unsafe {
        if n == 8 {
            asm!(
                "2: mov {t}, qword ptr [{src}]",
                "3: mov qword ptr [{dst}], {t}",
                entry!("2b", "{fault}"),
                entry!("3b", "{fault}"),
                src = in(reg) src, dst = in(reg) dst, t = out(reg) _,
                fault = label { return false },
                options(nostack, preserves_flags)
            );
            return true;
        }
        if (9..=16).contains(&n) {
            return ends::<0>(src, dst, n);
        }
    }
    #[cfg(target_arch = "x86_64")]
    if n > BY_STRING && (1..LINE).contains(&((dst as usize).wrapping_sub(src as usize) % PAGE)) {
        // SAFETY: the same `n` bytes, which are longer than a line.
        return unsafe { by_lines(src, dst, n) };
    }
    // SAFETY: the same `n` bytes, which do not overlap.
    unsafe { by_call(src, dst, n) }
}

/// [`copy`] of what another core may have written just now. `rep movsb` has that fetched at half the speed at
/// which single loads do (docs/performance.md).
///
/// # Safety
/// As [`copy`].
#[inline(always)]
pub unsafe fn fetch(src: *const u8, dst: *mut u8, n: usize) -> bool {
    #[cfg(target_arch = "x86_64")]
    if n > BY_STRING {
        // SAFETY: the same `n` bytes, which are longer than a line.
        return unsafe { by_lines(src, dst, n) };
    }
    // SAFETY: the same `n` bytes, and `n` is not 0.
    unsafe { copy(src, dst, n) }
}

/// From this length on `memcpy` may be one instruction, `rep movsb`, bytes. (glibc: 2 KiB or more.)
#[cfg(target_arch = "x86_64")]
const BY_STRING: usize = 2048;
#[cfg(target_arch = "x86_64")]
const LINE: usize = 64;
const PAGE: usize = 4096;

/// Copies 64 bytes a turn, without `rep movsb`. Where `dst` is a little ahead of `src`, seen modulo a page, some
/// processors take each load of that instruction for one of what it has just stored: 13 times as long (AMD Zen 4, 1 to
/// 15 bytes ahead; up to twice within a line). Records begin at any multiple of 8, and large buffers of `malloc` 16
/// bytes behind a page's beginning, so this is frequent (docs/performance.md).
///
/// # Safety
/// As [`copy`]; `n` is [`LINE`] at least.
#[cfg(target_arch = "x86_64")]
#[inline(never)]
unsafe fn by_lines(src: *const u8, dst: *mut u8, n: usize) -> bool {
    let mut at = 0;
    loop {
        // SAFETY: `at + LINE` is `n` at most; SSE2 belongs to the architecture.
        unsafe {
            asm!(
                "2: movups {a}, xmmword ptr [{src}]",
                "3: movups {b}, xmmword ptr [{src} + 16]",
                "4: movups {c}, xmmword ptr [{src} + 32]",
                "5: movups {d}, xmmword ptr [{src} + 48]",
                "6: movups xmmword ptr [{dst}], {a}",
                "7: movups xmmword ptr [{dst} + 16], {b}",
                "8: movups xmmword ptr [{dst} + 32], {c}",
                "9: movups xmmword ptr [{dst} + 48], {d}",
                entry!("2b", "{fault}"),
                entry!("3b", "{fault}"),
                entry!("4b", "{fault}"),
                entry!("5b", "{fault}"),
                entry!("6b", "{fault}"),
                entry!("7b", "{fault}"),
                entry!("8b", "{fault}"),
                entry!("9b", "{fault}"),
                src = in(reg) src.wrapping_add(at), dst = in(reg) dst.wrapping_add(at),
                a = out(xmm_reg) _, b = out(xmm_reg) _, c = out(xmm_reg) _, d = out(xmm_reg) _,
                fault = label { return false },
                options(nostack, preserves_flags)
            );
        }
        at += LINE;
        if at == n {
            return true;
        }
        // The last line overlaps the one before.
        at = at.min(n - LINE);
    }
}

/// The first 8 and the last 8 of 9 to 16 bytes to `dst + AT`.
///
/// # Safety
/// As [`copy`].
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn ends<const AT: usize>(src: *const u8, dst: *mut u8, n: usize) -> bool {
    // SAFETY: `n` is 9 to 16, so each of the two words lies within the bytes; a fault goes on at its entry.
    unsafe {
        asm!(
            "2: mov {t}, qword ptr [{src}]",
            "3: mov qword ptr [{dst} + {at}], {t}",
            "4: mov {t}, qword ptr [{src} + {n} - 8]",
            "5: mov qword ptr [{dst} + {n} + {at} - 8], {t}",
            entry!("2b", "{fault}"),
            entry!("3b", "{fault}"),
            entry!("4b", "{fault}"),
            entry!("5b", "{fault}"),
            src = in(reg) src, dst = in(reg) dst, n = in(reg) n, t = out(reg) _, at = const AT,
            fault = label { return false },
            options(nostack, preserves_flags)
        );
    }
    true
}

/// 8 to 16 bytes to `dst + AT`, and zeros behind them: the word at `dst + AT + 16`, and of 8 bytes the
/// one before it. For that there is one store of two words (left to itself the compiler makes two of
/// it), and no address but `dst`: `send` has no register to spare (docs/performance.md).
///
/// # Safety
/// As [`copy`]; `dst` is ours, as far as is written, and aligned.
#[inline(always)]
pub unsafe fn tiny<const AT: usize>(src: *const u8, dst: *mut u8, n: usize) -> bool {
    // SAFETY: `dst` is ours and aligned, with room up to `AT + 24`; a fault at `src` goes on at its entry. SSE2 belongs
    // to the architecture.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        if n == 8 {
            asm!(
                "2: movq {t}, qword ptr [{src}]",
                "movups xmmword ptr [{dst} + {at}], {t}",
                entry!("2b", "{fault}"),
                src = in(reg) src, dst = in(reg) dst, t = out(xmm_reg) _, at = const AT,
                fault = label { return false },
                options(nostack, preserves_flags)
            );
            return true;
        }
        if !ends::<AT>(src, dst, n) {
            return false;
        }
    }
    // SAFETY: `dst` is ours, with room up to `AT + 24`; `copy` bears a fault at `src`.
    #[cfg(not(target_arch = "x86_64"))]
    unsafe {
        if !copy(src, dst.add(AT), n) {
            return false;
        }
        if n == 8 {
            (dst.add(AT + 8) as *mut u64).write(0);
            return true;
        }
    }
    // SAFETY: `dst` is ours and aligned, with room up to `AT + 24`.
    unsafe { (dst.add(AT + 16) as *mut u64).write(0) };
    true
}

#[inline(always)]
unsafe fn by_call(src: *const u8, dst: *mut u8, n: usize) -> bool {
    let f = MEMCPY.load(Ordering::Relaxed);
    let r: usize;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: `f` is a `memcpy`, and gets `n` bytes that do not overlap; a fault goes on at an entry. One without a
    // place to go on is a return address.
    unsafe {
        asm!(
            "call {f}",
            "2:",
            ".pushsection fsocket_faults,\"aR\",@progbits",
            ".balign 4",
            ".long 2b - .",
            ".long 0",
            ".popsection",
            f = in(reg) f,
            inout("rdi") dst => _, inout("rsi") src => _, inout("rdx") n => _, lateout("rax") r,
            clobber_abi("C")
        );
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: `f` is a `memcpy`, and gets `n` bytes that do not overlap; a fault goes on at an entry.
    unsafe {
        asm!(
            "blr {f}",
            "2:",
            ".pushsection fsocket_faults,\"aR\",@progbits",
            ".balign 4",
            ".long 2b - .",
            ".long 0",
            ".popsection",
            f = in(reg) f,
            inout("x0") dst as usize => r, inout("x1") src => _, inout("x2") n => _,
            clobber_abi("C")
        );
    }
    r != 0
}

/// Is there memory for `n` bytes at `p`, as far as a look at each page says?
///
/// # Safety
/// None of it is a device's.
pub unsafe fn readable(p: *const u8, n: usize) -> bool {
    if n == 0 {
        return true;
    }
    let Some(last) = (p as usize).checked_add(n - 1) else { return false };
    // (The second page begins behind the last byte of all, if there is no second one.)
    let more = (p as usize | (PAGE - 1)).saturating_add(1);
    // SAFETY: `byte` bears an address at which there is nothing, and none of these is a device's.
    unsafe { byte(p) && (more..=last).step_by(PAGE).all(|at| byte(at as *const u8)) }
}

/// Is there a byte at `p`?
#[inline(always)]
unsafe fn byte(p: *const u8) -> bool {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: one byte is read, of no device; a fault goes on at its entry.
    unsafe {
        asm!(
            "2: cmp byte ptr [{p}], 0",
            entry!("2b", "{fault}"),
            p = in(reg) p,
            fault = label { return false },
            options(nostack, readonly)
        );
        true
    }
    #[cfg(not(target_arch = "x86_64"))]
    // SAFETY: reads one byte, which no device has, into a local.
    unsafe {
        let mut b = 0u8;
        by_call(p, &raw mut b, 1)
    }
}

extern "C" {
    #[link_name = "__start_fsocket_faults"]
    static FIRST: [i32; 2];
    #[link_name = "__stop_fsocket_faults"]
    static END: [i32; 2];
}

/// Where a thread goes on that has faulted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resume {
    /// At this address.
    At(usize),
    /// Behind a call, at this address: it has returned 0.
    Returned(usize),
}

/// For a handler of SIGSEGV and SIGBUS. `pc`: the instruction; `caller`: the address to which it would
/// return if it stands in a function without a frame. None: it is none of ours.
pub fn resume(pc: usize, caller: impl FnOnce() -> usize) -> Option<Resume> {
    // A thread that has not just been called may have anything for a stack; in `memcpy` it was.
    let start = (MEMCPY.load(Ordering::Relaxed) as usize).saturating_sub(BEFORE);
    let copies = (start..start + BEFORE + LENGTH).contains(&pc);
    let caller = if copies { caller() } else { 0 };
    let mut line = &raw const FIRST;
    while line < &raw const END {
        // SAFETY: a line of the table; the linker has put them one after the other.
        let [at, to] = unsafe { *line };
        let here = |offset: i32, i: usize| (line as usize + 4 * i).wrapping_add_signed(offset as isize);
        match (here(at, 0), to) {
            (a, 0) if copies && a == caller => return Some(Resume::Returned(a)),
            (a, 1..) | (a, ..=-1) if a == pc => return Some(Resume::At(here(to, 1))),
            _ => {}
        }
        line = line.wrapping_add(1);
    }
    None
}
