//! `vfork`, and system calls that do the same by their flags. The child returns to its caller
//! before the parent does, on the same stack. So the hook is a few instructions without a frame of
//! its own. The parent waits on a separate stack (`fsocket_lifecycle::lend`).

#![allow(non_upper_case_globals)] // system call numbers, with the kernel's names

use super::answer::guarded;
use super::clone::{is_vfork, BORROWS};
use crate::init;
use crate::real::target;
use core::ffi::c_void;
use fsocket_lifecycle::lend;
use fsocket_runtime::lent::Loan;
use fsocket_runtime::{lent, process as state, user};
use libc::*;

/// The result in two registers: a loan, or null and the address to jump to instead.
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

/// Flags that the instructions below do not support, or use themselves.
const TAKEN: u64 = (CLONE_SETTLS | CLONE_PARENT_SETTID | CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID) as u64;

/// Forks instead of `vfork` if the library could not distinguish the child from its parent. With a
/// real `vfork`, each close() of the child would close the parent's connection.
unsafe extern "C" fn forked_for_exec() -> pid_t {
    // SAFETY: fork() takes no argument, and the program, which calls vfork(), expects a child.
    unsafe { fork() }
}

/// Decides how `vfork()` is done.
#[link_section = ".text.fsocket_start"]
pub extern "C" fn lent() -> Way {
    if state::is_asleep() {
        // The library has no state to protect, as in a shell: libc's own function runs.
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

/// Decides how `syscall(number, …)` is done for the numbers that may be a `vfork`. Both null: the
/// call is none.
///
/// # Safety
/// As for syscall(2).
pub unsafe extern "C" fn lent_by_number(number: c_long, a: u64, b: u64, c: u64, _d: u64, _e: u64) -> Way {
    let none = Way::to(core::ptr::null());
    let (flags, pidfd) = match number {
        SYS_vfork => (BORROWS | SIGCHLD as u64, 0),
        // If the child has a stack of its own, it does not return through the caller's frame.
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
    // A jump, because the child would destroy a frame of the library.
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

/// Flags and pidfd of a clone3(2) on the caller's stack, if clone(2) can do the same.
///
/// # Safety
/// `args` comes from the program, with `size`.
unsafe fn of_clone3(args: u64, size: u64) -> Option<(u64, u64)> {
    // struct clone_args: flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls,
    // set_tid, set_tid_size.
    // SAFETY: any bytes are numbers; the guarded copy reports a bad pointer.
    let [flags, pidfd, _, _, signal, stack, _, _] = unsafe { user::get(args as *const [u64; 8]) }.ok()?;
    // SAFETY: any bytes are numbers; the guarded copy reports a bad pointer.
    let more = size >= 80 && unsafe { user::get((args + 64) as *const [u64; 2]) }.is_ok_and(|m| m[1] != 0);
    (size >= 64 && stack == 0 && !more && flags >> 32 == 0 && signal < 64).then_some((flags | signal, pidfd))
}

extern "C" fn born(loan: &Loan) {
    lend::born(loan);
}

extern "C" fn serve(loan: &Loan, made: i64) -> i64 {
    // The child exists whatever happens. If the service panics, only the child's request fails.
    guarded(|| lend::serve(loan, made))
}

extern "C" fn end(loan: &Loan) {
    lend::end(loan);
}

/// Makes the child, which returns 0 to the caller. The parent then calls [`serve`] on the loan's
/// stack.
///
/// # Safety
/// Jumped to from the beginning of a function, so the return address is on top of the stack. The
/// loan is in the register of a function's first result (rax).
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

/// # Safety
/// As for vfork(2).
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

/// # Safety
/// As for syscall(2).
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
