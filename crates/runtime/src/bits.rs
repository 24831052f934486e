//! A lock-free set of small numbers, shared by all threads. The tables of the library's own
//! descriptors use it.

use core::sync::atomic::{AtomicU64, Ordering};

/// A set of numbers below `WORDS * 64`.
pub struct Bits<const WORDS: usize>([AtomicU64; WORDS]);

impl<const WORDS: usize> Bits<WORDS> {
    pub const fn new() -> Self {
        Bits([const { AtomicU64::new(0) }; WORDS])
    }

    /// Adds or removes `n`. A number outside of the range is ignored.
    pub fn set(&self, n: i32, on: bool) {
        let Some(w) = self.0.get(n as usize / 64) else { return };
        let bit = 1 << (n % 64);
        if on {
            w.fetch_or(bit, Ordering::Relaxed);
        } else {
            w.fetch_and(!bit, Ordering::Relaxed);
        }
    }

    /// Empties the set. Words that are zero are only read, because a forked child copies each page
    /// that it writes.
    pub fn clear(&self) {
        for w in self.0.iter().filter(|w| w.load(Ordering::Relaxed) != 0) {
            w.store(0, Ordering::Relaxed);
        }
    }

    #[inline(always)]
    pub fn has(&self, n: i32) -> bool {
        n >= 0 && self.0.get(n as usize / 64).is_some_and(|w| w.load(Ordering::Relaxed) >> (n % 64) & 1 != 0)
    }

    /// The lowest number of the set in `from..=to`.
    pub fn next(&self, from: u32, to: u32) -> Option<u32> {
        let end = (to as usize).min(WORDS * 64 - 1);
        let mut n = from as usize;
        while n <= end {
            let rest = self.0[n / 64].load(Ordering::Relaxed) >> (n % 64);
            if rest != 0 {
                let found = n + rest.trailing_zeros() as usize;
                return (found <= end).then_some(found as u32);
            }
            n = (n / 64 + 1) * 64;
        }
        None
    }
}

impl<const WORDS: usize> Default for Bits<WORDS> {
    fn default() -> Self {
        Self::new()
    }
}
