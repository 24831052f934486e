//! Copies from and to memory of the program that may not be mapped.
//!
//! For a bad address the kernel returns EFAULT, but code in a library gets a signal. So each
//! instruction here that accesses such memory has an entry in a table (section `fsocket_faults`),
//! as in the kernel's exception table. The entry says where to continue after a fault. A handler
//! of SIGSEGV and SIGBUS calls [`resume`] and changes the program counter; the copy then returns
//! false. A copy that succeeds has no extra cost.
//!
//! Longer copies use libc's `memcpy`. It calls no other function, and keeps its state only in
//! registers that a call may change, so it can be left at any instruction. The handler makes it
//! return 0, which `memcpy` itself never returns. The table has the address after the call.
//!
//! Without the handler, a bad address ends the process, as usual.
#![no_std]

use core::arch::asm;
use core::sync::atomic::{AtomicPtr, Ordering};

/// The type of libc's `memcpy`.
pub type Memcpy = unsafe extern "C" fn(*mut u8, *const u8, usize) -> *mut u8;
extern "C" {
    fn memcpy(dst: *mut u8, src: *const u8, n: usize) -> *mut u8;
}
/// The copying function. It is called through a pointer, as a function of another library is.
static MEMCPY: AtomicPtr<u8> = AtomicPtr::new(memcpy as *mut u8);
/// Upper bounds, in bytes: the length of `memcpy` from its beginning, and the distance of parts
/// that lie before it.
const LENGTH: usize = 8192;
const BEFORE: usize = 1024;

/// Uses `f` instead of the program's `memcpy`, because a sanitizer watches that one. The
/// sanitizer does not see the order that a ring's atomic words enforce, and would report a race.
pub fn copy_by(f: Memcpy) {
    MEMCPY.store(f as *mut u8, Ordering::Relaxed);
}

/// An entry of the table: the instruction at label `$at`, and where to continue. Both are
/// relative to their own addresses, so that the dynamic linker need not relocate them.
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

/// memcpy with inline code for the smallest sizes, because a call costs as much as copying the
/// bytes. False: one of the two addresses is not mapped, and any bytes may have been written to
/// `dst`.
///
/// # Safety
/// If memory is mapped there: this call may read `n` bytes at `src` and write `n` bytes at `dst`,
/// and these do not overlap. `n` is not 0.
#[inline(always)]
pub unsafe fn copy(src: *const u8, dst: *mut u8, n: usize) -> bool {
    // SAFETY: `n` bytes at `src` and at `dst`, if they are mapped; after a fault the code
    // continues at the entry. For 9 to 16 bytes the two words overlap, and stay within the bytes.
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
    if n > BY_STRING && (1..LINE).contains(&((dst as usize).wrapping_sub(src as usize) % PAGE)) {
        // SAFETY: the same `n` bytes, which are more than a line.
        return unsafe { by_lines(src, dst, n) };
    }
    // SAFETY: the same `n` bytes, which do not overlap.
    unsafe { by_call(src, dst, n) }
}

/// [`copy`] for bytes that another core may just have written. `rep movsb` fetches such bytes at
/// half the speed of single loads (docs/performance.md).
///
/// # Safety
/// As [`copy`].
#[inline(always)]
pub unsafe fn fetch(src: *const u8, dst: *mut u8, n: usize) -> bool {
    if n > BY_STRING {
        // SAFETY: the same `n` bytes, which are more than a line.
        return unsafe { by_lines(src, dst, n) };
    }
    // SAFETY: the same `n` bytes, and `n` is not 0.
    unsafe { copy(src, dst, n) }
}

/// From this length on, `memcpy` may consist of one instruction, `rep movsb`. Bytes. (glibc: 2
/// KiB or more.)
const BY_STRING: usize = 2048;
const LINE: usize = 64;
const PAGE: usize = 4096;

