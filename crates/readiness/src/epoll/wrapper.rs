//! The wrapper of an instance that another instance or a `poll` watches.
//!
//! Such an instance must be readable exactly if one of the application's entries is ready. The
//! library's waker and control socket would make it readable, too. So both are in a *wrapper*: a
//! private instance that contains them and, level-triggered, the application's instance. Threads
//! that wait in the inner instance sleep in its wrapper. The wrapper of an outer instance also
//! contains the wakers of its inner instances.

use super::instance::{of, Ep, Wrapper, CTL_MARK, EPS, WAKER_MARK};
use crate::table::Desc;
use crate::waker::{self, Waker};
use crate::{ctl, process, stats};
use core::sync::atomic::{fence, Ordering};
use fsocket_abi::arena::Reason;
use fsocket_sys as sys;

/// Event data in a wrapper: the application's instance has events.
pub(super) const INNER_MARK: u64 = 0xF50C_4E7B_E11A_0004;

/// How long threads have to leave the application's instance for its wrapper: number of pauses,
/// and length of each.
const LEAVING_TURNS: u32 = 200;
const LEAVING_NS: u64 = 20_000;

impl Wrapper {
    pub(super) fn fd(&self) -> Option<i32> {
        match self.fd.load(Ordering::SeqCst) {
            0 => None,
            s => Some(s - 1),
        }
    }
    pub(super) fn reset(&self) {
        self.fd.store(0, Ordering::Relaxed);
        self.watched.store(false, Ordering::Relaxed);
        self.inside.store(false, Ordering::Relaxed);
        self.direct.store(0, Ordering::Relaxed);
        self.heard.iter().for_each(|w| w.store(0, Ordering::Relaxed));
    }
    pub(super) fn close(&self) {
        if let s @ 1.. = self.fd.swap(0, Ordering::SeqCst) {
            process::close_own(s - 1);
        }
    }
    /// In a forked child: the wrapper's contents belong to the parent, so the child makes its
    /// own.
    pub(super) fn become_child(&self) {
        self.close();
        let watched = self.watched.load(Ordering::Relaxed);
        self.reset();
        self.watched.store(watched, Ordering::Relaxed);
    }
    fn hears(&self) -> impl Iterator<Item = &'static Waker> + '_ {
        (0..waker::MAX)
            .filter(|i| self.heard[i / 64].load(Ordering::Relaxed) >> (i % 64) & 1 != 0)
            .filter_map(waker::at)
    }
}

fn put(home: i32, b: &Waker, events: i32) {
    let ev = libc::epoll_event { events: events as u32, u64: WAKER_MARK };
    let _ = sys::epoll_ctl(home, libc::EPOLL_CTL_ADD, b.fd(), Some(&ev));
}

fn take_out(home: i32, b: &Waker) {
    let _ = sys::epoll_ctl(home, libc::EPOLL_CTL_DEL, b.fd(), None);
}

impl Ep {
    /// The instance that contains the library's entries: this one or its wrapper.
    pub(super) fn home(&self) -> i32 {
        if self.wrapper.watched.load(Ordering::SeqCst) {
            if let Some(s) = self.wrapper.fd().or_else(|| self.make_wrapper()) {
                return s;
            }
        }
        self.fd.load(Ordering::Relaxed)
    }

    /// From now on another instance or a `poll` watches this one.
    pub(super) fn is_watched(&self) {
        if self.wrapper.watched.swap(true, Ordering::SeqCst) {
            return;
        }
        if self.waker().is_some() || self.ctl_added.load(Ordering::Relaxed) {
            // Moves entries to the wrapper that were added to the instance before.
            self.home();
        }
    }

    #[cold]
    fn make_wrapper(&self) -> Option<i32> {
        let new = crate::making::making(|| sys::epoll_create1(libc::EPOLL_CLOEXEC).map(process::high_fd));
        let Ok(new) = new else {
            stats::fall_back(Reason::Resource);
            return None;
        };
        let app = self.fd.load(Ordering::Relaxed);
        let ev = libc::epoll_event { events: libc::EPOLLIN as u32, u64: INNER_MARK };
        let put_in = sys::epoll_ctl(new, libc::EPOLL_CTL_ADD, app, Some(&ev)).is_ok();
        if !put_in || self.wrapper.fd.compare_exchange(0, new + 1, Ordering::SeqCst, Ordering::SeqCst).is_err() {
            process::close_own(new);
            return self.wrapper.fd();
        }
        if self.ctl_added.load(Ordering::SeqCst) {
            let ev = libc::epoll_event { events: libc::EPOLLIN as u32, u64: CTL_MARK };
            let _ = sys::epoll_ctl(new, libc::EPOLL_CTL_ADD, ctl::fd(), Some(&ev));
            let _ = sys::epoll_ctl(app, libc::EPOLL_CTL_DEL, ctl::fd(), None);
        }
        for b in self.wrapper.hears() {
            put(new, b, libc::EPOLLIN | libc::EPOLLET);
            take_out(app, b);
        }
        if let Some(b) = self.waker() {
            put(new, b, libc::EPOLLIN);
            self.wrapper.inside.store(true, Ordering::SeqCst);
            self.move_sleepers(b);
        } else if self.wrapper.direct.load(Ordering::SeqCst) > 0 {
            self.need_waker();
        }
        Some(new)
    }

