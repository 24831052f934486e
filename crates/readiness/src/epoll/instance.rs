//! One epoll instance, with the list of *active* items, which each call looks at. The lock of the
//! instance guards the list.

use super::links::Links;
use crate::lock::Lock;
use crate::slab::{Slab, Slot};
use crate::table::{Desc, Kind};
use crate::waker::{self, Waker};
use crate::{ctl, spin};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use fsocket_sys::{self as sys, Errno};

/// Epoll instances of this process. (The first instance is in memory that a fork copies anyway,
/// because many children of a server have just one.)
#[link_section = ".data.fsocket_start"]
pub(super) static EPS: Slab<Ep, 4096, 1> = Slab::new();

/// Maximum number of active items of an instance.
pub(super) const MAX_ACTIVE: usize = 1 << 19;

/// One epoll instance. Zero is valid.
#[repr(C)]
pub struct Ep {
    pub(super) fd: AtomicI32,
    /// Waker index + 1.
    pub(super) waker: AtomicU32,
    /// Number of the library's items. 0: the library leaves the instance to the kernel.
    pub(super) items: AtomicU32,
    /// Number of items that the kernel's instance alone cannot report: all except kernel
    /// connections that may move to shared memory.
    pub(super) looked_at: AtomicU32,
    /// The program has added kernel descriptors.
    pub(super) kernel: AtomicBool,
    pub(super) ctl_added: AtomicBool,
    /// The instance has a local listen socket beside a global one.
    pub(super) zoned: AtomicBool,
    /// The array of events that was last found to be writable; see `wait`.
    pub(super) array: core::sync::atomic::AtomicUsize,
    pub(super) unsubscribed: crate::zone::balance::unsubscribed::Unsubscribed,
    /// The parent process has made the instance, and this process has not waited in it yet.
    pub(super) inherited: AtomicBool,
    /// An item must be looked at again ([`super::item::Item::recheck`]).
    pub(super) recheck: AtomicBool,
    /// Another process may wait in the kernel's instance.
    pub(super) shared: AtomicBool,
    /// An outer instance that watches this one has slept.
    pub(super) nested: AtomicBool,
    /// Number of threads that are in the kernel's `epoll_wait` without arming items, because the
    /// kernel reports all events ([`Ep::is_plain`]).
    pub(super) plain: AtomicU32,
    /// Number of threads that slept in the instance when the program closed it. The last one to
    /// leave frees it.
    pub(super) left_in: AtomicU32,
    /// The instance that wraps this one, if the library's entries are there.
    pub(super) wrapper: Wrapper,
    /// Counts events of the items for an outer instance that watches this one.
    pub(super) pulses: AtomicU32,
    /// The program has added a one-shot item that the kernel's instance watches as well.
    pub(super) one_shot: AtomicBool,
    pub(super) link: AtomicU32,
    pub(super) spin: spin::Memory,
    pub(super) lock: Lock<Inner>,
}

pub(super) struct Inner {
    pub(super) active: *mut u32,
    pub(super) n: usize,
    /// At most this many of them are dead.
    pub(super) dead: usize,
    /// Threads asleep in the kernel's epoll_wait.
    pub(super) sleepers: u32,
    pub(super) last_kernel: u64,
    pub(super) turns: u32,
    /// The last look at the kernel's instance brought events.
    pub(super) kernel_busy: bool,
    /// The library's events filled the array when it was time to look at the kernel's. The next
    /// call looks at the kernel first.
    pub(super) crowded: bool,
    /// An item was found whose connection has changed its path.
    pub(super) pending: bool,
    /// The channels in which this instance has a waiter.
    pub(super) links: Links,
    /// Some item is a listener, or may become one.
    pub(super) may_listen: bool,
}

/// Event data of the library's own entries in the kernel's instance. An application that uses
/// exactly this number as data would lose its events, but no application does.
pub(super) const WAKER_MARK: u64 = 0xF50C_4E7B_E11A_0001;

pub(super) const CTL_MARK: u64 = 0xF50C_4E7B_E11A_0002;

pub(super) fn of(d: &Desc) -> Option<&'static Ep> {
    d.listening().object().filter(|_| d.is(Kind::Epoll)).and_then(|place| EPS.get(place))
}

