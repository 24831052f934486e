//! The CPU on which the thread runs, its identity, and a cheap clock.

use core::arch::asm;
use core::sync::atomic::{AtomicIsize, AtomicU64, Ordering};

#[link_section = ".data.fsocket_start"]
static RSEQ_CPU: AtomicIsize = AtomicIsize::new(0);
/// 0: not measured yet.
#[link_section = ".data.fsocket_start"]
static TICKS_PER_US: AtomicU64 = AtomicU64::new(0);
#[link_section = ".data.fsocket_start"]
static START_NS: AtomicU64 = AtomicU64::new(0);
#[link_section = ".data.fsocket_start"]
static START_TICKS: AtomicU64 = AtomicU64::new(0);

/// Finds glibc's rseq area (2.35 and later), and begins to measure the rate of the tick counter.
/// `rseq_offset` is the value of glibc's `__rseq_offset`, if it has one.
pub fn init(rseq_offset: Option<isize>) {
    if let Some(off) = rseq_offset {
        // struct rseq: cpu_id_start, then cpu_id.
        RSEQ_CPU.store(off + 4, Ordering::Relaxed);
    }
    START_NS.store(crate::calls::now_ns(), Ordering::Relaxed);
    START_TICKS.store(ticks(), Ordering::Relaxed);
}

/// CPU this thread runs on, plus one; 0 if unknown.
#[inline(always)]
pub fn current() -> u32 {
    let off = RSEQ_CPU.load(Ordering::Relaxed);
    if off == 0 {
        return slow_current();
    }
    // SAFETY: glibc registers the rseq area of every thread at this offset from the thread pointer,
    // for the thread's whole life. Rseq(2) prescribes a volatile read of the aligned word.
    let id = unsafe { ((thread_id() as isize + off) as *const i32).read_volatile() };
    if id < 0 {
        slow_current()
    } else {
        id as u32 + 1
    }
}

#[cold]
fn slow_current() -> u32 {
    crate::vdso::cpu().map_or(0, |cpu| cpu + 1)
}

/// Changes whenever [`current`] does, and costs three instructions. If the CPU cannot be found
/// without a system call, the value is constant for each thread.
#[inline(always)]
pub fn mark() -> u32 {
    // SAFETY: the identity is that of the calling thread.
    unsafe { mark_of(thread_id()) }
}

/// [`mark`] for a caller that has its thread identity already.
///
/// # Safety
/// `me` is [`thread_id`].
#[inline(always)]
pub unsafe fn mark_of(me: u64) -> u32 {
    let at = me as isize + RSEQ_CPU.load(Ordering::Relaxed);
    // SAFETY: an aligned word of the calling thread's rseq area, which exists for the thread's whole life; without such an
    // area the word at the thread pointer, which the psABI reserves.
    unsafe { (at as *const u32).read_volatile() }
}

/// Identity of this thread within the process: its thread pointer.
#[inline(always)]
pub fn thread_id() -> u64 {
    let r: u64;
    // SAFETY: the x86-64 psABI keeps the thread pointer's own value at fs:0.
    unsafe { asm!("mov {}, qword ptr fs:[0]", out(reg) r, options(nostack, readonly, preserves_flags, pure)) };
    r
}

/// [`thread_id`] for a caller that compares the result and then uses it ([`mark_of`]), in few
/// instructions: the compiler loads the value here, and does not move the load before an earlier
/// condition.
#[inline(always)]
pub fn thread_id_in_place() -> u64 {
    let r: u64;
    // SAFETY: the x86-64 psABI keeps the thread pointer's own value at fs:0.
    unsafe { asm!("mov {}, qword ptr fs:[0]", out(reg) r, options(nostack, readonly, preserves_flags)) };
    r
}

/// `id == thread_id()` without a register for the identity, and without an instruction to load
/// it.
#[inline(always)]
pub fn is_thread(id: u64) -> bool {
    // SAFETY: the x86-64 psABI keeps the thread pointer's own value at fs:0.
    unsafe {
        asm!("cmp {}, qword ptr fs:[0]", "jne {}", in(reg) id, label { return false }, options(nostack, readonly))
    };
    true
}

/// A counter that runs at a constant rate.
#[inline(always)]
pub fn ticks() -> u64 {
    // SAFETY: every x86-64 has rdtsc; user mode may execute it.
    unsafe { core::arch::x86_64::_rdtsc() }
}

#[inline(always)]
pub fn ticks_per_us() -> u64 {
    match TICKS_PER_US.load(Ordering::Relaxed) {
        0 => measure(),
        n => n,
    }
}

/// Computes the rate from the time that has passed since `init`. A longer time gives a better
/// result, which is kept once the time is long enough.
#[cold]
fn measure() -> u64 {
    let ns = crate::calls::now_ns().wrapping_sub(START_NS.load(Ordering::Relaxed)).max(1);
    let ticks = ticks().wrapping_sub(START_TICKS.load(Ordering::Relaxed));
    let per_us = ((ticks as u128 * 1000 / ns as u128) as u64).clamp(1, 1 << 20);
    if ns > 200_000 {
        TICKS_PER_US.store(per_us, Ordering::Relaxed);
    }
    per_us
}
