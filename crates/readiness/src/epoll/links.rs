//! The channels in which an instance has a waiter.
//!
//! Peers ring where a waiter says that it sleeps. In few channels the instance says so before each sleep, takes it back
//! after it, and looks at all of them for marks. With more than [`HOT`] of them the others are *parked*: they say for good
//! that the instance sleeps, and are not looked at. So a peer that marks something there rings in any case, and the ring
//! names the channel ([`Waker::rung`]), which is looked at from then on. A sleep costs what its few hot channels cost.
//!
//! A peer that rings, or does not, changes nothing in other channels. A ring that is lost (the monitor was to pass it
//! on, and is stopped) is made up for by a look at all channels, now and then.

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
    /// The channel's number when it was linked.
    id: u32,
    /// A peer has marked something here since [`Links::park_some`] came by.
    used: bool,
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
/// So many are looked at, if something happens in them.
const HOT: usize = 128;
/// And so many in any case.
const LEAST: usize = 8;
/// All are looked at after so long.
const ALL_US: u64 = 100_000;

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
    /// The first so many are not parked.
    hot: usize,
    /// Where to look next for one to park.
    hand: usize,
    /// When all were last looked at, ticks.
    looked: u64,
}

const SIZE: usize = core::mem::size_of::<Table>();

impl Links {
    /// Waiter `w` of `c` is ours, of `b`. False: it could not be written down.
    #[inline]
    pub fn add(&mut self, c: &'static Chan, w: usize, b: &Waker) -> bool {
        let Some(place) = self.place(c) else { return false };
        let k = (*place as usize).wrapping_sub(1);
        // The index may be another channel's by now.
        self.at(k).is_some_and(|l| l.waiter().is_some()) || self.put(c, k, w, b)
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
        // SAFETY: as in `place`, which has been asked for a channel; k is below MAX.
        unsafe { (*self.table).all[k].write(link) };
        if let Some(place) = self.place(link.chan) {
            *place = k as u16 + 1;
        }
    }

    #[inline]
    pub fn at(&self, k: usize) -> Option<Link> {
        // SAFETY: the first n are written.
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
            // SAFETY: as in `at`; the instance's lock is held.
            unsafe { (&mut (*self.table).all)[k].assume_init_mut() }.used = true;
        }
    }

    #[inline]
    pub fn parks(&self) -> bool {
        self.hot < self.n
    }

    /// The k-th is looked at from now on.
    #[cold]
    fn heat(&mut self, k: usize, b: &Waker) {
        if k < self.hot {
            return;
        }
        self.swap(k, self.hot);
        self.hot += 1;
        self.was_used(self.hot - 1);
        if self.hot > HOT {
            // Before any is parked.
            b.name_channels(true);
            self.park_some();
        }
    }

    /// The k-th has marks: it is looked at from now on.
    pub fn has_marks(&mut self, k: usize, b: &Waker) {
        self.was_used(k);
        self.heat(k, b);
    }

    /// Parks those in which nothing has happened lately, until there are few hot ones. (With marks in all of them there
    /// may be more.)
    fn park_some(&mut self) {
        for _ in 0..2 * self.hot {
            if self.hot <= HOT {
                return;
            }
            self.park_next();
        }
    }

    /// Parks the next hot one if nothing has happened in it since it was last looked at here.
    fn park_next(&mut self) {
        let k = self.hand % self.hot;
        self.hand = k + 1;
        let Some(link) = self.at(k) else { return };
        if link.used {
            return self.set(k, Link { used: false, ..link });
        }
        link.waiter.sleeping.store(1, Ordering::Relaxed);
        // Before the look for marks; whoever marks does the reverse, and rings if this comes first.
        fence(Ordering::SeqCst);
        if link.waiter.summary.load(Ordering::Relaxed) == 0 {
            self.hot -= 1;
            self.swap(k, self.hot);
        }
    }

    /// Before a sleep, which costs what the hot ones cost. Where some are parked anyway, so are those in which nothing
    /// happens between sleeps: two of them for each that a ring makes hot.
    #[inline]
    pub fn before_sleep(&mut self) {
        const LOOKS: usize = 4;
        if self.parks() {
            for _ in 0..LOOKS.min(self.hot.saturating_sub(LEAST)) {
                self.park_next();
            }
        }
    }

    /// The next look is at all of them.
    pub fn look_at_all(&mut self) {
        self.looked = 0;
    }

    /// Before a look for marks at time `now`, ticks: the channels in which peers have rung are hot. How many to look at.
    /// `alone`: no other instance hears the waker, and takes its rings.
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
        // Without a monitor peers may have nothing to ring by.
        all |= ctl::dead() || now.wrapping_sub(self.looked) > ALL_US * cpu::ticks_per_us();
        if all {
            self.looked = now;
            return self.n;
        }
        self.hot
    }

    /// The last takes the place of the k-th.
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

    /// Those that are not parked.
    #[inline]
    pub fn waiters(&self) -> impl Iterator<Item = &'static Waiter> + '_ {
        (0..self.hot).filter_map(|k| self.at(k)).filter_map(|l| l.waiter())
    }

    pub fn clear(&mut self) {
        while self.n > 0 {
            self.remove(self.n - 1);
        }
    }

    /// Nobody uses the instance any more.
    pub fn free(&mut self) {
        (self.n, self.hot) = (0, 0);
        if !self.table.is_null() {
            // SAFETY: our own mapping, and nothing refers to it.
            let _ = unsafe { sys::munmap(self.table as *mut u8, SIZE) };
            self.table = ptr::null_mut();
        }
    }
}
