//! One epoll instance, and the list of its items that are looked at on every call.

use super::links::Links;
use crate::lock::Lock;
use crate::slab::{Slab, Slot};
use crate::table::{Desc, Kind};
use crate::waker::{self, Waker};
use crate::{ctl, spin};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use fsocket_sys::{self as sys, Errno};

/// Epoll instances per process. (The first lies beside what a fork writes: many children of a server have just one.)
#[link_section = ".data.fsocket_start"]
pub(super) static EPS: Slab<Ep, 4096, 1> = Slab::new();

/// Active items per instance at most.
pub(super) const MAX_ACTIVE: usize = 1 << 19;

/// One epoll instance. Zero is valid.
#[repr(C)]
pub struct Ep {
    pub(super) fd: AtomicI32,
    /// Waker index + 1.
    pub(super) waker: AtomicU32,
    /// Items of ours; 0: nothing here concerns us.
    pub(super) items: AtomicU32,
    /// Those of them that the kernel's instance alone does not report: all but kernel connections that may go over.
    pub(super) looked_at: AtomicU32,
    /// Kernel descriptors were added.
    pub(super) kernel: AtomicBool,
    pub(super) ctl_added: AtomicBool,
    /// A local listen socket lies beside a global one in it.
    pub(super) zoned: AtomicBool,
    /// The array of events that was found to be there; see `wait`.
    pub(super) array: core::sync::atomic::AtomicUsize,
    pub(super) unsubscribed: crate::zone::balance::unsubscribed::Unsubscribed,
    /// The parent's, and not waited on here yet.
    pub(super) inherited: AtomicBool,
    /// An item in here is to be looked at again ([`super::item::Item::recheck`]).
    pub(super) recheck: AtomicBool,
    /// Another process may wait in the kernel's instance.
    pub(super) shared: AtomicBool,
    /// Another instance that watches this one has slept.
    pub(super) nested: AtomicBool,
    /// Threads in the kernel's epoll_wait while it reported everything ([`Ep::is_plain`]).
    pub(super) plain: AtomicU32,
    /// Closed while so many threads slept in it: the last of them to leave ends it.
    pub(super) left_in: AtomicU32,
    /// What is ours lies in an instance of our own around this one.
    pub(super) wrapper: Wrapper,
    /// What happened to our items here, for an instance that watches this one.
    pub(super) pulses: AtomicU32,
    pub(super) link: AtomicU32,
    pub(super) spin: spin::Memory,
    pub(super) lock: Lock<Inner>,
}

pub(super) struct Inner {
    pub(super) active: *mut u32,
    pub(super) n: usize,
    /// Threads asleep in the kernel's epoll_wait.
    pub(super) sleepers: u32,
    pub(super) last_kernel: u64,
    pub(super) turns: u32,
    /// The kernel had something when it was last asked.
    pub(super) kernel_busy: bool,
    /// It was the kernel's turn, and ours had filled the array: next time it comes first.
    pub(super) crowded: bool,
    /// An item was found whose connection has changed its path.
    pub(super) pending: bool,
    /// Channels where this instance has a waiter.
    pub(super) links: Links,
    /// Something was added that is a listener, or may become one.
    pub(super) may_listen: bool,
}

/// Marks our own registrations in the kernel's instance. An application that
/// stored exactly this number would lose those events; nobody does.
pub(super) const WAKER_MARK: u64 = 0xF50C_4E7B_E11A_0001;

pub(super) const CTL_MARK: u64 = 0xF50C_4E7B_E11A_0002;

pub(super) fn of(d: &Desc) -> Option<&'static Ep> {
    d.listening().object().filter(|_| d.is(Kind::Epoll)).and_then(|place| EPS.get(place))
}

