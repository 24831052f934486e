//! Channels that this process has mapped.

use crate::cow::Sparing;
use crate::left::{self, Lefts};
use crate::lock::{Guard, Lock};
use crate::memory_fd::Kept;
use crate::slab::{Slab, Slot};
use crate::table::{self, Desc};
use crate::{ctl, index, pipes, process, segment, waker};
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicU8, Ordering};
use fsocket_abi::channel::{
    self, Header, SynQueue, Waiter, CLIENT, SEGMENTS, SLOTS, SLOT_OFF, SYN_OFF, WAITERS, WAITER_OFF, WORKERS,
};
use fsocket_proto::{notice, request};
use fsocket_ring::dispatch::Busy;
use fsocket_ring::{syn, Hostile};
use fsocket_sync::arrivals::Source;
use fsocket_sync::light_fence;
use fsocket_sync::segments::Segments;
use fsocket_sys as sys;

pub use crate::segment::{mappable, Rings};
use fsocket_ring::syn::len as queue_len;

mod client;
mod distrust;
mod half;
mod rest;
mod segments;
mod waking;
pub use client::Taken;
pub use distrust::{broken_elsewhere, ANNOUNCED, ANY as ANY_BROKEN, ENDED, TO_BE_ENDED};
pub use half::{halve_all, is_time_to_give_up, whole};
pub use waking::{sleep_limit, wake, wake_side, wake_syn};

/// Channels per process, if memory allows. (Tables store an index in 16 bits.)
pub const MAX: u32 = index::MAX;
pub static CHANS: Slab<Chan, MAX, NEAR> = Slab::new();
/// Channels in the slab itself: enough for the first clients of a forking server.
const NEAR: usize = 2;

/// The channel of the connection `d`.
#[inline]
pub fn of(d: &Desc) -> Option<&'static Chan> {
    CHANS.get(d.conn().channel()?)
}

/// Ports of one lease.
pub const PORT_BLOCK: usize = 64;

/// One mapped channel. All bytes zero is a valid value.
#[repr(C)]
pub struct Chan {
    /// The number that the monitor gave the channel; 0: not in use.
    pub id: AtomicU32,
    base: AtomicPtr<u8>,
    segments: Segments<SEGMENTS>,
    pub side: AtomicU32,
    /// The monitor's number of the listener.
    pub listener: AtomicU64,
    /// No new connections: the other side is gone, or the channel is the parent process's.
    pub retired: AtomicBool,
    /// The descriptor of the memory, kept for the next monitor.
    pub kept: Kept,
    /// The channel is from a dead monitor, and the next one does not know both sides yet. It gets
    /// no new connections, and no monitor reports the death of the other side.
    half: AtomicBool,
    link: AtomicU32,
    /// Violations by the other side; see [`distrust`].
    pub broken: AtomicU32,
    violations: AtomicU32,
    useless: AtomicU32,
    useless_since: AtomicU64,
    /// For each slot: descriptor index + 1.
    pub desc_of: [AtomicU32; SLOTS],
    /// For each waker of this process: waiter number + 1.
    waiter_of: [AtomicU8; waker::MAX],
    /// For each waiter of the peer: the pipe through which this process wakes its thread.
    peer_pipe: [pipes::Place; WAITERS],
    /// For each waiter of the peer: the key of the thread that the monitor was asked to wake.
    peer_rung: [AtomicU64; WAITERS],
    client: Lock<Client>,
    /// Memory in rings of closed connections; see [`crate::left`].
    left: Lock<Lefts>,
    pub kept_memory: left::Kept,
    /// See [`rest`]: connections opened at the last look, and since when it is unused.
    opened: AtomicU32,
    rests_since: AtomicU64,
    /// On the listener's side: connections that arrived, and workers that left some behind.
    arrived: Source,
    left_behind: Source,
}

/// State of the client side: the slots that it may use.
#[derive(Clone, Copy)]
pub struct Client {
    free: [u16; SLOTS],
    free_n: usize,
    /// Slots that this side has closed and the server may not have closed yet; a FIFO.
    closing: [u16; SLOTS],
    closing_at: usize,
    closing_n: usize,
    unused: usize,
    ports: [u16; SLOTS / PORT_BLOCK],
    pub(super) next_worker: u32,
    pub(super) busy: Busy,
}

