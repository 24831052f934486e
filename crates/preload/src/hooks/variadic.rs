//! Functions with variable arguments, which cannot be written in Rust. A few instructions save
//! every register that may carry an argument. Most hooks then do their step and jump to libc's
//! function. For `execl` and its variants the arguments become a list, and the hook that takes a
//! list is called. `dlopen` must be reached by a jump, too, because it examines its caller.

use super::answer::guarded;
use super::{passed, process};
use crate::deep;
use fsocket_lifecycle::exec;
use fsocket_runtime::lent;
use fsocket_sys as sys;
use libc::*;

/// For a function whose first argument is a descriptor to which libc itself writes.
pub fn hand_over(fd: usize, _: usize) -> Option<*const c_void> {
    match lent::is_borrower() {
        true => exec::borrower::touch(fd as c_int),
        false => guarded(|| exec::hand_over(fd as c_int)),
    }
    None
}

/// For `dlopen`, which examines its caller. The library itself calls `dlopen` only for libraries
/// that would bypass the hooks.
pub fn load(file: usize, flags: usize) -> Option<*const c_void> {
    deep::wanted(file as *const c_char, flags as c_int).then_some(deep::load as *const c_void)
}

/// The arguments as the caller has passed them: the first ones in registers, the others on the
/// stack.
pub struct Arguments {
    registers: *const usize,
    stack: *const usize,
}

/// The number of registers that carry arguments.
const REGISTERS: usize = 6;
/// The most strings for which there is room on the stack.
const STRINGS: usize = 256;

impl Arguments {
    /// # Safety
    /// The caller has passed more than `i` arguments, and argument `i` is a pointer.
    unsafe fn get(&self, i: usize) -> *const c_char {
        // SAFETY: the program has passed more than `i` arguments. The first `REGISTERS` are in
        // `registers`, the others on the stack.
        unsafe {
            match i.checked_sub(REGISTERS) {
                None => *self.registers.add(i) as *const c_char,
                Some(i) => *self.stack.add(i) as *const c_char,
            }
        }
    }

    /// Calls `f` with the strings from argument 1 to the terminating null, and with the number of
    /// the argument after that null.
    ///
    /// # Safety
    /// The arguments contain such a null.
    unsafe fn with_list(&self, f: impl FnOnce(*const *const c_char, usize) -> c_int) -> c_int {
        let mut n = 0;
        // SAFETY: all arguments up to the null exist.
        while !unsafe { self.get(1 + n) }.is_null() {
            n += 1;
        }
        let fill = |list: &mut [*const c_char]| {
            for (i, s) in list.iter_mut().enumerate().take(n) {
                // SAFETY: this argument is before the null.
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
        // SAFETY: the new mapping is zeroed, page-aligned, and has room for n + 1 pointers.
        fill(unsafe { core::slice::from_raw_parts_mut(memory, n + 1) });
        let r = f(memory, n + 2);
        // SAFETY: the memory was mapped above with this size, and nothing refers to it any more.
        let _ = unsafe { sys::munmap(memory as *mut u8, size) };
        r
    }
}

/// # Safety
/// As for `execl(3)`.
pub unsafe fn list(a: &Arguments) -> c_int {
    // SAFETY: the program ends the list of an exec function with null; argument 0 is there.
    unsafe { a.with_list(|argv, _| passed::execv(a.get(0), argv)) }
}

/// # Safety
/// As for `execlp(3)`.
pub unsafe fn list_by_path(a: &Arguments) -> c_int {
    // SAFETY: the program ends the list of an exec function with null; argument 0 is there.
    unsafe { a.with_list(|argv, _| passed::execvp(a.get(0), argv)) }
}

/// # Safety
/// As for `execle(3)`.
pub unsafe fn list_and_environment(a: &Arguments) -> c_int {
    // SAFETY: the program ends the list of an exec function with null; argument 0 is there.
    unsafe { a.with_list(|argv, next| process::execve(a.get(0), argv, a.get(next) as *const *const c_char)) }
}

/// Called by the instructions below.
///
/// # Safety
/// `registers` and `stack` are the addresses of the arguments.
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
    // `vfork` and `syscall` are in vfork.rs.
    (own, $name:ident) => {};
    (before $what:ident, $name:ident) => {
        const _: () = {
            // Gets the first two arguments of the caller, and returns the address to which the
            // hook jumps.
            extern "C" fn before(first: usize, second: usize) -> *const c_void {
                variadic::$what(first, second).unwrap_or_else(|| real::target(real::c_name!($name)))
            }
            #[unsafe(naked)]
            #[no_mangle]
            unsafe extern "C" fn $name() {
                // rax is the number of vector registers in use. With the return address (8 bytes),
                // 200 bytes keep the stack aligned.
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
        };
    };
    ($collector:ident, $name:ident) => {
        const _: () = {
            unsafe extern "C" fn collected(registers: *const usize, stack: *const usize) -> c_int {
                // SAFETY: the instructions below have stored the arguments at these addresses.
                unsafe { variadic::collected(registers, stack, variadic::$collector) }
            }
            #[unsafe(naked)]
            #[no_mangle]
            unsafe extern "C" fn $name() {
                // The caller's stack arguments follow the return address.
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
        };
    };
}
pub(crate) use trampoline;
