//! Stores that are wider than a word. Left to itself the compiler makes two of one, by which
//! `send` ran out of registers and saved some on the stack (docs/performance.md).

/// The 8 bytes at `src`, and 8 zeros behind them, to `dst`.
///
/// # Safety
/// 8 bytes at `src` are readable, 16 at `dst` writable; neither needs to be aligned.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub unsafe fn extend(src: *const u8, dst: *mut u8) {
    use core::arch::x86_64::{__m128i, _mm_loadl_epi64, _mm_storeu_si128};
    // SAFETY: the caller's; SSE2 belongs to the architecture.
    unsafe { _mm_storeu_si128(dst as *mut __m128i, _mm_loadl_epi64(src as *const __m128i)) }
}

/// The 8 bytes at `src`, and 8 zeros behind them, to `dst`.
///
/// # Safety
/// 8 bytes at `src` are readable, 16 at `dst` writable; neither needs to be aligned.
#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
pub unsafe fn extend(src: *const u8, dst: *mut u8) {
    // SAFETY: the caller's.
    unsafe { (dst as *mut [u64; 2]).write_unaligned([(src as *const u64).read_unaligned(), 0]) }
}
