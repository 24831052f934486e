//! Channels as this process has them mapped.

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
pub use waking::{cut, wake, wake_side, wake_syn};

/// Channels per process: bounded by what else they take, descriptors and memory. (Tables name one in 16 bits.)
pub const MAX: u32 = index::MAX;
pub static CHANS: Slab<Chan, MAX, NEAR> = Slab::new();
/// Of a server that forks: for its first clients.
const NEAR: usize = 2;

/// The channel in which the connection `d` is.
#[inline]
pub fn of(d: &Desc) -> Option<&'static Chan> {
    CHANS.get(d.conn().channel()?)
}

/// Ports of one lease.
pub const PORT_BLOCK: usize = 64;

/// One mapped channel. Zero is valid.
#[repr(C)]
pub struct Chan {
    /// Monitor's number; 0: not in use.
    pub id: AtomicU32,
    base: AtomicPtr<u8>,
    segments: Segments<SEGMENTS>,
    pub side: AtomicU32,
    /// Monitor's number of the listener.
    pub listener: AtomicU64,
    /// The other side is gone, or this is the parent's: no new connections.
    pub retired: AtomicBool,
    /// Its memory, for another monitor.
    pub kept: Kept,
    /// It comes from a monitor that has died, and the one after it does not know both sides: no new
    /// connections, and nobody says when the other side dies.
    half: AtomicBool,
    link: AtomicU32,
    /// What is held against the other side; see [`distrust`].
    pub broken: AtomicU32,
    violations: AtomicU32,
    useless: AtomicU32,
    useless_since: AtomicU64,
    /// Slot to descriptor index + 1.
    pub desc_of: [AtomicU32; SLOTS],
    /// Own waker to waiter number + 1.
    waiter_of: [AtomicU8; waker::MAX],
    /// By peer's waiter: the pipe by which its thread is woken.
    peer_pipe: [pipes::Place; WAITERS],
    /// The key of the thread that the monitor wakes for us.
    peer_rung: [AtomicU64; WAITERS],
    client: Lock<Client>,
    /// Memory of rings of closed connections: see [`crate::left`].
    left: Lock<Lefts>,
    pub kept_memory: left::Kept,
    /// See [`rest`]: connections opened at the last look, and since when there is none.
    opened: AtomicU32,
    rests_since: AtomicU64,
    /// Of the listener's side: connections that have come, and workers that have left some behind.
    arrived: Source,
    left_behind: Source,
}

/// What the client side keeps: which slots it may use.
#[derive(Clone, Copy)]
pub struct Client {
    free: [u16; SLOTS],
    free_n: usize,
    /// Slots closed by us, maybe not yet by the server; a FIFO.
    closing: [u16; SLOTS],
    closing_at: usize,
    closing_n: usize,
    unused: usize,
    ports: [u16; SLOTS / PORT_BLOCK],
    pub(super) next_worker: u32,
    pub(super) busy: Busy,
}

// SAFETY: zero is valid for all fields; `link` is the slab's.
unsafe impl Slot for Chan {
    fn link(&self) -> &AtomicU32 {
        &self.link
    }
}

/// Map a channel. The descriptor stays the caller's.
pub fn map(id: u32, listener: u64, side: usize, fd: i32) -> Option<&'static Chan> {
    crate::faults::are_handled();
    let base = segment::map_first(fd)?;
    // SAFETY: a Header lies at the start of every channel; reading its plain
    // fields once.
    let (magic, version) = unsafe { ((*(base as *const Header)).magic, (*(base as *const Header)).version) };
    let slot = (magic == channel::MAGIC && version == fsocket_abi::VERSION).then(|| CHANS.alloc()).flatten();
    let Some((_, c)) = slot else {
        // SAFETY: just mapped, nobody knows it.
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

/// Is there memory for one more channel's data?
pub fn reserve() -> bool {
    CHANS.reserve()
}

/// One process can be on both sides of a channel; it then has two mappings.
pub fn by_id(id: u32, side: usize) -> Option<&'static Chan> {
    let is = |c: &&'static Chan| c.id.load(Ordering::Acquire) == id && c.my_side() == side;
    index::find(id, |place| CHANS.get(place).filter(is)).unwrap_or_else(|index::Unsure| all().find(is))
}

pub fn all() -> impl Iterator<Item = &'static Chan> {
    (0..CHANS.len()).filter_map(|i| CHANS.get(i)).filter(|c| c.id.load(Ordering::Acquire) != 0)
}

/// Does this process share no memory with a peer? One that comes is announced by
/// the control socket, and rings every waker (`serve`).
pub fn none() -> bool {
    index::is_empty()
}

/// A descriptor of a channel got another number.
pub fn renumbered(old: i32, new: i32) -> bool {
    pipes::renumbered(old, new) || all().any(|c| c.kept.renumbered(old, new))
}

/// The program lacks descriptors: some of those that are kept for another monitor are closed. It will not know their
/// channels. False: there are none.
pub fn spare_descriptors() -> bool {
    const SOME: usize = 64;
    all().filter_map(|c| c.kept.take()).take(SOME).map(process::close_own).count() > 0
}

