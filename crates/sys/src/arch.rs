//! System call instruction and thread pointer, per architecture.

#[cfg(target_arch = "x86_64")]
mod imp {
    use core::arch::asm;

    /// # Safety
    /// As the system call `n` demands of its arguments.
    #[inline(always)]
    pub unsafe fn syscall6(n: usize, a: [usize; 6]) -> isize {
        let r: isize;
        // SAFETY: the kernel preserves all but rax, rcx and r11.
        unsafe {
            asm!("syscall", inlateout("rax") n as isize => r, in("rdi") a[0], in("rsi") a[1], in("rdx") a[2],
                 in("r10") a[3], in("r8") a[4], in("r9") a[5], lateout("rcx") _, lateout("r11") _,
                 options(nostack));
        }
        r
    }

    #[inline(always)]
    pub fn thread_pointer() -> usize {
        let r: usize;
        // SAFETY: the x86-64 psABI keeps the thread pointer's own value at fs:0.
        unsafe { asm!("mov {}, qword ptr fs:[0]", out(reg) r, options(nostack, readonly, preserves_flags, pure)) };
        r
    }

    /// [`thread_pointer`], loaded where it stands: not before a condition that it is behind.
    #[inline(always)]
    pub fn thread_pointer_in_place() -> usize {
        let r: usize;
        // SAFETY: as in `thread_pointer`.
        unsafe { asm!("mov {}, qword ptr fs:[0]", out(reg) r, options(nostack, readonly, preserves_flags)) };
        r
    }

    /// `value == thread_pointer()`, without a register for it and an instruction to load it.
    #[inline(always)]
    pub fn is_thread_pointer(value: usize) -> bool {
        // SAFETY: as in `thread_pointer`.
        unsafe {
            asm!("cmp {}, qword ptr fs:[0]", "jne {}", in(reg) value, label { return false }, options(nostack, readonly))
        };
        true
    }

    #[inline(always)]
    pub fn ticks() -> u64 {
        // SAFETY: every x86-64 has rdtsc; user mode may execute it.
        unsafe { core::arch::x86_64::_rdtsc() }
    }
}

#[cfg(target_arch = "aarch64")]
mod imp {
    use core::arch::asm;

    /// # Safety
    /// As the system call `n` demands of its arguments.
    #[inline(always)]
    pub unsafe fn syscall6(n: usize, a: [usize; 6]) -> isize {
        let r: isize;
        // SAFETY: the kernel preserves all registers but x0.
        unsafe {
            asm!("svc 0", in("x8") n, inlateout("x0") a[0] as isize => r, in("x1") a[1], in("x2") a[2],
                 in("x3") a[3], in("x4") a[4], in("x5") a[5], options(nostack));
        }
        r
    }

    #[inline(always)]
    pub fn thread_pointer() -> usize {
        let r: usize;
        // SAFETY: reading tpidr_el0 has no side effect.
        unsafe { asm!("mrs {}, tpidr_el0", out(reg) r, options(nostack, nomem, preserves_flags, pure)) };
        r
    }

    #[inline(always)]
    pub fn thread_pointer_in_place() -> usize {
        thread_pointer()
    }

    #[inline(always)]
    pub fn is_thread_pointer(value: usize) -> bool {
        value == thread_pointer()
    }

    #[inline(always)]
    pub fn ticks() -> u64 {
        let r: u64;
        // SAFETY: Linux lets user mode read the virtual counter.
        unsafe { asm!("mrs {}, cntvct_el0", out(reg) r, options(nostack, nomem)) };
        r
    }
}

pub use imp::*;
