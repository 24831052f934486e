//! An instance that another instance or a `poll` watches: when it is readable, and when its
//! watcher must wake up.

use super::instance::{of, Ep};
use super::item::ITEMS;
use super::poll_list::{arm_all, collect, set_sleeping, settle};
use crate::table::Desc;
use core::sync::atomic::Ordering;
use fsocket_sys::{self as sys, cpu};

/// Is this instance readable, as `poll` sees it? This covers connections over shared memory and
/// SYN queues; the kernel answers for its own descriptors.
pub fn readable(d: &Desc) -> bool {
    let Some(ep) = of(d).filter(|ep| ep.items.load(Ordering::Relaxed) > 0) else { return false };
    ep.join_inherited();
    let Ok(mut g) = ep.lock.lock() else { return true };
    // A mark says that something has happened, but the item may wait for another event.
    collect(ep, &mut g, cpu::ticks());
    if (0..g.n).any(|k| ITEMS.get(g.at(k)).is_some_and(|it| it.pending().is_some())) {
        // The kernel's instance reports connections that have moved to the kernel.
        drop(g);
        settle(ep);
        let Ok(again) = ep.lock.lock() else { return true };
        g = again;
    }
    g.any_ready()
}

/// Called before a `poll` that includes the instance sleeps in its wrapper: arms the items, so
/// that they ring the waker. The caller then asks [`readable`] again.
pub fn before_outer_sleep(d: &Desc) {
    let Some(ep) = of(d) else { return };
    if let Ok(mut g) = ep.lock.lock() {
        arm_all(ep, &mut g, ep);
        g.sleepers += 1;
        set_sleeping(&g, true);
    };
}

pub fn after_outer_sleep(d: &Desc) {
    let Some(ep) = of(d) else { return };
    if let Ok(mut g) = ep.lock.lock() {
        g.sleepers = g.sleepers.saturating_sub(1);
        set_sleeping(&g, g.sleepers > 0);
        if let Some(b) = ep.waker() {
            // The waker is cleared only if no thread sleeps, because a sleeping thread needs the
            // edge.
            if g.sleepers == 0 {
                b.clear();
            }
        }
    };
    ep.drain_wrapper();
}

impl Ep {
    /// Is a descriptor of the kernel's instance ready? (The library's own descriptors are in the
    /// wrapper.)
    pub(super) fn is_readable_in_kernel(&self) -> bool {
        let mut p = libc::pollfd { fd: self.fd.load(Ordering::Relaxed), events: libc::POLLIN, revents: 0 };
        // SAFETY: one pollfd.
        let n = unsafe { sys::ppoll(&mut p, 1, Some(0), core::ptr::null()) };
        n == Ok(1)
    }

    /// Number of events that this instance has had. An outer instance compares it with its last
    /// value to find edges.
    pub(super) fn pulses_so_far(&self) -> u32 {
        let ep = self;
        if let Ok(mut g) = ep.lock.lock() {
            collect(ep, &mut g, cpu::ticks());
            // Only active items are looked at. An inactive item is armed, and no event has come
            // for it.
            for it in (0..g.n).filter_map(|k| ITEMS.get(g.at(k))) {
                ep.pulses.fetch_add(it.pulse() as u32, Ordering::Relaxed);
            }
        }
        ep.pulses.load(Ordering::Relaxed)
    }

    /// An outer instance `root` that watches this one is about to sleep: arms the items of this
    /// one.
    pub(super) fn arm_inner(&self, root: &Ep) {
        let ep = self;
        ep.nested.store(true, Ordering::Relaxed);
        // The flag is set even if the instance has no items yet, so that an item added later
        // rings the waker.
        if let Some(b) = ep.need_waker() {
            root.hear(b);
        }
        if ep.items.load(Ordering::Relaxed) == 0 {
            return;
        }
        if let Ok(mut g) = ep.lock.lock() {
            arm_all(ep, &mut g, root);
            set_sleeping(&g, true);
        };
    }
}
