//! The instruction for system calls.

#[cfg(not(target_arch = "x86_64"))]
compile_error!("The library is for x86-64.");

/// # Safety
/// The arguments are as the system call `n` demands.
#[inline(always)]
pub unsafe fn syscall6(n: usize, a: [usize; 6]) -> isize {
    let r: isize;
    // SAFETY: the kernel preserves all but rax, rcx and r11.
    unsafe {
        core::arch::asm!("syscall", inlateout("rax") n as isize => r, in("rdi") a[0], in("rsi") a[1], in("rdx") a[2],
             in("r10") a[3], in("r8") a[4], in("r9") a[5], lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    r
}
