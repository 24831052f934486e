//! The number of a descriptor, or none, in one atomic word.

use core::sync::atomic::{AtomicI32, Ordering};

/// -1 means none. The word holds the inverted number, so a table of these begins as zeros, which
/// takes no memory and no space in the library's file.
#[repr(transparent)]
pub struct Number(AtomicI32);

impl Number {
    pub const fn none() -> Number {
        Number(AtomicI32::new(0))
    }

    #[inline]
    pub fn load(&self, order: Ordering) -> i32 {
        !self.0.load(order)
    }

    pub fn store(&self, fd: i32, order: Ordering) {
        self.0.store(!fd, order);
    }

    pub fn swap(&self, fd: i32, order: Ordering) -> i32 {
        !self.0.swap(!fd, order)
    }

    /// # Errors
    /// The number that the word has instead of `from`.
    pub fn compare_exchange(&self, from: i32, to: i32, success: Ordering, failure: Ordering) -> Result<i32, i32> {
        self.0.compare_exchange(!from, !to, success, failure).map(|n| !n).map_err(|n| !n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn none_at_first() {
        let n = Number::none();
        assert_eq!((n.load(Ordering::Relaxed), n.swap(7, Ordering::Relaxed)), (-1, -1));
        assert_eq!(n.compare_exchange(3, -1, Ordering::Relaxed, Ordering::Relaxed), Err(7));
        assert_eq!(n.compare_exchange(7, 0, Ordering::Relaxed, Ordering::Relaxed), Ok(7));
        n.store(-1, Ordering::Relaxed);
        // SAFETY: `Number` is `repr(transparent)` over an atomic 32-bit integer.
        assert_eq!(unsafe { core::mem::transmute::<Number, i32>(n) }, 0);
    }
}
