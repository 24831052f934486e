//! Objects of one size in one mapping, whose pages are used only when needed: no allocator, no
//! lock, and addresses that stay valid for the life of the process.
//!
//! At first the mapping is only address space. It becomes writable piece by piece, because with
//! `vm.overcommit_memory=2` the kernel counts all writable memory, touched or not.

use crate::{process, room};
use core::cell::UnsafeCell;
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

/// Bytes that the first step makes writable. Each later step doubles the memory.
const PIECE: usize = 64 << 10;
/// A slab takes at most this part of a limited address space.
const SHARE: u64 = 128;

/// An object that can be on the free list.
///
/// # Safety
/// All-zero bytes must be a valid value, and `link` must always return the same
/// field, which nothing else uses while the object is free.
pub unsafe trait Slot: Sync {
    fn link(&self) -> &AtomicU32;
}

/// At most `MOST` objects. The slab is a static, so its objects live as long as the process.
///
/// The first `NEAR` objects are in the slab itself. A process that needs no more has no mapping
/// for them, which a fork would copy.
// Aligned to cache lines, because other threads read neighbouring data all the time.
#[repr(align(64))]
pub struct Slab<T: Slot, const MOST: u32, const NEAR: usize = 0> {
    /// Address of the first object behind those in `near`.
    base: AtomicPtr<T>,
    /// Number of objects below `MOST` that do not fit under a limit of the address space. (Stored
    /// as a difference, so that the slab begins as zeros.)
    fewer: AtomicU32,
    fresh: AtomicU32,
    /// Objects below this index may be touched: their memory is writable. (Those in `near` always
    /// are.)
    usable: AtomicU32,
    /// Low half: index + 1 of the first free object. High half: a counter against the ABA problem.
    free: AtomicU64,
    /// The thread that changes the mapping; see [`Slab::alone`].
    changes: AtomicU64,
    near: [UnsafeCell<MaybeUninit<T>>; NEAR],
}

// SAFETY: objects are `Sync`, and only shared references to them are handed out.
unsafe impl<T: Slot, const MOST: u32, const NEAR: usize> Sync for Slab<T, MOST, NEAR> {}

