//! A listening socket, as this process sees it. The tables of `listeners` and `zones` have its
//! queues and workers.

use core::sync::atomic::Ordering::Relaxed;
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// State of descriptions of kinds Listener and KernelListener.
pub struct Listening {
    /// Index plus one.
    object: AtomicU32,
    zone: AtomicU32,
    options_seen: AtomicU32,
    accepts: AtomicBool,
    held_elsewhere: AtomicBool,
    exec_prepared: AtomicBool,
}

impl Listening {
    pub(super) fn reset(&self) {
        for word in [&self.object, &self.zone, &self.options_seen] {
            word.store(0, Relaxed);
        }
        for flag in [&self.accepts, &self.held_elsewhere, &self.exec_prepared] {
            flag.store(false, Relaxed);
        }
    }

    /// The listener's index in the table of listeners. For an epoll instance: its index in the
    /// table of instances.
    pub fn object(&self) -> Option<u32> {
        self.object.load(Relaxed).checked_sub(1)
    }
    pub(super) fn set_object(&self, place: u32) {
        self.object.store(place + 1, Relaxed);
    }

    /// The listener's index in the table of listeners with local listen sockets.
    pub fn zone(&self) -> Option<u32> {
        self.zone.load(Relaxed).checked_sub(1)
    }
    pub fn set_zone(&self, place: u32) {
        // Release: makes the listener's entry in that table visible.
        self.zone.store(place + 1, Ordering::Release);
    }
    /// Removes the listener from that table.
    pub fn take_zone(&self) -> Option<u32> {
        self.zone.swap(0, Ordering::AcqRel).checked_sub(1)
    }

    /// The value of the change counter up to which this process knows the listener's options.
    pub fn options_seen(&self) -> u32 {
        self.options_seen.load(Relaxed)
    }
    pub fn set_options_seen(&self, change: u32) {
        self.options_seen.store(change, Relaxed);
    }

    /// Does this process, or an ancestor that forked it, accept on the listener?
    pub fn accepts(&self) -> bool {
        self.accepts.load(Relaxed)
    }
    pub fn mark_accepting(&self) {
        // (A store is avoided if possible, because after a fork it would copy a page.)
        if !self.accepts() {
            self.accepts.store(true, Relaxed);
        }
    }

    /// May unknown processes have the listener? It was passed in a message, or comes from a
    /// program without the library.
    pub fn is_held_elsewhere(&self) -> bool {
        self.held_elsewhere.load(Relaxed)
    }
    pub fn set_held_elsewhere(&self, held: bool) {
        self.held_elsewhere.store(held, Relaxed);
    }

    /// Has the program prepared the listener for the next program, by `dup2` or by clearing
    /// close-on-exec?
    pub fn is_exec_prepared(&self) -> bool {
        self.exec_prepared.load(Relaxed)
    }
    pub fn prepare_exec(&self) {
        self.exec_prepared.store(true, Relaxed);
    }
}
