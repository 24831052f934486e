//! The channels in which an instance has a waiter. Each sleep goes over all of them, so what it needs
//! lies together.

use crate::chan::{self, Chan};
use core::mem::MaybeUninit;
use core::ptr;
use core::sync::atomic::Ordering;
use fsocket_abi::channel::Waiter;
use fsocket_sys as sys;

#[derive(Clone, Copy)]
pub struct Link {
    pub chan: &'static Chan,
    /// The channel's number when it was linked.
    id: u32,
    waiter: &'static Waiter,
}

impl Link {
    /// None: the channel has ended, or a peer has broken it. (A waiter stays the waker's as long as
    /// the channel lives.)
    #[inline]
    pub fn waiter(&self) -> Option<&'static Waiter> {
        (self.chan.id.load(Ordering::Relaxed) == self.id && !self.chan.is_broken()).then_some(self.waiter)
    }
}

const MAX: usize = chan::MAX as usize;

/// Zero is valid.
struct Table {
    /// Channel index to place + 1.
    place: [u16; MAX],
    all: [MaybeUninit<Link>; MAX],
}

/// Zero is valid.
pub struct Links {
    /// A mapping of our own; null until the first is added.
    table: *mut Table,
    n: usize,
}

const SIZE: usize = core::mem::size_of::<Table>();

impl Links {
    /// Waiter `w` of `c` is ours. False: it could not be written down.
    #[inline]
    pub fn add(&mut self, c: &'static Chan, w: usize) -> bool {
        let Some(place) = self.place(c) else { return false };
        let k = (*place as usize).wrapping_sub(1);
        // The index may be another channel's by now.
        self.at(k).is_some_and(|l| l.waiter().is_some()) || self.put(c, k, w)
    }

    #[inline]
    fn place(&mut self, c: &Chan) -> Option<&mut u16> {
        if self.table.is_null() {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            self.table = sys::mmap(SIZE, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0).ok()? as *mut Table;
        }
        // SAFETY: a mapping of that size, zeroed at first; the instance's lock is held.
        unsafe { (*self.table).place.get_mut(c.index() as usize) }
    }

    #[cold]
    fn put(&mut self, c: &'static Chan, k: usize, w: usize) -> bool {
        let at = if k < self.n { k } else { self.n };
        if at >= MAX {
            return false;
        }
        let link = Link { chan: c, id: c.id.load(Ordering::Relaxed), waiter: c.waiter(c.my_side(), w) };
        // SAFETY: as in `place`, which has been asked for this channel.
        unsafe { (*self.table).all[at].write(link) };
        self.n = self.n.max(at + 1);
        self.place(c).map(|p| *p = at as u16 + 1).is_some()
    }

    #[inline]
    pub fn at(&self, k: usize) -> Option<Link> {
        // SAFETY: the first n are written.
        (k < self.n).then(|| unsafe { (&(*self.table).all)[k].assume_init() })
    }

    /// The last takes the place of the k-th.
    pub fn remove(&mut self, k: usize) {
        let (Some(gone), Some(last)) = (self.at(k), self.n.checked_sub(1).and_then(|k| self.at(k))) else { return };
        self.n -= 1;
        // SAFETY: as in `place`; k is below MAX.
        unsafe { (*self.table).all[k].write(last) };
        // In this order: they may be the same.
        self.place(last.chan).into_iter().for_each(|p| *p = k as u16 + 1);
        self.place(gone.chan).into_iter().for_each(|p| *p = 0);
    }

    fn iter(&self) -> impl Iterator<Item = Link> + '_ {
        (0..self.n).filter_map(|k| self.at(k))
    }

    #[inline]
    pub fn waiters(&self) -> impl Iterator<Item = &'static Waiter> + '_ {
        self.iter().filter_map(|l| l.waiter())
    }

    pub fn clear(&mut self) {
        while self.n > 0 {
            self.remove(self.n - 1);
        }
    }

    /// Nobody uses the instance any more.
    pub fn free(&mut self) {
        self.n = 0;
        if !self.table.is_null() {
            // SAFETY: our own mapping, and nothing refers to it.
            let _ = unsafe { sys::munmap(self.table as *mut u8, SIZE) };
            self.table = ptr::null_mut();
        }
    }
}
