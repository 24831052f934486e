//! The channels in which an instance has a waiter.
//!
//! A *waiter* is a place in a channel where an instance says that it sleeps. A peer that has
//! marked an item there rings the waker if the instance sleeps. With few channels, the instance
//! sets each waiter to sleeping before a sleep, resets it afterwards, and looks at all channels
//! for marks. With more than [`HOT`] channels, the others are *parked*: their waiters always say
//! that the instance sleeps, and the instance does not look at them. So a peer that marks an item
//! in a parked channel always rings. The ring names the channel ([`Waker::rung`]), which becomes
//! hot. So the cost of a sleep depends on the number of hot channels only.
//!
//! A peer that rings, or fails to ring, affects no other channel. A ring can get lost if the
//! monitor has to pass it on and is stopped. So the instance looks at all channels now and then.

use crate::chan::{self, Chan};
use crate::ctl;
use crate::waker::Waker;
use core::mem::MaybeUninit;
use core::ptr;
use core::sync::atomic::{fence, Ordering};
use fsocket_abi::channel::{Waiter, CLIENT, SERVER};
use fsocket_sys::{self as sys, cpu};

#[derive(Clone, Copy)]
pub struct Link {
    pub chan: &'static Chan,
    /// The channel's number at the time when it was linked.
    id: u32,
    /// A peer has marked something here since the last [`Links::park_some`].
    used: bool,
    waiter: &'static Waiter,
}

impl Link {
    /// None: the channel has ended, or a peer has broken it. (The waker owns the waiter as long
    /// as the channel lives.)
    #[inline]
    pub fn waiter(&self) -> Option<&'static Waiter> {
        (self.chan.id.load(Ordering::Relaxed) == self.id && !self.chan.is_broken()).then_some(self.waiter)
    }
}

const MAX: usize = chan::MAX as usize;
/// At most this many channels stay hot, unless all of them have marks.
const HOT: usize = 128;
/// At least this many channels stay hot.
const LEAST: usize = 8;
/// Time after which the instance looks at all channels.
const ALL_US: u64 = 100_000;

/// Zero is valid.
struct Table {
    /// Maps the index of a channel to its place in `all`, plus 1.
    place: [u16; MAX],
    all: [MaybeUninit<Link>; MAX],
}

/// Zero is valid.
pub struct Links {
    /// The library's mapping; null until the first channel is added.
    table: *mut Table,
    n: usize,
    /// Number of channels that are not parked; they come first.
    hot: usize,
    /// Where the search for a channel to park continues.
    hand: usize,
    /// Time of the last look at all channels, in ticks.
    looked: u64,
}

const SIZE: usize = core::mem::size_of::<Table>();

impl Links {
    /// Adds waiter `w` of the channel `c`; the waiter belongs to this instance, which has waker
    /// `b`. False: there was no memory.
    #[inline]
    pub fn add(&mut self, c: &'static Chan, w: usize, b: &Waker) -> bool {
        let Some(place) = self.place(c) else { return false };
        let k = (*place as usize).wrapping_sub(1);
        // The index may have been given to another channel meanwhile.
        self.at(k).is_some_and(|l| l.waiter().is_some()) || self.put(c, k, w, b)
    }

    #[inline]
    fn place(&mut self, c: &Chan) -> Option<&mut u16> {
        if self.table.is_null() {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            self.table = sys::mmap(SIZE, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0).ok()? as *mut Table;
        }
        // SAFETY: the mapping has that size and was zeroed at first; the instance's lock is held.
        unsafe { (*self.table).place.get_mut(c.index() as usize) }
    }

    #[cold]
    fn put(&mut self, c: &'static Chan, k: usize, w: usize, b: &Waker) -> bool {
        let at = if k < self.n { k } else { self.n };
        if at >= MAX {
            return false;
        }
        let link = Link { chan: c, id: c.id.load(Ordering::Relaxed), used: true, waiter: c.waiter(c.my_side(), w) };
        self.n = self.n.max(at + 1);
        self.set(at, link);
        self.heat(at, b);
        true
    }

    fn set(&mut self, k: usize, link: Link) {
        // SAFETY: `place` was called for a channel, so the mapping exists; k is below MAX.
        unsafe { (*self.table).all[k].write(link) };
        if let Some(place) = self.place(link.chan) {
            *place = k as u16 + 1;
        }
    }

    #[inline]
    pub fn at(&self, k: usize) -> Option<Link> {
        // SAFETY: the mapping exists if `n` is not 0, and the first `n` entries are written.
        (k < self.n).then(|| unsafe { (&(*self.table).all)[k].assume_init() })
    }

    fn swap(&mut self, i: usize, k: usize) {
        if let (Some(a), Some(b)) = (self.at(i), self.at(k)) {
            self.set(i, b);
            self.set(k, a);
        }
    }