impl<T: Slot + 'static, const MOST: u32, const NEAR: usize> Default for Slab<T, MOST, NEAR> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T: Slot + 'static, const MOST: u32, const NEAR: usize> Slab<T, MOST, NEAR> {
    pub const fn new() -> Self {
        Slab {
            base: AtomicPtr::new(core::ptr::null_mut()),
            fewer: AtomicU32::new(0),
            fresh: AtomicU32::new(0),
            usable: AtomicU32::new(0),
            free: AtomicU64::new(0),
            changes: AtomicU64::new(0),
            near: [const { UnsafeCell::new(MaybeUninit::zeroed()) }; NEAR],
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
        // Stored before the mapping is published, so that no thread uses more than the published
        // mapping holds.
        self.fewer.fetch_max(MOST - capacity, Ordering::Relaxed);
        match self.base.compare_exchange(core::ptr::null_mut(), new, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => Some(new),
            Err(other) => {
                // SAFETY: this mapping was not published, so no other thread uses it.
                let _ = unsafe { fsocket_sys::munmap(new as *mut u8, len) };
                Some(other)
            }
        }
    }

    /// The number of objects that the address space allows. A slab takes a small part of a limited
    /// address space, so that other tables get as much and the program gets the rest: a call that
    /// adds an object must not fail.
    fn affordable(&self) -> u32 {
        let capacity = self.capacity();
        // A seccomp filter may forbid the system call.
        let limit = match crate::sealed::filtered() {
            true => libc::RLIM64_INFINITY,
            false if room::is_locked() => 0,
            false => fsocket_sys::limit(libc::RLIMIT_AS),
        };
        let room = (limit / SHARE).max(PIECE as u64) / core::mem::size_of::<T>() as u64;
        room.min(capacity as u64) as u32
    }

    fn capacity(&self) -> u32 {
        MOST - self.fewer.load(Ordering::Relaxed)
    }

    /// Address of object `i`, which is in use or was once.
    #[inline]
    fn at(&self, base: *mut T, i: u32) -> *mut T {
        match self.near.get(i as usize) {
            Some(near) => near.get().cast(),
            None => base.wrapping_add(i as usize - NEAR),
        }
    }

    fn bytes(&self, objects: u32) -> usize {
        objects as usize * core::mem::size_of::<T>()
    }

    /// Makes more of the mapping writable, at least up to object `i`. False: there is no memory.
    #[cold]
    fn grow(&self, i: u32) -> bool {
        let Some(base) = self.base() else { return false };
        let least = (PIECE / core::mem::size_of::<T>()) as u32 + 1;
        // Another thread may have made enough memory writable meanwhile.
        let is_there = || i < self.usable.load(Ordering::Acquire);
        self.alone(is_there, || {
            let wanted = i.saturating_mul(2).max(i + least).min(self.capacity());
            let writable = libc::PROT_READ | libc::PROT_WRITE;
            // SAFETY: the range is in this slab's mapping, which no thread cuts meanwhile
            // (`alone`). Writable memory stays writable.
            let done = unsafe { fsocket_sys::mprotect(base as *mut u8, self.bytes(wanted - NEAR as u32), writable) };
            if done.is_ok() {
                // Release: a thread that sees the number may touch the memory.
                self.usable.fetch_max(wanted, Ordering::Release);
            }
            done.is_ok() && i < wanted
        })
    }

    /// Unmaps address space that no object has used. Afterwards the slab cannot grow.
    pub fn trim(&self) {
        self.alone(
            || false,
            || {
                let base = self.base.load(Ordering::Acquire);
                let (usable, capacity) = (self.usable.load(Ordering::Acquire).max(NEAR as u32), self.capacity());
                let page = fsocket_sys::page_size();
                let (from, to) = (self.bytes(usable - NEAR as u32).next_multiple_of(page), self.bytes(capacity));
                if base.is_null() || from >= to {
                    return false;
                }
                self.fewer.store(MOST - usable, Ordering::Release);
                // SAFETY: the range is behind all objects that can exist from now on, and `grow`
                // does not run meanwhile (`alone`).
                unsafe { fsocket_sys::munmap((base as *mut u8).add(from), to - from) }.is_ok()
            },
        );
    }

    /// Runs `f` in one thread at a time, or returns true as soon as there is `enough`. False also
    /// if another thread does not finish: a signal handler has interrupted it, or a fork did not
    /// copy it.
    fn alone(&self, enough: impl Fn() -> bool, f: impl FnOnce() -> bool) -> bool {
        /// Attempts before a thread sleeps. With many threads on a CPU, the active thread has to
        /// wait for its turn.
        const AWAKE: u32 = 100;
        const TRIES: u32 = AWAKE + 300;
        const PAUSE_NS: u64 = 100_000;
        let me = process::thread();
        for n in 0..TRIES {
            if enough() {
                return true;
            }
            match self.changes.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => {
                    let done = f();
                    self.changes.store(0, Ordering::Release);
                    return done;
                }
                Err(holder) if holder == me => return false,
                Err(_) if n < AWAKE => fsocket_sys::sched_yield(),
                Err(_) => fsocket_sys::nanosleep(PAUSE_NS),
            }
        }
        false
    }

    /// Makes sure that the next `alloc` needs no memory. False: there is none.
    pub fn reserve(&self) -> bool {
        let i = self.fresh.load(Ordering::Relaxed);
        self.free.load(Ordering::Relaxed) as u32 != 0 || self.is_usable(i)
    }

    /// Is the memory of object `i` writable? Grows the slab if necessary.
    fn is_usable(&self, i: u32) -> bool {
        (i as usize) < NEAR || i < self.usable.load(Ordering::Acquire) || i < self.capacity() && self.grow(i)
    }

    /// Has every object been used at least once?
    pub fn is_full(&self) -> bool {
        self.fresh.load(Ordering::Relaxed) >= self.capacity()
    }

    /// Takes a free object. Its content is what its last user left there.
    pub fn alloc(&self) -> Option<(u32, &'static T)> {
        loop {
            let f = self.free.load(Ordering::Acquire);
            let i = f as u32;
            if i == 0 {
                break;
            }
            // SAFETY: indices on the free list are below `fresh`, so the object exists.
            let t = unsafe { &*self.at(self.base.load(Ordering::Acquire), i - 1) };
            let next = t.link().load(Ordering::Relaxed) as u64;
            let new = ((f >> 32).wrapping_add(1) << 32) | next;
            if self.free.compare_exchange(f, new, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                return Some((i - 1, t));
            }
        }
        let mut i = self.fresh.load(Ordering::Relaxed);
        loop {
            if !self.is_usable(i) {
                return None;
            }
            match self.fresh.compare_exchange_weak(i, i + 1, Ordering::Release, Ordering::Relaxed) {
                // SAFETY: object `i` is writable, and its zero bytes are a valid T.
                Ok(_) => return Some((i, unsafe { &*self.at(self.base.load(Ordering::Acquire), i) })),
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
            // Release: publishes the link and the stores of the last user.
            if self.free.compare_exchange(f, new, Ordering::Release, Ordering::Relaxed).is_ok() {
                return;
            }
        }
    }

    #[inline]
    pub fn get(&self, i: u32) -> Option<&'static T> {
        if i >= self.fresh.load(Ordering::Acquire) {
            return None;
        }
        // SAFETY: an index below `fresh` is writable, and zero bytes are a valid T.
        Some(unsafe { &*self.at(self.base.load(Ordering::Acquire), i) })
    }

