//! Stores that spare pages. After `fork` each page of private memory that parent or child writes is
//! copied, about 1 us each; a server that forks for each connection pays for every connection.

use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, AtomicU8, Ordering};

/// A word that is stored to only if the store changes it.
pub trait Sparing<T> {
    /// A relaxed store, for words of which no other thread waits for a release.
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
