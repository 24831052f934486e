//! Fixed-size objects out of one lazily touched mapping: no allocator, no lock,
//! addresses stay valid for the life of the process.

use core::marker::PhantomData;
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

/// An object that can lie on the free list.
///
/// # Safety
/// All-zero bytes must be a valid value, and `link` must always return the same
/// field, which nothing else uses while the object is free.
pub unsafe trait Slot: Sync {
    fn link(&self) -> &AtomicU32;
}

pub struct Slab<T: Slot> {
    base: AtomicPtr<T>,
    capacity: u32,
    fresh: AtomicU32,
    /// Low half: index + 1 of the first free object; high half: a counter that
    /// defeats ABA.
    free: AtomicU64,
    _t: PhantomData<T>,
}

impl<T: Slot + 'static> Slab<T> {
    pub const fn new(capacity: u32) -> Self {
        Slab {
            base: AtomicPtr::new(core::ptr::null_mut()),
            capacity,
            fresh: AtomicU32::new(0),
            free: AtomicU64::new(0),
            _t: PhantomData,
        }
    }

    fn base(&self) -> Option<*mut T> {
        let p = self.base.load(Ordering::Acquire);
        if !p.is_null() {
            return Some(p);
        }
        let len = self.capacity as usize * core::mem::size_of::<T>();
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let new = fsocket_sys::mmap(len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0).ok()? as *mut T;
        match self.base.compare_exchange(core::ptr::null_mut(), new, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => Some(new),
            Err(other) => {
                // SAFETY: nobody has seen our mapping.
                let _ = unsafe { fsocket_sys::munmap(new as *mut u8, len) };
                Some(other)
            }
        }
    }

    /// A free object and its index; its content is whatever was left there.
    pub fn alloc(&self) -> Option<(u32, &'static T)> {
        let base = self.base()?;
        loop {
            let f = self.free.load(Ordering::Acquire);
            let i = f as u32;
            if i == 0 {
                break;
            }
            // SAFETY: indices on the free list are below `fresh`.
            let t = unsafe { &*base.add(i as usize - 1) };
            let next = t.link().load(Ordering::Relaxed) as u64;
            let new = ((f >> 32).wrapping_add(1) << 32) | next;
            if self.free.compare_exchange(f, new, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                return Some((i - 1, t));
            }
        }
        let i = self.fresh.fetch_add(1, Ordering::Relaxed);
        if i >= self.capacity {
            self.fresh.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        // SAFETY: `i` is below the capacity; zero bytes are a valid T.
        Some((i, unsafe { &*base.add(i as usize) }))
    }

    pub fn free(&self, i: u32) {
        let Some(t) = self.get(i) else { return };
        loop {
            let f = self.free.load(Ordering::Relaxed);
            t.link().store(f as u32, Ordering::Relaxed);
            let new = ((f >> 32).wrapping_add(1) << 32) | (i as u64 + 1);
            // Release: the link, and what the last user wrote.
            if self.free.compare_exchange(f, new, Ordering::Release, Ordering::Relaxed).is_ok() {
                return;
            }
        }
    }

    #[inline]
    pub fn get(&self, i: u32) -> Option<&'static T> {
        let base = self.base.load(Ordering::Acquire);
        if base.is_null() || i >= self.fresh.load(Ordering::Relaxed).min(self.capacity) {
            return None;
        }
        // SAFETY: below `fresh`, so inside the mapping and initialized.
        Some(unsafe { &*base.add(i as usize) })
    }

    /// Index of an object of this slab.
    #[inline]
    pub fn index(&self, t: &T) -> u32 {
        let base = self.base.load(Ordering::Relaxed);
        // An address difference; both lie in the mapping.
        ((t as *const T as usize - base as usize) / core::mem::size_of::<T>()) as u32
    }

    /// Number of objects ever used; for scans.
    pub fn len(&self) -> u32 {
        self.fresh.load(Ordering::Relaxed).min(self.capacity)
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
