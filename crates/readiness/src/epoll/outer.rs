//! An instance that is watched itself: by another one, or by `poll`.

use super::instance::{of, Ep};
use super::item::ITEMS;
use super::poll_list::{arm_all, collect, set_sleeping, settle};
use crate::table::Desc;
use core::sync::atomic::Ordering;
use fsocket_sys::cpu;

/// Is an instance itself readable, as `poll` sees it? For connections of ours and SYN
/// queues; of the rest the kernel says it.
pub fn readable(d: &Desc) -> bool {
    let Some(ep) = of(d).filter(|ep| ep.items.load(Ordering::Relaxed) > 0) else { return false };
    ep.join_inherited();
    let Ok(mut g) = ep.lock.lock() else { return true };
    // A mark says that something happened, not that it was asked for.
    collect(ep, &mut g, cpu::ticks());
    if (0..g.n).any(|k| ITEMS.get(g.at(k)).is_some_and(|it| it.pending().is_some())) {
        // What has gone over to the kernel is the kernel's instance to report.
        drop(g);
        settle(ep);
        let Ok(again) = ep.lock.lock() else { return true };
        g = again;
    }
    g.any_ready()
}

/// Before a `poll` that includes the instance sleeps, in its wrapper: its waker must ring for our
/// items. The caller asks [`readable`] again.
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
            // Not if it is for a thread that sleeps in there.
            if g.sleepers == 0 {
                b.clear();
            }
        }
    };
    ep.drain_wrapper();
}

impl Ep {
    /// How often something came for an instance, as one that watches it by its
    /// edges is told.
    pub(super) fn pulses_so_far(&self) -> u32 {
        let ep = self;
        if let Ok(mut g) = ep.lock.lock() {
            collect(ep, &mut g, cpu::ticks());
            // What is not active is armed: nothing has come for it.
            for it in (0..g.n).filter_map(|k| ITEMS.get(g.at(k))) {
                ep.pulses.fetch_add(it.pulse() as u32, Ordering::Relaxed);
            }
        }
        ep.pulses.load(Ordering::Relaxed)
    }

    /// An instance that watches this one is about to sleep.
    pub(super) fn arm_inner(&self, root: &Ep) {
        let ep = self;
        ep.nested.store(true, Ordering::Relaxed);
        // Also if nothing of ours is in it yet: what is added then is told of.
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
