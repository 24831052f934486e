//! Where and when we run: CPU number, thread identity, a cheap clock.

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

/// Find glibc's rseq area (2.35 and later) and begin to measure the tick counter.
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
    crate::vdso::cpu().map_or(0, |cpu| cpu + 1)
}

/// Changes when [`current`] does, and costs three instructions. Where nothing tells
/// where a thread runs, one value for each thread.
#[inline(always)]
pub fn mark() -> u32 {
    // SAFETY: the calling thread's.
    unsafe { mark_of(thread_id()) }
}

/// [`mark`] for a caller that has its identity already.
///
/// # Safety
/// `me` is [`thread_id`].
#[inline(always)]
pub unsafe fn mark_of(me: u64) -> u32 {
    let at = me as isize + RSEQ_CPU.load(Ordering::Relaxed);
    // SAFETY: as in `current`; without an rseq area, the word at the thread pointer,
    // which both architectures' ABIs reserve.
    unsafe { (at as *const u32).read_volatile() }
}

/// Identity of this thread within the process: its thread pointer.
#[inline(always)]
pub fn thread_id() -> u64 {
    crate::arch::thread_pointer() as u64
}

/// [`thread_id`] for who compares with it and then goes on with it ([`mark_of`]), in few instructions.
#[inline(always)]
pub fn thread_id_in_place() -> u64 {
    crate::arch::thread_pointer_in_place() as u64
}

/// `id == thread_id()`, in as many instructions as a comparison with a constant.
#[inline(always)]
pub fn is_thread(id: u64) -> bool {
    crate::arch::is_thread_pointer(id as usize)
}

/// A counter that runs at a constant rate.
#[inline(always)]
pub fn ticks() -> u64 {
    crate::arch::ticks()
}

#[inline(always)]
pub fn ticks_per_us() -> u64 {
    match TICKS_PER_US.load(Ordering::Relaxed) {
        0 => measure(),
        n => n,
    }
}

/// From the time that has passed since `init`; the longer, the better, and kept
/// once it is long enough.
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
