//! Stores that avoid copies of pages. After `fork` the kernel copies each page of private memory
//! that parent or child writes, about 1 us each. A server that forks for each connection pays that
//! for every connection.

use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, AtomicU8, Ordering};

/// An atomic word that is written only if the store changes its value.
pub trait Sparing<T> {
    /// A relaxed store, for words that publish nothing to other threads.
    fn put(&self, value: T);
}

macro_rules! sparing {
    ($($word:ty: $value:ty),*) => {$(
        impl Sparing<$value> for $word {
            #[inline]
            fn put(&self, value: $value) {
                if self.load(Ordering::Relaxed) != value {
                    self.store(value, Ordering::Relaxed);
                }
            }
        }
    )*};
}
sparing!(AtomicBool: bool, AtomicI32: i32, AtomicU32: u32, AtomicU64: u64, AtomicU8: u8,
    crate::number::Number: i32);
