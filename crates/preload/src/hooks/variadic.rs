//! Functions with variable arguments. They cannot be written in Rust: a few
//! instructions keep every register that may carry an argument. Then either we do
//! what is to be done before and jump to libc's function, or (`execl` and its
//! like) the arguments become a list, and the hook that takes lists is called.
//! And `dlopen`, which must be left by a jump, too: it looks at who has called it.

use super::answer::guarded;
use super::{passed, process};
use crate::deep;
use fsocket_lifecycle::exec;
use fsocket_runtime::lent;
use fsocket_sys as sys;
use libc::*;

/// The first argument is a descriptor that libc writes to itself.
pub fn hand_over(fd: usize, _: usize) -> Option<*const c_void> {
    match lent::is_borrower() {
        true => exec::borrower::touch(fd as c_int),
        false => guarded(|| exec::hand_over(fd as c_int)),
    }
    None
}

/// `dlopen`, which looks at who calls it: ours is called only for libraries that would go past us.
pub fn load(file: usize, flags: usize) -> Option<*const c_void> {
    deep::wanted(file as *const c_char, flags as c_int).then_some(deep::load as *const c_void)
}

/// Arguments as the caller has passed them: some in registers, then the stack.
pub struct Arguments {
    registers: *const usize,
    stack: *const usize,
}

/// Registers that carry arguments.
const REGISTERS: usize = if cfg!(target_arch = "x86_64") { 6 } else { 8 };
/// Strings for which there is room on the stack.
const STRINGS: usize = 256;

impl Arguments {
    /// # Safety
    /// The caller passed more than `i` arguments, all of them pointers.
    unsafe fn get(&self, i: usize) -> *const c_char {
        // SAFETY: the program passed more than `i` arguments, of which the first `REGISTERS` lie in `registers`.
        unsafe {
            match i.checked_sub(REGISTERS) {
                None => *self.registers.add(i) as *const c_char,
                Some(i) => *self.stack.add(i) as *const c_char,
            }
        }
    }

    /// Call `f` with the strings from argument 1 to the null that ends them, and
    /// with the number of the argument behind that.
    ///
    /// # Safety
    /// There is such a null.
    unsafe fn with_list(&self, f: impl FnOnce(*const *const c_char, usize) -> c_int) -> c_int {
        let mut n = 0;
        // SAFETY: up to the null.
        while !unsafe { self.get(1 + n) }.is_null() {
            n += 1;
        }
        let fill = |list: &mut [*const c_char]| {
            for (i, s) in list.iter_mut().enumerate().take(n) {
                // SAFETY: before the null.
                *s = unsafe { self.get(1 + i) };
            }
        };
        if n < STRINGS {
            let mut list = [core::ptr::null(); STRINGS];
            fill(&mut list);
            return f(list.as_ptr(), n + 2);
        }
        let size = (n + 1) * size_of::<*const c_char>();
        let Ok(memory) = sys::mmap_briefly(size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) else {
            sys::Errno::ENOMEM.set();
            return -1;
        };
        let memory = memory as *mut *const c_char;
        // SAFETY: room for n + 1 pointers, zero, aligned to a page.
        fill(unsafe { core::slice::from_raw_parts_mut(memory, n + 1) });
        let r = f(memory, n + 2);
        // SAFETY: mapped above.
        let _ = unsafe { sys::munmap(memory as *mut u8, size) };
        r
    }
}

/// # Safety
/// As `execl(3)`.
pub unsafe fn list(a: &Arguments) -> c_int {
    // SAFETY: the program ends the list with null, as for libc's function; argument 0 is there.
    unsafe { a.with_list(|argv, _| passed::execv(a.get(0), argv)) }
}

/// # Safety
/// As `execlp(3)`.
pub unsafe fn list_by_path(a: &Arguments) -> c_int {
    // SAFETY: the program ends the list with null, as for libc's function; argument 0 is there.
    unsafe { a.with_list(|argv, _| passed::execvp(a.get(0), argv)) }
}

/// # Safety
/// As `execle(3)`.
pub unsafe fn list_and_environment(a: &Arguments) -> c_int {
    // SAFETY: the program ends the list with null, as for libc's function; argument 0 is there.
    unsafe { a.with_list(|argv, next| process::execve(a.get(0), argv, a.get(next) as *const *const c_char)) }
}

/// Called by the few instructions below.
///
/// # Safety
/// `registers` and `stack` are where the arguments lie.
pub unsafe fn collected(registers: *const usize, stack: *const usize, f: unsafe fn(&Arguments) -> c_int) -> c_int {
    // SAFETY: the instructions of the hook have put the program's arguments at `registers` and `stack`.
    guarded(|| unsafe { f(&Arguments { registers, stack }) })
}

macro_rules! trampoline {
    (hand_over, $name:ident) => {
        variadic::trampoline!(before hand_over, $name);
    };
    (load, $name:ident) => {
        variadic::trampoline!(before load, $name);
    };
    // (vfork.rs)
    (own, $name:ident) => {};
    (before $what:ident, $name:ident) => {
        const _: () = {
            // Both arguments are as the caller has passed them.
            extern "C" fn before(first: usize, second: usize) -> *const c_void {
                variadic::$what(first, second).unwrap_or_else(|| real::target(real::c_name!($name)))
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
    ($collector:ident, $name:ident) => {
        const _: () = {
            unsafe extern "C" fn collected(registers: *const usize, stack: *const usize) -> c_int {
                // SAFETY: as laid out by the instructions below.
                unsafe { variadic::collected(registers, stack, variadic::$collector) }
            }
            #[cfg(target_arch = "x86_64")]
            #[unsafe(naked)]
            #[no_mangle]
            unsafe extern "C" fn $name() {
                // The caller's arguments on the stack lie behind the return address.
                core::arch::naked_asm!(
                    "sub rsp, 56",
                    "mov [rsp], rdi", "mov [rsp + 8], rsi", "mov [rsp + 16], rdx",
                    "mov [rsp + 24], rcx", "mov [rsp + 32], r8", "mov [rsp + 40], r9",
                    "mov rdi, rsp",
                    "lea rsi, [rsp + 64]",
                    "call {collected}",
                    "add rsp, 56",
                    "ret",
                    collected = sym collected,
                )
            }
            #[cfg(target_arch = "aarch64")]
            #[unsafe(naked)]
            #[no_mangle]
            unsafe extern "C" fn $name() {
                core::arch::naked_asm!(
                    "stp x29, x30, [sp, #-80]!",
                    "stp x0, x1, [sp, #16]", "stp x2, x3, [sp, #32]",
                    "stp x4, x5, [sp, #48]", "stp x6, x7, [sp, #64]",
                    "add x0, sp, #16",
                    "add x1, sp, #80",
                    "bl {collected}",
                    "ldp x29, x30, [sp], #80",
                    "ret",
                    collected = sym collected,
                )
            }
        };
    };
}
pub(crate) use trampoline;