// SAFETY: zero is a valid value of all fields, and only the slab uses `link`.
unsafe impl Slot for Chan {
    fn link(&self) -> &AtomicU32 {
        &self.link
    }
}

/// Maps a channel. The caller still owns the descriptor `fd`.
pub fn map(id: u32, listener: u64, side: usize, fd: i32) -> Option<&'static Chan> {
    crate::faults::are_handled();
    let base = segment::map_first(fd)?;
    // SAFETY: the mapping begins with a `Header`, whose plain fields are read once.
    let (magic, version) = unsafe { ((*(base as *const Header)).magic, (*(base as *const Header)).version) };
    let slot = (magic == channel::MAGIC && version == fsocket_abi::VERSION).then(|| CHANS.alloc()).flatten();
    let Some((_, c)) = slot else {
        // SAFETY: the memory was just mapped, and no other code knows the address.
        unsafe { segment::unmap_first(base) };
        return None;
    };
    c.base.store(base, Ordering::Relaxed);
    c.segments.open(base as usize);
    c.side.store(side as u32, Ordering::Relaxed);
    c.listener.store(listener, Ordering::Relaxed);
    c.retired.store(false, Ordering::Relaxed);
    c.trust();
    c.half.store(false, Ordering::Relaxed);
    c.rests_since.store(sys::cpu::ticks(), Ordering::Relaxed);
    c.arrived.reset();
    c.left_behind.reset();
    c.kept.keep(process::high(), || process::high_copy(fd));
    for d in &c.desc_of {
        d.store(0, Ordering::Relaxed);
    }
    c.forget_wakers();
    for k in &c.peer_rung {
        k.store(0, Ordering::Relaxed);
    }
    if let Ok(mut cl) = c.client.lock() {
        cl.free_n = 0;
        cl.closing_at = 0;
        cl.closing_n = 0;
        cl.unused = 0;
        cl.ports = [0; SLOTS / PORT_BLOCK];
        cl.next_worker = 0;
        cl.busy = Busy::new();
    }
    c.id.store(id, Ordering::Release);
    index::add(c.index(), id);
    Some(c)
}

/// Reserves memory for the data of one more channel. False: there is none.
pub fn reserve() -> bool {
    CHANS.reserve()
}

/// Finds the mapping by number and side: a process on both sides of a channel has two mappings.
pub fn by_id(id: u32, side: usize) -> Option<&'static Chan> {
    let is = |c: &&'static Chan| c.id.load(Ordering::Acquire) == id && c.my_side() == side;
    index::find(id, |place| CHANS.get(place).filter(is)).unwrap_or_else(|index::Unsure| all().find(is))
}

pub fn all() -> impl Iterator<Item = &'static Chan> {
    (0..CHANS.len()).filter_map(|i| CHANS.get(i)).filter(|c| c.id.load(Ordering::Acquire) != 0)
}

/// Does this process share no memory with a peer? When a peer comes, the monitor announces it on
/// the control socket, and then every waker is rung (`serve`).
pub fn none() -> bool {
    index::is_empty()
}

/// The library has moved a descriptor from `old` to `new`. True: a channel uses this descriptor.
pub fn renumbered(old: i32, new: i32) -> bool {
    pipes::renumbered(old, new) || all().any(|c| c.kept.renumbered(old, new))
}

/// Closes some of the descriptors that are kept for the next monitor, because the program lacks
/// descriptors. The next monitor will not know the channels of those. False: there are none.
pub fn spare_descriptors() -> bool {
    const SOME: usize = 64;
    all().filter_map(|c| c.kept.take()).take(SOME).map(process::close_own).count() > 0
}

/// The monitor hands over a pipe that wakes a peer's thread. Returns true if `fd` was taken.
pub fn pipe(m: notice::WakerWrite, fd: i32) -> bool {
    by_id(m.channel, 1 - m.waiter.side).is_some_and(|c| c.pipe_to(m.waiter.number, m.key, fd))
}

/// From now on, no new connection of this process to that listener uses shared memory.
pub fn retire_of(listener: u64) {
    for c in all().filter(|c| c.my_side() == CLIENT && c.listener.load(Ordering::Relaxed) == listener) {
        c.retired.store(true, Ordering::Release);
    }
}