    /// Index of an object of this slab.
    #[inline]
    pub fn index(&self, t: &T) -> u32 {
        // Computed from addresses: the object is in `near`, or in the mapping.
        let beyond = |from: usize| (core::ptr::from_ref(t) as usize).wrapping_sub(from) / core::mem::size_of::<T>();
        match beyond(self.near.as_ptr() as usize) {
            i if i < NEAR => i as u32,
            _ => (NEAR + beyond(self.base.load(Ordering::Relaxed) as usize)) as u32,
        }
    }

    /// Number of objects ever used; for scans.
    pub fn len(&self) -> u32 {
        self.fresh.load(Ordering::Relaxed)
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Thing {
        link: AtomicU32,
        own: AtomicU32,
    }
    // SAFETY: zero is a valid value, and only the slab uses `link`.
    unsafe impl Slot for Thing {
        fn link(&self) -> &AtomicU32 {
            &self.link
        }
    }

    fn is_a_table<const NEAR: usize>(slab: &'static Slab<Thing, 20, NEAR>) {
        assert!(slab.is_empty() && slab.get(0).is_none() && slab.reserve());
        for i in 0..20 {
            let (n, thing) = slab.alloc().unwrap();
            assert_eq!((n, slab.index(thing), thing.own.load(Ordering::Relaxed)), (i, i, 0));
            thing.own.store(i + 1, Ordering::Relaxed);
        }
        assert!(slab.alloc().is_none() && slab.is_full() && !slab.reserve());
        for i in 0..20 {
            assert_eq!(slab.get(i).unwrap().own.load(Ordering::Relaxed), i + 1, "no two in one place");
        }
        assert!(slab.get(20).is_none());
        // The object that was freed last comes first.
        [1, 19, 0].into_iter().for_each(|i| slab.free(i));
        let again = [(); 3].map(|()| slab.alloc().unwrap()).map(|(i, t)| (i, t.own.load(Ordering::Relaxed)));
        assert_eq!(again, [(0, 1), (19, 20), (1, 2)]);
        assert!(slab.alloc().is_none());
    }

    #[test]
    fn all_in_a_mapping() {
        static SLAB: Slab<Thing, 20> = Slab::new();
        is_a_table(&SLAB);
        assert!(!SLAB.base.load(Ordering::Relaxed).is_null());
    }

    #[test]
    fn what_is_cut_off_is_nobodys() {
        static SLAB: Slab<Thing, { 1 << 20 }, 2> = Slab::new();
        let last = (0..1000).map(|_| SLAB.alloc().unwrap().0).fold(0, |_, index| index);
        SLAB.trim();
        let end = SLAB.usable.load(Ordering::Relaxed);
        let end = end.max(1000);
        assert!((last + 1..end).all(|i| SLAB.alloc().is_some_and(|(n, _)| n == i)), "{last} {end}");
        assert!(SLAB.alloc().is_none() && SLAB.is_full());
        let base = SLAB.base.load(Ordering::Relaxed) as usize;
        let behind = (base + SLAB.bytes(end)).next_multiple_of(4096);
        let mut core = 0u8;
        // SAFETY: the call only asks about an address; the kernel writes one byte to `core`.
        let there = unsafe { libc::mincore(behind as *mut libc::c_void, 1, &mut core) };
        assert!(there != 0 || behind < base, "mapped behind the end");
    }

    #[test]
    fn the_first_near() {
        static SLAB: Slab<Thing, 20, 3> = Slab::new();
        let first = [(); 3].map(|()| SLAB.alloc().unwrap().0);
        assert_eq!(first, [0, 1, 2]);
        assert!(SLAB.base.load(Ordering::Relaxed).is_null(), "no mapping");
        static OTHER: Slab<Thing, 20, 3> = Slab::new();
        is_a_table(&OTHER);
        static ALL: Slab<Thing, 20, 20> = Slab::new();
        is_a_table(&ALL);
        assert!(ALL.base.load(Ordering::Relaxed).is_null(), "no mapping");
    }
}
