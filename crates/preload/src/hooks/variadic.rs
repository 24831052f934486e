//! Functions with variable arguments. They cannot be written in Rust: a few
//! instructions keep every register that may carry an argument, let us do what
//! is to be done before, and jump to libc's function.

use super::guarded;
use crate::real;
use core::ffi::CStr;
use fsocket_core::exec;
use libc::*;

/// The program is about to be replaced.
pub fn inherit(_first: usize) {
    guarded(exec::before_exec);
}

/// The first argument is a descriptor that libc writes to itself.
pub fn hand_over(fd: usize) {
    guarded(|| exec::hand_over(fd as c_int));
}

extern "C" fn missing() -> c_int {
    fsocket_sys::Errno::ENOSYS.set();
    -1
}

/// Where to jump to.
pub fn target(name: &CStr) -> *const c_void {
    match real::address(name) {
        p if p.is_null() => missing as *const c_void,
        p => p,
    }
}

macro_rules! trampoline {
    ($first:ident, $name:ident) => {
        const _: () = {
            extern "C" fn before(first: usize) -> *const c_void {
                variadic::$first(first);
                const NAME: &core::ffi::CStr =
                    match core::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                        Ok(n) => n,
                        Err(_) => panic!(),
                    };
                variadic::target(NAME)
            }
            #[cfg(target_arch = "x86_64")]
            #[unsafe(naked)]
            #[no_mangle]
            unsafe extern "C" fn $name() {
                // rax: number of vector registers in use. 8 + 200 keeps the stack
                // aligned.
                core::arch::naked_asm!(
                    "sub rsp, 200",
                    "mov [rsp], rdi", "mov [rsp + 8], rsi", "mov [rsp + 16], rdx",
                    "mov [rsp + 24], rcx", "mov [rsp + 32], r8", "mov [rsp + 40], r9", "mov [rsp + 48], rax",
                    "movaps [rsp + 64], xmm0", "movaps [rsp + 80], xmm1", "movaps [rsp + 96], xmm2",
                    "movaps [rsp + 112], xmm3", "movaps [rsp + 128], xmm4", "movaps [rsp + 144], xmm5",
                    "movaps [rsp + 160], xmm6", "movaps [rsp + 176], xmm7",
                    "call {before}",
                    "mov r11, rax",
                    "mov rdi, [rsp]", "mov rsi, [rsp + 8]", "mov rdx, [rsp + 16]",
                    "mov rcx, [rsp + 24]", "mov r8, [rsp + 32]", "mov r9, [rsp + 40]", "mov rax, [rsp + 48]",
                    "movaps xmm0, [rsp + 64]", "movaps xmm1, [rsp + 80]", "movaps xmm2, [rsp + 96]",
                    "movaps xmm3, [rsp + 112]", "movaps xmm4, [rsp + 128]", "movaps xmm5, [rsp + 144]",
                    "movaps xmm6, [rsp + 160]", "movaps xmm7, [rsp + 176]",
                    "add rsp, 200",
                    "jmp r11",
                    before = sym before,
                )
            }
            #[cfg(target_arch = "aarch64")]
            #[unsafe(naked)]
            #[no_mangle]
            unsafe extern "C" fn $name() {
                core::arch::naked_asm!(
                    "stp x29, x30, [sp, #-224]!",
                    "stp x0, x1, [sp, #16]", "stp x2, x3, [sp, #32]",
                    "stp x4, x5, [sp, #48]", "stp x6, x7, [sp, #64]", "str x8, [sp, #80]",
                    "stp q0, q1, [sp, #96]", "stp q2, q3, [sp, #128]",
                    "stp q4, q5, [sp, #160]", "stp q6, q7, [sp, #192]",
                    "bl {before}",
                    "mov x16, x0",
                    "ldp x0, x1, [sp, #16]", "ldp x2, x3, [sp, #32]",
                    "ldp x4, x5, [sp, #48]", "ldp x6, x7, [sp, #64]", "ldr x8, [sp, #80]",
                    "ldp q0, q1, [sp, #96]", "ldp q2, q3, [sp, #128]",
                    "ldp q4, q5, [sp, #160]", "ldp q6, q7, [sp, #192]",
                    "ldp x29, x30, [sp], #224",
                    "br x16",
                    before = sym before,
                )
            }
        };
    };
}
pub(crate) use trampoline;
