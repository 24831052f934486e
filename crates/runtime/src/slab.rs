//! Fixed-size objects out of one lazily touched mapping: no allocator, no lock,
//! addresses stay valid for the life of the process.
//!
//! The mapping is address space at first, and becomes memory piece by piece: where the
//! kernel promises no more than it has (`vm.overcommit_memory=2`), writable memory
//! counts in full, touched or not.

use crate::process;
use core::marker::PhantomData;
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};
use fsocket_sys::Errno;

/// Bytes of a slab that become memory at once, at first; later as many as there are.
const PIECE: usize = 64 << 10;
/// A slab takes this part of a limited address space at most.
const SHARE: u64 = 32;

/// An object that can lie on the free list.
///
/// # Safety
/// All-zero bytes must be a valid value, and `link` must always return the same
/// field, which nothing else uses while the object is free.
pub unsafe trait Slot: Sync {
    fn link(&self) -> &AtomicU32;
}

// (Lines of its own: what lies beside it is read all the time.)
#[repr(align(64))]
pub struct Slab<T: Slot> {
    base: AtomicPtr<T>,
    /// Objects that fit; under a limit to the address space fewer than in `new`.
    capacity: AtomicU32,
    fresh: AtomicU32,
    /// Objects whose memory may be touched; never below `fresh`.
    usable: AtomicU32,
    /// Low half: index + 1 of the first free object; high half: a counter that
    /// defeats ABA.
    free: AtomicU64,
    _t: PhantomData<T>,
}

impl<T: Slot + 'static> Slab<T> {
    pub const fn new(capacity: u32) -> Self {
        Slab {
            base: AtomicPtr::new(core::ptr::null_mut()),
            capacity: AtomicU32::new(capacity),
            fresh: AtomicU32::new(0),
            usable: AtomicU32::new(0),
            free: AtomicU64::new(0),
            _t: PhantomData,
        }
    }

    fn base(&self) -> Option<*mut T> {
        let p = self.base.load(Ordering::Acquire);
        if !p.is_null() {
            return Some(p);
        }
        let capacity = self.affordable();
        let len = self.bytes(capacity);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let new = fsocket_sys::mmap(len, libc::PROT_NONE, flags, -1, 0).ok()? as *mut T;
        // Before anybody can see a mapping: never more than the one that is seen holds.
        self.capacity.fetch_min(capacity, Ordering::Relaxed);
        match self.base.compare_exchange(core::ptr::null_mut(), new, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => Some(new),
            Err(other) => {
                // SAFETY: nobody has seen our mapping.
                let _ = unsafe { fsocket_sys::munmap(new as *mut u8, len) };
                Some(other)
            }
        }
    }

    /// How many objects there shall be. What a program that limits its address space leaves
    /// itself is for the program: we take a small part of it, so that there is as much for
    /// the next of our tables, too. A call that adds to one of them must not fail.
    fn affordable(&self) -> u32 {
        let capacity = self.capacity();
        // A filter of system calls may forbid to ask.
        let limit = if process::enabled() { fsocket_sys::address_space_limit(None) } else { Err(Errno::EPERM) };
        let Ok((limit, _)) = limit else { return capacity };
        let room = (limit / SHARE).max(PIECE as u64) / core::mem::size_of::<T>() as u64;
        room.min(capacity as u64) as u32
    }

    fn capacity(&self) -> u32 {
        self.capacity.load(Ordering::Relaxed)
    }

    fn bytes(&self, objects: u32) -> usize {
        objects as usize * core::mem::size_of::<T>()
    }

    /// Makes memory of more of the mapping, at least of object `i`; false: there is none.
    #[cold]
    fn grow(&self, base: *mut T, i: u32) -> bool {
        let least = (PIECE / core::mem::size_of::<T>()) as u32 + 1;
        let wanted = i.saturating_mul(2).max(i + least).min(self.capacity());
        let writable = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the mapping is ours, and this long. Threads that come here at once make the
        // same pages writable; nothing is ever taken back.
        let done = unsafe { fsocket_sys::mprotect(base as *mut u8, self.bytes(wanted), writable) };
        if done.is_ok() {
            // Release: whoever sees the number may touch the memory.
            self.usable.fetch_max(wanted, Ordering::Release);
        }
        done.is_ok()
    }

    /// Makes sure that the next object needs no memory; false: there is none.
    pub fn reserve(&self) -> bool {
        let Some(base) = self.base() else { return false };
        let i = self.fresh.load(Ordering::Relaxed);
        self.free.load(Ordering::Relaxed) as u32 != 0
            || i < self.usable.load(Ordering::Acquire)
            || i < self.capacity() && self.grow(base, i)
    }

    /// Are as many in use, or were, as there can be?
    pub fn is_full(&self) -> bool {
        self.fresh.load(Ordering::Relaxed) >= self.capacity()
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
        let mut i = self.fresh.load(Ordering::Relaxed);
        loop {
            if i >= self.capacity() || (i >= self.usable.load(Ordering::Acquire) && !self.grow(base, i)) {
                return None;
            }
            match self.fresh.compare_exchange_weak(i, i + 1, Ordering::Release, Ordering::Relaxed) {
                // SAFETY: `i` is usable; zero bytes are a valid T.
                Ok(_) => return Some((i, unsafe { &*base.add(i as usize) })),
                Err(now) => i = now,
            }
        }
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
        if base.is_null() || i >= self.fresh.load(Ordering::Relaxed) {
            return None;
        }
        // SAFETY: below `fresh`, so inside the mapping, usable and initialized.
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
        self.fresh.load(Ordering::Relaxed)
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