    /// Threads that sleep in the instance leave it for its wrapper, which contains the waker `b`. The
    /// last one removes the waker from the instance. Until then the waker makes the instance
    /// readable.
    pub(super) fn move_sleepers(&self, b: &Waker) {
        let sleep_there = || self.wrapper.direct.load(Ordering::SeqCst) > 0;
        if sleep_there() && !self.wrapper.inside.swap(true, Ordering::SeqCst) {
            put(self.fd.load(Ordering::Relaxed), b, libc::EPOLLIN);
        }
        let mut turns = 0;
        while sleep_there() && turns < LEAVING_TURNS {
            b.ring_self();
            sys::nanosleep(LEAVING_NS);
            turns += 1;
        }
        if !sleep_there() && self.wrapper.inside.load(Ordering::SeqCst) {
            self.take_waker_out();
            b.clear();
        }
    }

    fn take_waker_out(&self) {
        if self.wrapper.inside.swap(false, Ordering::SeqCst) {
            if let Some(b) = self.waker() {
                take_out(self.fd.load(Ordering::Relaxed), b);
            }
        }
    }

    /// Called before a sleep in the kernel: returns the wrapper to sleep in. None: the thread
    /// sleeps in the instance itself, and calls [`Ep::woken_inside`] afterwards.
    pub(super) fn sleeps_in(&self) -> Option<i32> {
        // The count comes before the look; `make_wrapper` adds the wrapper and then reads the
        // count.
        self.wrapper.direct.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let s = self.wrapper.fd()?;
        self.woken_inside();
        Some(s)
    }
    pub(super) fn woken_inside(&self) {
        let last = self.wrapper.direct.fetch_sub(1, Ordering::SeqCst) == 1;
        if last && self.wrapper.inside.load(Ordering::Relaxed) && self.wrapper.fd().is_some() {
            self.take_waker_out();
        }
    }

    /// Adds the waker of an inner instance, so that its ring ends sleeps in this one.
    pub(super) fn hear(&self, b: &Waker) {
        let (word, bit) = (&self.wrapper.heard[b.index() / 64], 1u64 << (b.index() % 64));
        if self.waker().is_some_and(|own| core::ptr::eq(own, b)) || word.fetch_or(bit, Ordering::Relaxed) & bit != 0 {
            return;
        }
        // Edge-triggered, because only the threads of the inner instance clear the waker.
        put(self.home(), b, libc::EPOLLIN | libc::EPOLLET);
    }
    pub(super) fn unhear(&self, b: &Waker) {
        let (word, bit) = (&self.wrapper.heard[b.index() / 64], 1u64 << (b.index() % 64));
        if word.load(Ordering::Relaxed) & bit != 0 && word.fetch_and(!bit, Ordering::Relaxed) & bit != 0 {
            take_out(self.home(), b);
        }
    }
    /// Clears the edges of the wakers in this wrapper.
    pub(super) fn drain_wrapper(&self) {
        let Some(s) = self.wrapper.fd() else { return };
        let mut few = [libc::epoll_event { events: 0, u64: 0 }; 16];
        // SAFETY: the local array has 16 entries.
        let _ = unsafe { sys::epoll_wait(s, few.as_mut_ptr(), few.len() as i32, Some(0), core::ptr::null()) };
    }
}

/// `poll` is about to look at an instance.
pub fn is_polled(d: &Desc) {
    if let Some(ep) = of(d) {
        ep.is_watched();
    }
}

/// The wrapper in which a `poll` of this instance sleeps.
pub fn wrapper_of(d: &Desc) -> Option<i32> {
    of(d)?.wrapper.fd()
}

/// A wrapper got another descriptor.
pub fn renumbered(old: i32, new: i32) -> bool {
    let swap = |ep: &Ep| ep.wrapper.fd.compare_exchange(old + 1, new + 1, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    (0..EPS.len()).filter_map(|i| EPS.get(i)).any(swap)
}
