//! Where and when we run: CPU number, thread identity, a cheap clock.

use core::sync::atomic::{AtomicIsize, AtomicU64, Ordering};

static RSEQ_CPU: AtomicIsize = AtomicIsize::new(0);
static TICKS_PER_US: AtomicU64 = AtomicU64::new(1000);

/// Find glibc's rseq area (2.35 and later) and calibrate the tick counter.
/// `rseq_offset` is the value of glibc's `__rseq_offset`, if it has one.
pub fn init(rseq_offset: Option<isize>) {
    if let Some(off) = rseq_offset {
        // struct rseq: cpu_id_start, then cpu_id.
        RSEQ_CPU.store(off + 4, Ordering::Relaxed);
    }
    let (t0, c0) = (crate::now_ns(), ticks());
    while crate::now_ns() - t0 < 20_000 {}
    let (t1, c1) = (crate::now_ns(), ticks());
    let per_us = c1.wrapping_sub(c0) * 1000 / (t1 - t0).max(1);
    TICKS_PER_US.store(per_us.max(1), Ordering::Relaxed);
}

/// CPU this thread runs on, plus one; 0 if unknown.
#[inline(always)]
pub fn current() -> u32 {
    let off = RSEQ_CPU.load(Ordering::Relaxed);
    if off == 0 {
        return slow_current();
    }
    // SAFETY: glibc registers the rseq area at this offset from the thread
    // pointer for every thread, for as long as the thread lives; a volatile
    // read of the aligned word is what rseq(2) prescribes.
    let id = unsafe { ((crate::arch::thread_pointer() as isize + off) as *const i32).read_volatile() };
    if id < 0 {
        slow_current()
    } else {
        id as u32 + 1
    }
}

#[cold]
fn slow_current() -> u32 {
    // SAFETY: no memory is involved.
    let c = unsafe { libc::sched_getcpu() };
    if c < 0 {
        0
    } else {
        c as u32 + 1
    }
}

/// Identity of this thread within the process: its thread pointer.
#[inline(always)]
pub fn thread_id() -> u64 {
    crate::arch::thread_pointer() as u64
}

/// A counter that runs at a constant rate.
#[inline(always)]
pub fn ticks() -> u64 {
    crate::arch::ticks()
}

#[inline(always)]
pub fn ticks_per_us() -> u64 {
    TICKS_PER_US.load(Ordering::Relaxed)
}
