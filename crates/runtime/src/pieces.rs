//! Large tables of zeros that take no memory until they are used. A part of the table (a *piece*)
//! is mapped when one of its entries is first needed. A static array of that size would count for
//! every program that loads the library (`RLIMIT_DATA`, `mlockall`), and a core file would include
//! it.

use core::mem::size_of;
use core::sync::atomic::{AtomicPtr, Ordering};

/// Types for which all-zero bytes are a valid value.
///
/// # Safety
/// All-zero bytes must be a valid value of the type.
pub unsafe trait Zero: Sync {}

// SAFETY: zero bytes are a valid integer.
unsafe impl Zero for core::sync::atomic::AtomicU16 {}
// SAFETY: zero bytes are a valid integer.
unsafe impl Zero for core::sync::atomic::AtomicU32 {}
// SAFETY: zero bytes are a valid integer.
unsafe impl Zero for core::sync::atomic::AtomicU64 {}
// SAFETY: zero bytes are a null pointer.
unsafe impl<T> Zero for AtomicPtr<T> {}
// SAFETY: zero bytes are a valid value of each element.
unsafe impl<T: Zero, const N: usize> Zero for [T; N] {}

/// A table of `PIECES` times `EACH` entries. Entries never move; a forked child has copies of
/// them.
pub struct Pieces<T: Zero, const EACH: usize, const PIECES: usize>([AtomicPtr<T>; PIECES]);

impl<T: Zero + 'static, const EACH: usize, const PIECES: usize> Pieces<T, EACH, PIECES> {
    const BYTES: usize = (EACH * size_of::<T>()).next_multiple_of(4096);
    /// Capacity of the table.
    pub const LEN: usize = EACH * PIECES;

    #[allow(clippy::new_without_default)] // a static's beginning
    pub const fn new() -> Self {
        Pieces([const { AtomicPtr::new(core::ptr::null_mut()) }; PIECES])
    }

    /// Entry `i`, for reading. None: its piece was never mapped, or `i` is beyond the end.
    #[inline(always)]
    pub fn get(&'static self, i: usize) -> Option<&'static T> {
        let piece = self.0.get(i / EACH)?.load(Ordering::Acquire);
        // SAFETY: `make` has mapped EACH entries, which are zero and so valid, and never unmapped.
        (!piece.is_null()).then(|| unsafe { &*piece.add(i % EACH) })
    }

    /// Entry `i`, for writing. None: there is no memory, or `i` is beyond the end.
    #[inline]
    pub fn make(&'static self, i: usize) -> Option<&'static T> {
        self.get(i).or_else(|| self.make_piece(i))
    }

    #[cold]
    fn make_piece(&'static self, i: usize) -> Option<&'static T> {
        let place = self.0.get(i / EACH)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let new = fsocket_sys::mmap(Self::BYTES, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0).ok()?;
        if place.compare_exchange(core::ptr::null_mut(), new.cast(), Ordering::AcqRel, Ordering::Acquire).is_err() {
            // SAFETY: the memory was just mapped, and no other code knows the address.
            let _ = unsafe { fsocket_sys::munmap(new, Self::BYTES) };
        }
        self.get(i)
    }

    /// The mapped entries among the first `n`, in order. All others are zero.
    pub fn first(&'static self, n: usize) -> First<T> {
        First { pieces: &self.0, each: EACH, at: 0, end: n.min(Self::LEN) }
    }

    /// All mapped entries.
    pub fn all(&'static self) -> impl Iterator<Item = &'static T> + Clone {
        self.first(Self::LEN).map(|(_, t)| t)
    }

    /// The index of an entry of this table.
    pub fn index(&'static self, t: &T) -> Option<usize> {
        let at = core::ptr::from_ref(t) as usize;
        self.0.iter().enumerate().find_map(|(piece, p)| {
            let base = p.load(Ordering::Acquire) as usize;
            let i = at.wrapping_sub(base) / size_of::<T>();
            (base != 0 && at >= base && i < EACH).then_some(piece * EACH + i)
        })
    }
}

/// See [`Pieces::first`].
pub struct First<T: 'static> {
    pieces: &'static [AtomicPtr<T>],
    each: usize,
    at: usize,
    end: usize,
}

impl<T> Clone for First<T> {
    fn clone(&self) -> Self {
        First { ..*self }
    }
}

impl<T> Iterator for First<T> {
    type Item = (usize, &'static T);

    fn next(&mut self) -> Option<Self::Item> {
        while self.at < self.end {
            let (i, piece) = (self.at, self.at / self.each);
            let base = self.pieces[piece].load(Ordering::Acquire);
            if !base.is_null() {
                self.at += 1;
                // SAFETY: `make` has mapped `each` entries, which are zero and so valid, and never
                // unmapped.
                return Some((i, unsafe { &*base.add(i % self.each) }));
            }
            self.at = (piece + 1) * self.each;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use core::sync::atomic::AtomicU64;
    use std::vec::Vec;

    #[test]
    fn pieces_come_when_they_are_needed() {
        static TABLE: Pieces<AtomicU64, 512, 4> = Pieces::new();
        assert!(TABLE.get(0).is_none() && TABLE.get(5000).is_none() && TABLE.make(2048).is_none());
        TABLE.make(1500).unwrap().store(7, Ordering::Relaxed);
        assert_eq!(TABLE.get(1500).unwrap().load(Ordering::Relaxed), 7);
        assert!(TABLE.get(0).is_none() && TABLE.get(1535).is_some() && TABLE.get(1536).is_none());
        assert_eq!(TABLE.index(TABLE.get(1500).unwrap()), Some(1500));
        assert_eq!(TABLE.index(&AtomicU64::new(0)), None);
        let seen: Vec<usize> = TABLE.first(1026).map(|(i, _)| i).collect();
        assert_eq!(seen, [1024, 1025]);
        TABLE.make(0).unwrap();
        assert_eq!((TABLE.all().count(), TABLE.first(513).count()), (1024, 512));
    }

    #[test]
    fn threads_make_one_piece() {
        static TABLE: Pieces<AtomicU64, 8, 1> = Pieces::new();
        std::thread::scope(|s| {
            (0..8).for_each(|i| {
                s.spawn(move || TABLE.make(i).unwrap().fetch_add(1, Ordering::Relaxed));
            });
        });
        assert!(TABLE.all().all(|n| n.load(Ordering::Relaxed) == 1));
    }
}