impl Chan {
    pub fn index(&self) -> u32 {
        CHANS.index(self)
    }
    fn base(&self) -> *mut u8 {
        self.base.load(Ordering::Relaxed)
    }
    pub fn my_side(&self) -> usize {
        (self.side.load(Ordering::Relaxed) & 1) as usize
    }
    pub fn header(&self) -> &'static Header {
        // SAFETY: a channel in use is mapped, and `Header` is at its start. When a channel ends,
        // its address range is replaced, and returned only much later (`unmap_if_unused`).
        unsafe { &*(self.base() as *const Header) }
    }
    /// SYN queue `q`. 0: the queue for any worker; 1 + w: the queue of worker w.
    pub fn queue(&self, q: usize) -> &'static SynQueue {
        let q = q.min(WORKERS);
        // SAFETY: a channel in use is mapped; `q` is limited to the range.
        unsafe { &*(self.base().add(SYN_OFF) as *const SynQueue).add(q) }
    }
    /// How often a waiting connection was new to a worker. The number never falls while mapped.
    pub fn arrivals(&self) -> u64 {
        let word = |word: fn(&Header) -> &fsocket_sync::atomic::AtomicU32| match self.id.load(Ordering::Relaxed) {
            0 => 0, // no longer mapped
            _ => word(self.header()).load(Ordering::Acquire),
        };
        self.arrived.total(word(|h| &h.arrived)).wrapping_add(self.left_behind.total(word(|h| &h.left_behind)))
    }
    /// Takes a connection from queue `q`.
    pub fn pop_syn(&self, q: usize) -> Option<usize> {
        syn::pop(self.queue(q)).unwrap_or_else(|Hostile| {
            self.broke();
            None
        })
    }
    pub fn waiter(&self, side: usize, w: usize) -> &'static Waiter {
        let at = (side & 1) * (WAITERS + 1) + w.min(WAITERS);
        // SAFETY: a channel in use is mapped; side and number are limited to the range.
        unsafe { &*(self.base().add(WAITER_OFF) as *const Waiter).add(at) }
    }
    pub fn slot(&self, i: usize) -> &'static channel::Slot {
        let i = i & (SLOTS - 1);
        // SAFETY: a channel in use is mapped; `i` is below `SLOTS`.
        unsafe { &*(self.base().add(SLOT_OFF) as *const channel::Slot).add(i) }
    }

    pub fn set_desc(&self, slot: usize, d: Option<&Desc>) {
        self.desc_of[slot & (SLOTS - 1)].store(d.map_or(0, |d| d.index() + 1), Ordering::Release);
    }
    pub fn desc(&self, slot: usize) -> Option<&'static Desc> {
        match self.desc_of[slot & (SLOTS - 1)].load(Ordering::Acquire) {
            0 => None,
            i => table::DESCS.get(i - 1),
        }
    }

    /// This side's waiter for a waker of this process. The first call takes a free one.
    pub fn waiter_for(&self, b: &waker::Waker) -> Option<usize> {
        let w = self.waiter_of[b.index()].load(Ordering::Relaxed);
        if w != 0 {
            return Some(w as usize - 1);
        }
        let (side, key) = (self.my_side(), b.key());
        for i in 0..WAITERS {
            let w = self.waiter(side, i);
            if w.waker.load(Ordering::Relaxed) == 0
                && w.waker.compare_exchange(0, key, Ordering::AcqRel, Ordering::Relaxed).is_ok()
            {
                w.sleeping.store(0, Ordering::Relaxed);
                w.summary.store(0, Ordering::Relaxed);
                for r in &w.ready {
                    r.store(0, Ordering::Relaxed);
                }
                self.waiter_of[b.index()].store(i as u8 + 1, Ordering::Release);
                return Some(i);
            }
        }
        None
    }
    /// The waiter that the waker has in this channel, if any.
    #[inline]
    pub fn waiter_of(&self, b: &waker::Waker) -> Option<&'static Waiter> {
        match self.waiter_of[b.index()].load(Ordering::Relaxed) {
            0 => None,
            w => Some(self.waiter(self.my_side(), w as usize - 1)),
        }
    }
    /// Notes that a thread is about to sleep on a waker for events in this channel. The caller
    /// then fences, and looks for marks. `how`: see [`channel::sleeping`]. None: no waiter is
    /// free, so peers cannot ring the waker.
    pub fn sleep_on(&self, b: &waker::Waker, how: u32) -> Option<usize> {
        self.waiter_for(b).inspect(|w| self.waiter(self.my_side(), *w).sleeping.store(how, Ordering::Relaxed))
    }
    /// Notes that the thread does not sleep any more.
    pub fn slept_on(&self, b: &waker::Waker) -> Option<usize> {
        let w = self.waiter_of(b)?;
        // Acquire: a peer publishes what changed before it rings the waker.
        w.sleeping.swap(channel::sleeping::NO, Ordering::AcqRel);
        Some(self.waiter_of[b.index()].load(Ordering::Relaxed) as usize - 1)
    }
    pub fn release_waiter(&self, b: &waker::Waker) {
        let w = self.waiter_of[b.index()].swap(0, Ordering::AcqRel);
        if w != 0 {
            let w = self.waiter(self.my_side(), w as usize - 1);
            w.sleeping.store(0, Ordering::Relaxed);
            let _ = w.waker.compare_exchange(b.key(), 0, Ordering::AcqRel, Ordering::Relaxed);
        }
    }
    /// In a forked child: the wakers and the pipes to peers belong to the parent.
    pub fn forget_wakers(&self) {
        for w in &self.waiter_of {
            w.put(0);
        }
        self.peer_pipe.iter().for_each(pipes::Place::forget);
    }

    /// Unmaps the memory once nothing refers to it. The address range stays reserved for a while
    /// (see [`fsocket_fdtable::space`]), so that a stale pointer cannot hit other memory.
    pub fn unmap_if_unused(&self) {
        // New connections are made under this lock. (Its holder calls this function afterwards.)
        let Some(_client) = self.client.try_lock() else { return };
        if !self.retired.load(Ordering::Acquire) || self.desc_of.iter().any(|d| d.load(Ordering::Relaxed) != 0) {
            return;
        }
        let id = self.id.swap(0, Ordering::AcqRel);
        if id == 0 {
            return;
        }
        index::remove(self.index(), id);
        self.peer_pipe.iter().for_each(pipes::Place::leave);
        if let Some(fd) = self.kept.take() {
            process::close_own(fd);
        }
        self.set_half(false);
        waker::channel_gone();
        self.kept_memory.forget();
        if let Ok(mut left) = self.left.lock() {
            left.retain(|_| false);
        }
        // SAFETY: `map` has mapped the memory. The channel's number is gone, so only late threads
        // may still use it.
        unsafe { self.unmap_all() };
        CHANS.free(self.index());
    }

    pub fn client(&self) -> Option<Guard<'_, Client>> {
        self.client.lock().ok()
    }
    /// Locks if free. The memory stays mapped meanwhile; the caller must call
    /// [`Chan::unmap_if_unused`] afterwards.
    pub fn try_client(&self) -> Option<Guard<'_, Client>> {
        self.client.try_lock()
    }
    pub fn left(&self) -> Option<Guard<'_, Lefts>> {
        self.left.lock().ok()
    }
    pub fn reset_lock_after_fork(&self) {
        self.client.reset_after_fork();
        self.left.reset_after_fork();
    }
    pub fn lock_for_fork(&self) -> bool {
        self.client.lock().map(core::mem::forget).is_ok()
    }

    /// Are connections given to workers that have time, and may other workers steal them?
    pub fn is_balanced(&self) -> bool {
        self.header().turns.load(Ordering::Relaxed) == 0 && process::balances()
    }

    /// Wakes the monitor after a connection was put into a queue, if the monitor is idle.
    pub fn arrived(&self) {
        // Pairs with the monitor's heavy fence between its announcement that it stops looking and
        // its last look. (The monitor's balancing of workers has no such fence. So it may overlook
        // a connection, but only if no other one comes for a while.)
        light_fence();
        let idle = &self.header().idle;
        if idle.load(Ordering::Relaxed) != 0 && idle.swap(0, Ordering::AcqRel) == 1 && !ctl::dead() {
            let _ = ctl::tell(request::Arrives { channel: self.id.load(Ordering::Relaxed) }, None);
        }
    }
}

/// In a forked child: open connections stay usable, but only the parent makes new ones here.
pub fn become_child() {
    index::become_child();
    pipes::become_child();
    for c in all() {
        c.forget_wakers();
        c.reset_lock_after_fork();
        if c.my_side() == CLIENT {
            c.retired.put(true);
        }
    }
}
