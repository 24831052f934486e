//! The epoll instances in which the program watches a listener, and the threads that wait there.

use crate::cow::Sparing;
use crate::number::Number;
use crate::process;
use core::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};
use fsocket_sys as sys;

pub(super) const IN: u32 = libc::EPOLLIN as u32;

/// A thread of this process.
#[derive(Clone, Copy)]
pub struct Who {
    pub thread: u64,
    pub tid: i32,
}

impl Who {
    pub fn me() -> Who {
        Who { thread: process::thread(), tid: sys::gettid() }
    }
}

/// Number of registrations that are remembered for each listener and process.
pub(super) const WATCHES: usize = 64;

/// Stands for no instance: the entry is free. [`BEING_TAKEN`] marks an entry that a thread is filling in.
pub(super) const NO_INSTANCE: i32 = -1;

pub(super) const BEING_TAKEN: i32 = -2;

/// The epoll instances in which the application watches a listener.
pub struct List {
    pub(super) all: [Watch; WATCHES],
    /// Number of entries that were ever used.
    pub(super) used: AtomicU32,
}

pub(super) struct Watch {
    /// Descriptor of the instance, [`NO_INSTANCE`] or [`BEING_TAKEN`].
    pub(super) ep: Number,
    pub(super) fd: Number,
    pub(super) events: AtomicU32,
    pub(super) data: AtomicU64,
    pub(super) thread: AtomicU64,
    pub(super) tid: AtomicI32,
}

impl Watch {
    pub(super) fn ep(&self) -> i32 {
        self.ep.load(Ordering::Relaxed)
    }
    pub(super) fn data(&self) -> u64 {
        self.data.load(Ordering::Relaxed)
    }
    pub(super) fn thread(&self) -> u64 {
        self.thread.load(Ordering::Relaxed)
    }
    pub(super) fn is_of(&self, who: Who) {
        self.thread.store(who.thread, Ordering::Relaxed);
        self.tid.store(who.tid, Ordering::Relaxed);
    }
    pub(super) fn event(&self) -> libc::epoll_event {
        libc::epoll_event { events: self.events.load(Ordering::Relaxed), u64: self.data.load(Ordering::Relaxed) }
    }
}

impl List {
    pub fn clear(&self) {
        for w in &self.all {
            w.ep.put(NO_INSTANCE);
        }
    }
    pub(super) fn iter(&self) -> impl Iterator<Item = &Watch> {
        // Acquire: pairs with the release in `note`.
        let used = (self.used.load(Ordering::Acquire) as usize).min(WATCHES);
        self.all[..used].iter().filter(|w| w.ep.load(Ordering::Acquire) >= 0)
    }
    /// Entries in which threads wait for connections.
    pub(super) fn active(&self) -> impl Iterator<Item = &Watch> {
        self.iter().filter(|w| w.events.load(Ordering::Relaxed) & IN != 0)
    }
    pub(super) fn find(&self, ep: i32, fd: i32) -> Option<&Watch> {
        self.iter().find(|w| w.ep.load(Ordering::Relaxed) == ep && w.fd.load(Ordering::Relaxed) == fd)
    }
    pub(super) fn note(&self, ep: i32, fd: i32, ev: &libc::epoll_event, who: Option<Who>) -> bool {
        // Other threads make entries at the same time.
        let claim =
            |w: &&Watch| w.ep.compare_exchange(NO_INSTANCE, BEING_TAKEN, Ordering::Acquire, Ordering::Relaxed).is_ok();
        let free = || {
            let (i, w) = self.all.iter().enumerate().find(|(_, w)| claim(w))?;
            // Release: publishes that the table is used up to this entry, for the loads of `used`.
            // Readers skip the entry until `ep` is stored.
            self.used.fetch_max(i as u32 + 1, Ordering::Release);
            Some(w)
        };
        let Some(w) = self.find(ep, fd).or_else(free) else { return false };
        w.fd.store(fd, Ordering::Relaxed);
        w.events.store(ev.events, Ordering::Relaxed);
        w.data.store(ev.u64, Ordering::Relaxed);
        // Only a new thread is stored (a system call), because some servers remove and add the
        // listener every few connections.
        let thread = who.map_or_else(process::thread, |w| w.thread);
        if w.thread.load(Ordering::Relaxed) != thread {
            w.is_of(who.unwrap_or_else(Who::me));
        }
        w.ep.store(ep, Ordering::Release);
        true
    }
    pub(super) fn forget(&self, ep: i32, fd: i32) {
        if let Some(w) = self.find(ep, fd) {
            w.ep.store(NO_INSTANCE, Ordering::Release);
        }
    }
}