/// Copies 64 bytes in each turn, without `rep movsb`. If `dst` is a little ahead of `src` modulo
/// the page size, some processors believe that each load of that instruction reads a byte that it
/// has just stored. The copy then takes 13 times as long (AMD Zen 4, 1 to 15 bytes ahead; up to
/// twice within a line). This is frequent: records begin at any multiple of 8, and large buffers
/// of `malloc` 16 bytes after a page's beginning (docs/performance.md).
///
/// # Safety
/// As [`copy`]; `n` is at least [`LINE`].
#[inline(never)]
unsafe fn by_lines(src: *const u8, dst: *mut u8, n: usize) -> bool {
    let mut at = 0;
    loop {
        // SAFETY: `at + LINE` is at most `n`; SSE2 belongs to the architecture.
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
        // The last line overlaps the previous one.
        at = at.min(n - LINE);
    }
}

/// Copies the first 8 and the last 8 of 9 to 16 bytes to `dst + AT`.
///
/// # Safety
/// As [`copy`].
#[inline(always)]
unsafe fn ends<const AT: usize>(src: *const u8, dst: *mut u8, n: usize) -> bool {
    // SAFETY: `n` is 9 to 16, so each of the two words lies within the bytes; after a fault the
    // code continues at the entry.
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

/// Copies 8 to 16 bytes to `dst + AT`, and writes zeros after them. These go to the word at
/// `dst + AT + 16`, and for 8 bytes also to the word before it. For this the code uses one store
/// of two words (the compiler would use two stores), and no address except `dst`, because `send`
/// has no free register (docs/performance.md).
///
/// # Safety
/// As [`copy`]; `dst` is aligned and writable wherever bytes are written.
#[inline(always)]
pub unsafe fn tiny<const AT: usize>(src: *const u8, dst: *mut u8, n: usize) -> bool {
    // SAFETY: `dst` is aligned and has room up to `AT + 24`, and a fault at `src` continues at its entry of the table.
    // SSE2 belongs to the architecture.
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
    // SAFETY: `dst` is aligned and has room up to `AT + 24`.
    unsafe { (dst.add(AT + 16) as *mut u64).write(0) };
    true
}

#[inline(always)]
unsafe fn by_call(src: *const u8, dst: *mut u8, n: usize) -> bool {
    let f = MEMCPY.load(Ordering::Relaxed);
    let r: usize;
    // SAFETY: `f` is a `memcpy`, and gets `n` bytes that do not overlap; after a fault the code
    // continues at an entry. An entry without such a place is the return address of the call.
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
    r != 0
}

/// Are `n` bytes at `p` mapped? One byte of each page is tested.
///
/// # Safety
/// None of the bytes belong to a device.
pub unsafe fn readable(p: *const u8, n: usize) -> bool {
    if n == 0 {
        return true;
    }
    let Some(last) = (p as usize).checked_add(n - 1) else { return false };
    // (If there is only one page, `more` is beyond the last byte.)
    let more = (p as usize | (PAGE - 1)).saturating_add(1);
    // SAFETY: `byte` may be called with an unmapped address, and none of these belongs to a
    // device.
    unsafe { byte(p) && (more..=last).step_by(PAGE).all(|at| byte(at as *const u8)) }
}

/// Is the byte at `p` mapped?
#[inline(always)]
unsafe fn byte(p: *const u8) -> bool {
    // SAFETY: one byte is read, which belongs to no device; after a fault the code continues at
    // the entry.
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
}

extern "C" {
    #[link_name = "__start_fsocket_faults"]
    static FIRST: [i32; 2];
    #[link_name = "__stop_fsocket_faults"]
    static END: [i32; 2];
}

/// Where a thread continues after a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resume {
    /// It continues at this address.
    At(usize),
    /// It continues at this address, which is after a call, as if the call had returned 0.
    Returned(usize),
}

/// For a handler of SIGSEGV and SIGBUS. `pc`: the instruction that faulted; `caller`: returns the
/// return address of its function, if that has no stack frame. None: the fault is not in a copy
/// of the library.
pub fn resume(pc: usize, caller: impl FnOnce() -> usize) -> Option<Resume> {
    // Only in `memcpy`, which has no stack frame, the top of the stack is certainly a return
    // address.
    let start = (MEMCPY.load(Ordering::Relaxed) as usize).saturating_sub(BEFORE);
    let copies = (start..start + BEFORE + LENGTH).contains(&pc);
    let caller = if copies { caller() } else { 0 };
    let mut line = &raw const FIRST;
    while line < &raw const END {
        // SAFETY: `line` is an entry of the table, whose entries the linker has put one after the
        // other.
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