/// The monitor hands us a pipe to a peer's thread. True: `fd` is ours.
pub fn pipe(m: notice::WakerWrite, fd: i32) -> bool {
    by_id(m.channel, 1 - m.waiter.side).is_some_and(|c| c.pipe_to(m.waiter.number, m.key, fd))
}

/// No new connection of this process goes to that listener.
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
        // SAFETY: in use means mapped; address space of a channel is replaced
        // when it ends, and returned only much later (`unmap_if_unused`).
        unsafe { &*(self.base() as *const Header) }
    }
    /// `q` 0: any worker; 1 + w: worker w.
    pub fn queue(&self, q: usize) -> &'static SynQueue {
        let q = q.min(WORKERS);
        // SAFETY: as `header`; q is in range.
        unsafe { &*(self.base().add(SYN_OFF) as *const SynQueue).add(q) }
    }
    /// How often a connection that waits here was news to a worker: it never falls while the channel is mapped.
    pub fn arrivals(&self) -> u64 {
        let word = |word: fn(&Header) -> &fsocket_sync::atomic::AtomicU32| match self.id.load(Ordering::Relaxed) {
            0 => 0, // no longer mapped
            _ => word(self.header()).load(Ordering::Acquire),
        };
        self.arrived.total(word(|h| &h.arrived)).wrapping_add(self.left_behind.total(word(|h| &h.left_behind)))
    }
    /// Takes a connection out of queue `q`.
    pub fn pop_syn(&self, q: usize) -> Option<usize> {
        syn::pop(self.queue(q)).unwrap_or_else(|Hostile| {
            self.broke();
            None
        })
    }
    pub fn waiter(&self, side: usize, w: usize) -> &'static Waiter {
        let at = (side & 1) * (WAITERS + 1) + w.min(WAITERS);
        // SAFETY: as `header`; both are in range.
        unsafe { &*(self.base().add(WAITER_OFF) as *const Waiter).add(at) }
    }
    pub fn slot(&self, i: usize) -> &'static channel::Slot {
        let i = i & (SLOTS - 1);
        // SAFETY: as `header`; i is in range.
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

    /// Waiter of a waker of ours on our side of this channel; taken on first use.
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
    /// Waiter of a waker here, if it has one.
    #[inline]
    pub fn waiter_of(&self, b: &waker::Waker) -> Option<&'static Waiter> {
        match self.waiter_of[b.index()].load(Ordering::Relaxed) {
            0 => None,
            w => Some(self.waiter(self.my_side(), w as usize - 1)),
        }
    }
    /// A thread is about to sleep on a waker for something in this channel; None: peers cannot ring it. `how`: see
    /// [`channel::sleeping`]. The caller fences, and looks for marks.
    pub fn sleep_on(&self, b: &waker::Waker, how: u32) -> Option<usize> {
        self.waiter_for(b).inspect(|w| self.waiter(self.my_side(), *w).sleeping.store(how, Ordering::Relaxed))
    }
    /// It sleeps no more.
    pub fn slept_on(&self, b: &waker::Waker) -> Option<usize> {
        let w = self.waiter_of(b)?;
        // Acquire: a peer that has rung it, and perhaps nobody else, shows what for behind this.
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
    /// In a forked child: the wakers were the parent's, and so were the pipes to peers.
    pub fn forget_wakers(&self) {
        for w in &self.waiter_of {
            w.put(0);
        }
        self.peer_pipe.iter().for_each(pipes::Place::forget);
    }

    /// Return the memory once nothing refers to it. The address range stays
    /// reserved for a while (see [`fsocket_fdtable::space`]), so that a thread that still holds a
    /// stale pointer cannot hit somebody else's mapping.
    pub fn unmap_if_unused(&self) {
        // A connection is made under it. (Who has it comes here afterwards.)
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
        // SAFETY: mapped by `map`, and its number is gone: nobody uses it any more.
        unsafe { self.unmap_all() };
        CHANS.free(self.index());
    }

    pub fn client(&self) -> Option<Guard<'_, Client>> {
        self.client.lock().ok()
    }
    /// The memory stays mapped while somebody has it, who calls [`Chan::unmap_if_unused`] afterwards.
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

    /// Are connections distributed by who has time, and stolen?
    pub fn is_balanced(&self) -> bool {
        self.header().turns.load(Ordering::Relaxed) == 0 && process::balances()
    }

    /// Something was put into a queue: the monitor looks from now on, if it did not.
    pub fn arrived(&self) {
        // Pairs with the monitor's heavy one, between its word that it looks no more and its last look. (The balance
        // runs none: a connection that it overlooks is the only one for a while.)
        light_fence();
        let idle = &self.header().idle;
        if idle.load(Ordering::Relaxed) != 0 && idle.swap(0, Ordering::AcqRel) == 1 && !ctl::dead() {
            let _ = ctl::tell(request::Arrives { channel: self.id.load(Ordering::Relaxed) }, None);
        }
    }
}

/// In a forked child: the parent hands out its slots; what is open stays usable.
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