    #[inline]
    fn was_used(&mut self, k: usize) {
        if k < self.n {
            // SAFETY: the first `n` entries are written, and the lock of the instance is held.
            unsafe { (&mut (*self.table).all)[k].assume_init_mut() }.used = true;
        }
    }

    #[inline]
    pub fn parks(&self) -> bool {
        self.hot < self.n
    }

    /// The k-th channel becomes hot.
    #[cold]
    fn heat(&mut self, k: usize, b: &Waker) {
        if k < self.hot {
            return;
        }
        self.swap(k, self.hot);
        self.hot += 1;
        self.was_used(self.hot - 1);
        if self.hot > HOT {
            // The waker must name channels before any channel is parked.
            b.name_channels(true);
            self.park_some();
        }
    }

    /// The k-th channel has marks, so it becomes hot.
    pub fn has_marks(&mut self, k: usize, b: &Waker) {
        self.was_used(k);
        self.heat(k, b);
    }

    /// Parks channels without recent events, until at most [`HOT`] are hot. (If all have marks,
    /// more stay hot.)
    fn park_some(&mut self) {
        for _ in 0..2 * self.hot {
            if self.hot <= HOT {
                return;
            }
            self.park_next();
        }
    }

    /// Parks the next hot channel, if nothing has happened in it since the last look.
    fn park_next(&mut self) {
        let k = self.hand % self.hot;
        self.hand = k + 1;
        let Some(link) = self.at(k) else { return };
        if link.used {
            return self.set(k, Link { used: false, ..link });
        }
        link.waiter.sleeping.store(1, Ordering::Relaxed);
        // The waiter says "sleeping" before the look for marks. A peer marks first and then reads
        // the waiter, so it rings, or the look below sees its mark.
        fence(Ordering::SeqCst);
        if link.waiter.summary.load(Ordering::Relaxed) == 0 {
            self.hot -= 1;
            self.swap(k, self.hot);
        }
    }

    /// Called before a sleep, whose cost grows with the number of hot channels. If some channels
    /// are parked anyway, this parks idle ones, too: two for each channel that a ring makes hot.
    #[inline]
    pub fn before_sleep(&mut self) {
        const LOOKS: usize = 4;
        if self.parks() {
            for _ in 0..LOOKS.min(self.hot.saturating_sub(LEAST)) {
                self.park_next();
            }
        }
    }

    /// The next look covers all channels.
    pub fn look_at_all(&mut self) {
        self.looked = 0;
    }

    /// Called before a look for marks at time `now` (ticks): channels in which peers have rung
    /// become hot. Returns the number of channels to look at. `alone`: no other instance uses the
    /// waker, which could take its rings.
    #[inline]
    pub fn how_many(&mut self, b: &Waker, now: u64, alone: bool) -> usize {
        if !alone {
            self.hot = self.n;
        }
        match self.parks() {
            true => self.hear(b, now),
            false => self.n,
        }
    }

    #[cold]
    fn hear(&mut self, b: &Waker, now: u64) -> usize {
        let mut all = b.rung(|id| {
            for c in [CLIENT, SERVER].into_iter().filter_map(|side| chan::by_id(id, side)) {
                let k = self.place(c).map_or(0, |place| *place as usize).wrapping_sub(1);
                if self.at(k).is_some_and(|l| l.chan.id.load(Ordering::Relaxed) == id) {
                    self.heat(k, b);
                }
            }
        });
        // Without a monitor, peers may be unable to ring.
        all |= ctl::dead() || now.wrapping_sub(self.looked) > ALL_US * cpu::ticks_per_us();
        if all {
            self.looked = now;
            return self.n;
        }
        self.hot
    }

    /// Removes the k-th channel. The last one takes its place.
    pub fn remove(&mut self, mut k: usize) {
        let Some(gone) = self.at(k) else { return };
        if k < self.hot {
            self.hot -= 1;
            self.swap(k, self.hot);
            k = self.hot;
        }
        self.swap(k, self.n - 1);
        self.n -= 1;
        if let Some(place) = self.place(gone.chan) {
            *place = 0;
        }
    }

    /// The channels that are not parked.
    #[inline]
    pub fn waiters(&self) -> impl Iterator<Item = &'static Waiter> + '_ {
        (0..self.hot).filter_map(|k| self.at(k)).filter_map(|l| l.waiter())
    }

    pub fn clear(&mut self) {
        while self.n > 0 {
            self.remove(self.n - 1);
        }
    }

    /// Frees the table, because no thread uses the instance any more.
    pub fn free(&mut self) {
        (self.n, self.hot) = (0, 0);
        if !self.table.is_null() {
            // SAFETY: the mapping belongs to this value, and nothing refers to it.
            let _ = unsafe { sys::munmap(self.table as *mut u8, SIZE) };
            self.table = ptr::null_mut();
        }
    }
}
