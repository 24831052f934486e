//! `vfork`, and the system calls that are one by their flags. The child returns through its caller's frame before the
//! parent does, on the same stack: so this is no function that calls another one and returns, but a few instructions.
//! The parent waits on a stack of its own (`fsocket_lifecycle::lend`).

#![allow(non_upper_case_globals)] // system call numbers, as the kernel spells them

use super::answer::guarded;
use super::clone::{is_vfork, BORROWS};
use crate::init;
use crate::real::target;
use core::ffi::c_void;
use fsocket_lifecycle::lend;
use fsocket_runtime::lent::Loan;
use fsocket_runtime::{lent, process as state, user};
use libc::*;

/// Two registers: the loan, or null and where to jump to instead.
#[repr(C)]
pub struct Way {
    loan: *const Loan,
    jump: *const c_void,
}

impl Way {
    fn to(jump: *const c_void) -> Way {
        Way { loan: core::ptr::null(), jump }
    }
}

/// Flags that the instructions below have no argument for, or need for themselves.
const TAKEN: u64 = (CLONE_SETTLS | CLONE_PARENT_SETTID | CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID) as u64;

/// `vfork` where the child cannot be told from its parent: the real one's runs in our memory, and would take the
/// parent's connections down with each close().
unsafe extern "C" fn forked_for_exec() -> pid_t {
    // SAFETY: libc's, and the program's as for `vfork`.
    unsafe { fork() }
}

/// `vfork()`.
#[link_section = ".text.fsocket_start"]
pub extern "C" fn lent() -> Way {
    if state::is_asleep() {
        // There is nothing to keep, as in a shell: libc's own.
        init::lends_memory();
        return Way::to(target(c"vfork"));
    }
    if lent::is_borrower() {
        return Way::to(target(c"vfork"));
    }
    let loan = lend::begin(BORROWS | SIGCHLD as u64, 0, fsocket_sys::cpu::thread_id());
    match loan.is_null() {
        true => Way::to(forked_for_exec as *const c_void),
        false => Way { loan, jump: core::ptr::null() },
    }
}

/// `syscall(number, …)` for those numbers that may be a `vfork`. Both null: it is none.
///
/// # Safety
/// As syscall(2).
pub unsafe extern "C" fn lent_by_number(number: c_long, a: u64, b: u64, c: u64, _d: u64, _e: u64) -> Way {
    let none = Way::to(core::ptr::null());
    let (flags, pidfd) = match number {
        #[cfg(target_arch = "x86_64")]
        SYS_vfork => (BORROWS | SIGCHLD as u64, 0),
        // On a stack of its own nothing returns from a C function.
        SYS_clone if b == 0 => (a, c),
        // SAFETY: the program's arguments of clone3(2).
        SYS_clone3 => match unsafe { of_clone3(a, b) } {
            Some(args) => args,
            None => return none,
        },
        _ => return none,
    };
    if flags & CLONE_VM as u64 == 0 || flags & CLONE_THREAD as u64 != 0 {
        return none;
    }
    // (Not through a frame of the library, which the child would take down.)
    let raw = Way::to(target(c"syscall"));
    if state::is_asleep() {
        init::lends_memory();
        return raw;
    }
    if !is_vfork(flags) || flags & TAKEN != 0 || lent::is_borrower() {
        return raw;
    }
    match lend::begin(flags, pidfd, fsocket_sys::cpu::thread_id()) {
        loan if loan.is_null() => none,
        loan => Way { loan, jump: core::ptr::null() },
    }
}

/// Flags and pidfd of a clone3(2) on the caller's stack that clone(2) can do, too.
///
/// # Safety
/// `args` is readable for `size` bytes.
unsafe fn of_clone3(args: u64, size: u64) -> Option<(u64, u64)> {
    // struct clone_args: flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls, set_tid, its size.
    // SAFETY: any bytes are numbers; where nothing is, the copy says so.
    let [flags, pidfd, _, _, signal, stack, _, _] = unsafe { user::get(args as *const [u64; 8]) }.ok()?;
    // SAFETY: any bytes are numbers, here, too.
    let more = size >= 80 && unsafe { user::get((args + 64) as *const [u64; 2]) }.is_ok_and(|m| m[1] != 0);
    (size >= 64 && stack == 0 && !more && flags >> 32 == 0 && signal < 64).then_some((flags | signal, pidfd))
}

extern "C" fn born(loan: &Loan) {
    lend::born(loan);
}

extern "C" fn serve(loan: &Loan, made: i64) -> i64 {
    // (The child is there, whatever happens: a panic fails what it has asked for.)
    guarded(|| lend::serve(loan, made))
}

extern "C" fn end(loan: &Loan) {
    lend::end(loan);
}