impl Ep {
    pub(super) fn index(&self) -> u32 {
        EPS.index(self)
    }
    /// The kernel's instance reports everything that is in this one.
    ///
    /// SeqCst, as where an item is counted: a thread that is about to sleep in the kernel announces itself in `plain`
    /// before it looks here.
    pub(super) fn is_plain(&self) -> bool {
        self.looked_at.load(Ordering::SeqCst) == 0
    }
    /// Before a wait in the kernel alone: a connection that may go over does so when it is at rest, which is now. The monitor
    /// may have asked for that already, or asks while the thread sleeps.
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
    /// The waker, made and put into the kernel's instance on first use.
    pub(super) fn need_waker(&self) -> Option<&'static Waker> {
        if let Some(b) = self.waker() {
            return Some(b);
        }
        // Peers ring by way of the monitor at first; also to hear of the monitor's death.
        if !self.watch_ctl() {
            return None;
        }
        let b = waker::get()?;
        b.clear();
        let home = self.home();
        if sys::epoll_ctl(home, libc::EPOLL_CTL_ADD, b.fd(), Some(&self.waker_event())).is_err() {
            b.release();
            return None;
        }
        self.waker.store(b.index() as u32 + 1, Ordering::SeqCst);
        // A fork may have come in between; `before_fork` does the reverse.
        if self.shared.load(Ordering::SeqCst) {
            let _ = sys::epoll_ctl(home, libc::EPOLL_CTL_MOD, b.fd(), Some(&self.waker_event()));
        }
        Some(b)
    }
    /// By its edges, so that the waker need not be emptied. Not where others wait as well, who would
    /// take an edge that is not for them.
    pub(super) fn waker_event(&self) -> libc::epoll_event {
        let edge = if self.is_alone_in() { libc::EPOLLET } else { 0 };
        libc::epoll_event { events: (libc::EPOLLIN | edge) as u32, u64: WAKER_MARK }
    }
    /// Do only threads of this process wait in the kernel's instance, and in no wrapper?
    pub(super) fn is_alone_in(&self) -> bool {
        !self.shared.load(Ordering::SeqCst) && self.wrapper.fd().is_none()
    }
    /// Does no other instance hear its waker, whose rings it would take?
    pub(super) fn hears_alone(&self) -> bool {
        !self.nested.load(Ordering::Relaxed) && self.wrapper.fd().is_none()
    }
    /// The next look does not wait: it is at all channels.
    #[inline]
    pub(super) fn miss_nothing(&self) {
        if self.waker().is_some_and(Waker::names) {
            if let Ok(mut g) = self.lock.lock() {
                g.links.look_at_all();
            }
        }
    }
    /// False: a thread that sleeps in it does not hear of the monitor, and has to look again soon.
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
    /// Memory for the poll list. An item that has no place there would never be reported.
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
        // SAFETY: below MAX_ACTIVE, inside the mapping.
        unsafe { *self.active.add(self.n) = i };
        self.n += 1;
        true
    }
    pub(super) fn at(&self, k: usize) -> u32 {
        debug_assert!(k < self.n);
        // SAFETY: callers stay below n.
        unsafe { *self.active.add(k) }
    }
    /// Those from the k-th on.
    pub(super) fn tail(&mut self, k: usize) -> &mut [u32] {
        if self.active.is_null() {
            return &mut [];
        }
        // SAFETY: the first n are written; the lock is held.
        unsafe { core::slice::from_raw_parts_mut(self.active.add(k.min(self.n)), self.n.saturating_sub(k)) }
    }
    pub(super) fn set(&mut self, k: usize, i: u32) {
        // SAFETY: callers stay below n.
        unsafe { *self.active.add(k) = i };
    }
}

/// Has this process made no epoll instance?
pub fn is_unused() -> bool {
    EPS.is_empty()
}

// SAFETY: zero is valid; `link` is the slab's.
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
    /// The waker lies in the application's instance (still).
    pub(super) inside: AtomicBool,
    /// Threads in the kernel's wait on the application's instance.
    pub(super) direct: AtomicU32,
    /// A bit per waker of another instance that is heard here.
    pub(super) heard: [AtomicU64; waker::MAX.div_ceil(64)],
}