impl Ep {
    pub(super) fn index(&self) -> u32 {
        EPS.index(self)
    }
    /// Does the kernel's instance report all events of this one?
    ///
    /// SeqCst, as where `looked_at` is changed. A thread that is about to sleep in the kernel
    /// increments `plain` before it reads `looked_at`; a thread that adds an item does the
    /// reverse.
    pub(super) fn is_plain(&self) -> bool {
        self.looked_at.load(Ordering::SeqCst) == 0
    }
    /// Called before a sleep in the kernel alone. A kernel connection can move to shared memory
    /// only at rest, which is now. The monitor may have asked for that already, or may ask while
    /// the thread sleeps.
    #[inline]
    pub(super) fn hear_of_offers(&self) {
        if self.items.load(Ordering::Relaxed) > 0 {
            ctl::poll();
            if !self.ctl_added.load(Ordering::Relaxed) {
                self.watch_ctl();
            }
        }
    }
    pub(super) fn waker(&self) -> Option<&'static Waker> {
        match self.waker.load(Ordering::Acquire) {
            0 => None,
            b => waker::at(b as usize - 1),
        }
    }
    /// Returns the waker, which is made and added to the kernel's instance on first use.
    pub(super) fn need_waker(&self) -> Option<&'static Waker> {
        if let Some(b) = self.waker() {
            return Some(b);
        }
        // At first peers wake this process through the monitor, and the monitor's death must end
        // the sleep.
        if !self.watch_ctl() {
            return None;
        }
        if let Some(b) = self.waker() {
            return Some(b); // made with the wrapper
        }
        let b = waker::get()?;
        b.clear();
        let home = self.home();
        if sys::epoll_ctl(home, libc::EPOLL_CTL_ADD, b.fd(), Some(&self.waker_event())).is_err() {
            b.release();
            return None;
        }
        self.waker.store(b.index() as u32 + 1, Ordering::SeqCst);
        // A fork may have come in between. `before_fork` sets `shared` and then looks for the
        // waker.
        if self.shared.load(Ordering::SeqCst) {
            let _ = sys::epoll_ctl(home, libc::EPOLL_CTL_MOD, b.fd(), Some(&self.waker_event()));
        }
        if self.wrapper.fd().is_some() {
            self.move_sleepers(b);
        }
        Some(b)
    }
    /// Edge-triggered, so that no thread has to empty the waker. Level-triggered if other
    /// processes wait here as well, because one of them could take an edge that is meant for this
    /// process.
    pub(super) fn waker_event(&self) -> libc::epoll_event {
        let edge = if self.is_alone_in() { libc::EPOLLET } else { 0 };
        libc::epoll_event { events: (libc::EPOLLIN | edge) as u32, u64: WAKER_MARK }
    }
    /// Do only threads of this process wait in the kernel's instance, and is there no wrapper?
    pub(super) fn is_alone_in(&self) -> bool {
        !self.shared.load(Ordering::SeqCst) && self.wrapper.fd().is_none()
    }
    /// Does no outer instance watch this instance's waker? (An outer instance would take the
    /// wake-ups.)
    pub(super) fn hears_alone(&self) -> bool {
        !self.nested.load(Ordering::Relaxed) && self.wrapper.fd().is_none()
    }
    /// After this the next wait does not sleep before it has looked at all channels.
    #[inline]
    pub(super) fn miss_nothing(&self) {
        if self.waker().is_some_and(Waker::names) {
            if let Ok(mut g) = self.lock.lock() {
                g.links.look_at_all();
            }
        }
    }
    /// False: the monitor does not wake a thread that sleeps here, so the thread has to look
    /// again soon.
    pub(super) fn watch_ctl(&self) -> bool {
        if ctl::dead() || self.ctl_added.swap(true, Ordering::AcqRel) {
            return true;
        }
        let ev = libc::epoll_event { events: libc::EPOLLIN as u32, u64: CTL_MARK };
        match sys::epoll_ctl(self.home(), libc::EPOLL_CTL_ADD, ctl::fd(), Some(&ev)) {
            Err(Errno::ENOMEM | Errno::ENOSPC) => {
                self.ctl_added.store(false, Ordering::Release);
                false
            }
            _ => true,
        }
    }
    pub(super) fn unwatch_ctl(&self) {
        if self.ctl_added.swap(false, Ordering::AcqRel) {
            let _ = sys::epoll_ctl(self.home(), libc::EPOLL_CTL_DEL, ctl::fd(), None);
        }
    }
}

impl Inner {
    /// Makes room in the list of active items. An item without room would never be reported.
    pub(super) fn reserve(&mut self) -> sys::Result<()> {
        if self.active.is_null() {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            self.active = sys::mmap(MAX_ACTIVE * 4, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)? as *mut u32;
        }
        Ok(())
    }
    pub(super) fn push(&mut self, i: u32) -> bool {
        if self.active.is_null() || self.n >= MAX_ACTIVE {
            return false;
        }
        // SAFETY: the index is below MAX_ACTIVE, so inside the mapping.
        unsafe { *self.active.add(self.n) = i };
        self.n += 1;
        true
    }
    pub(super) fn at(&self, k: usize) -> u32 {
        assert!(k < self.n);
        // SAFETY: the index is below `n`, and the first `n` entries are written.
        unsafe { *self.active.add(k) }
    }
    /// The items from the k-th one on.
    pub(super) fn tail(&mut self, k: usize) -> &mut [u32] {
        if self.active.is_null() {
            return &mut [];
        }
        // SAFETY: the first `n` entries are written, and the lock is held.
        unsafe { core::slice::from_raw_parts_mut(self.active.add(k.min(self.n)), self.n.saturating_sub(k)) }
    }
    pub(super) fn set(&mut self, k: usize, i: u32) {
        assert!(k < self.n);
        // SAFETY: the first `n` entries are inside the mapping, and the lock is held.
        unsafe { *self.active.add(k) = i };
    }
}

/// Has this process no epoll instance?
pub fn is_unused() -> bool {
    EPS.is_empty()
}

// SAFETY: zero is valid for atomics; only the slab uses `link`.
unsafe impl Slot for Ep {
    fn link(&self) -> &AtomicU32 {
        &self.link
    }
}

/// Zero is valid.
pub(super) struct Wrapper {
    /// Descriptor + 1; 0: none.
    pub(super) fd: AtomicI32,
    pub(super) watched: AtomicBool,
    /// The waker is still in the application's instance, not in the wrapper.
    pub(super) inside: AtomicBool,
    /// Number of threads that sleep in the kernel directly on the application's instance.
    pub(super) direct: AtomicU32,
    /// A bit for each waker of an inner instance that is in this wrapper.
    pub(super) heard: [AtomicU64; waker::MAX.div_ceil(64)],
}