/// Makes the child, which returns 0 to the caller. The parent then calls [`serve`] on the loan's stack.
///
/// # Safety
/// Jumped to from the beginning of a function: the return address lies where the caller has put it, and the loan where
/// a function returns its first result.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
unsafe extern "C" fn make() {
    core::arch::naked_asm!(
        "mov r9, rax",
        "pop r8",
        // clone(flags, 0, pidfd, &state)
        "mov rdi, [r9]",
        "xor esi, esi",
        "mov rdx, [r9 + 16]",
        "lea r10, [r9 + 8]",
        "mov eax, 56",
        "syscall",
        "test rax, rax",
        "jz 2f",
        "mov [r9 + 24], rsp", "mov [r9 + 32], r8", "mov [r9 + 40], rbx",
        "mov rsp, r9",
        "mov rbx, r9",
        "mov rdi, r9",
        "mov rsi, rax",
        "call {serve}",
        "mov rdi, rbx",
        "mov rsp, [rdi + 24]", "mov rbx, [rdi + 40]",
        "push qword ptr [rdi + 32]",
        "push rax",
        "call {end}",
        "pop rax",
        "ret",
        // The child.
        "2:",
        "push r8",
        "sub rsp, 8",
        "mov rdi, r9",
        "call {born}",
        "add rsp, 8",
        "xor eax, eax",
        "ret",
        serve = sym serve,
        end = sym end,
        born = sym born,
    )
}

#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
unsafe extern "C" fn make() {
    core::arch::naked_asm!(
        "mov x9, x0",
        "mov x10, x30",
        // clone(flags, 0, pidfd, 0, &state)
        "ldr x0, [x9]",
        "mov x1, xzr",
        "ldr x2, [x9, #16]",
        "mov x3, xzr",
        "add x4, x9, #8",
        "mov x8, #220",
        "svc #0",
        "cbz x0, 2f",
        "mov x11, sp",
        "stp x11, x10, [x9, #24]",
        "str x19, [x9, #40]",
        "mov sp, x9",
        "mov x19, x9",
        "mov x1, x0",
        "mov x0, x9",
        "bl {serve}",
        "mov x9, x19",
        "ldp x11, x30, [x9, #24]",
        "ldr x19, [x9, #40]",
        "mov sp, x11",
        "stp x0, x30, [sp, #-16]!",
        "mov x0, x9",
        "bl {end}",
        "ldp x0, x30, [sp], #16",
        "ret",
        // The child.
        "2:",
        "stp x10, x10, [sp, #-16]!",
        "mov x0, x9",
        "bl {born}",
        "ldp x30, x10, [sp], #16",
        "mov x0, xzr",
        "ret",
        serve = sym serve,
        end = sym end,
        born = sym born,
    )
}

/// # Safety
/// As vfork(2).
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
#[no_mangle]
unsafe extern "C" fn vfork() {
    core::arch::naked_asm!(
        "sub rsp, 8",
        "call {lent}",
        "add rsp, 8",
        "test rax, rax",
        "jnz {make}",
        "jmp rdx",
        lent = sym lent,
        make = sym make,
    )
}

#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
#[no_mangle]
unsafe extern "C" fn vfork() {
    core::arch::naked_asm!(
        "stp x29, x30, [sp, #-16]!",
        "bl {lent}",
        "ldp x29, x30, [sp], #16",
        "cbz x0, 2f",
        "b {make}",
        "2:",
        "br x1",
        lent = sym lent,
        make = sym make,
    )
}

/// # Safety
/// As syscall(2).
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
#[no_mangle]
unsafe extern "C" fn syscall() {
    core::arch::naked_asm!(
        "cmp rdi, {vfork}", "je 2f",
        "cmp rdi, {clone}", "je 2f",
        "cmp rdi, {clone3}", "je 2f",
        "jmp {by_number}",
        "2:",
        "push rdi", "push rsi", "push rdx", "push rcx", "push r8", "push r9",
        "sub rsp, 8",
        "call {lent}",
        "add rsp, 8",
        "mov r11, rdx",
        "pop r9", "pop r8", "pop rcx", "pop rdx", "pop rsi", "pop rdi",
        "test rax, rax",
        "jnz {make}",
        "test r11, r11",
        "jz {by_number}",
        "jmp r11",
        vfork = const SYS_vfork,
        clone = const SYS_clone,
        clone3 = const SYS_clone3,
        by_number = sym super::syscall::entry,
        lent = sym lent_by_number,
        make = sym make,
    )
}

#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
#[no_mangle]
unsafe extern "C" fn syscall() {
    core::arch::naked_asm!(
        "cmp x0, #{clone}",
        "b.eq 2f",
        "cmp x0, #{clone3}",
        "b.eq 2f",
        "b {by_number}",
        "2:",
        "stp x29, x30, [sp, #-80]!",
        "stp x0, x1, [sp, #16]", "stp x2, x3, [sp, #32]",
        "stp x4, x5, [sp, #48]", "stp x6, x7, [sp, #64]",
        "bl {lent}",
        "mov x9, x0",
        "mov x16, x1",
        "ldp x0, x1, [sp, #16]", "ldp x2, x3, [sp, #32]",
        "ldp x4, x5, [sp, #48]", "ldp x6, x7, [sp, #64]",
        "ldp x29, x30, [sp], #80",
        "cbz x9, 3f",
        "mov x0, x9",
        "b {make}",
        "3:",
        "cbz x16, 4f",
        "br x16",
        "4:",
        "b {by_number}",
        clone = const SYS_clone,
        clone3 = const SYS_clone3,
        by_number = sym super::syscall::entry,
        lent = sym lent_by_number,
        make = sym make,
    )
}
