//! The active items of an instance: those that may have something to report. Marks of peers activate
//! an item; one that is armed and not ready cools down.

use super::instance::{Ep, Inner};
use super::item::{self, Item, ITEMS};
use super::out::Out;
use crate::waker::{self, Waker};
use crate::{chan, ctl, unjoined};
use core::sync::atomic::{fence, AtomicBool, Ordering};
use fsocket_abi::channel::SUMMARY_SYN;
use fsocket_sys::Errno;

/// Does the kernel's instance report everything, and is a thread that sleeps there told of a listener's first channel?
pub(super) fn is_plain(ep: &Ep) -> bool {
    let is_told = || ep.ctl_added.load(Ordering::Relaxed) && ctl::is_watched() && !unjoined::any();
    ep.is_plain() && (is_told() || item::of_listeners(ep, |_| true).next().is_none())
}

/// Turn the marks that peers have set into active items. `now`: ticks.
pub(super) fn collect(ep: &Ep, g: &mut Inner, now: u64) {
    let Some(b) = ep.waker() else {
        recheck_listeners(ep, g);
        return;
    };
    let mut marks = 0;
    let mut k = 0;
    let mut end = g.links.how_many(b, now, ep.hears_alone());
    while let Some(link) = g.links.at(k).filter(|_| k < end) {
        let Some(w) = link.waiter() else {
            g.links.remove(k);
            end -= 1;
            continue;
        };
        k += 1;
        if w.summary.load(Ordering::Relaxed) == 0 {
            continue;
        }
        g.links.has_marks(k - 1, b);
        let c = link.chan;
        // Acquire: the marks below, and what was published before them.
        let s = w.summary.swap(0, Ordering::Acquire);
        if s & SUMMARY_SYN != 0 {
            let id = c.listener.load(Ordering::Relaxed);
            for it in item::of_listeners(ep, |l| l.id.load(Ordering::Relaxed) == id) {
                it.note_at(c.queue(0).want.notified_at.load(Ordering::Relaxed));
                g.activate(it);
                marks += 1;
            }
        }
        for (k, r) in w.ready.iter().enumerate().filter(|(k, _)| s >> k & 1 != 0) {
            let mut slots = r.swap(0, Ordering::Acquire);
            while slots != 0 {
                let slot = k * 64 + slots.trailing_zeros() as usize;
                slots &= slots - 1;
                activate_slot(ep, g, (c, slot), &mut marks);
            }
        }
    }
    if g.n > 1 {
        marks += unasked(g, now);
    }
    g.order(marks);
    recheck_listeners(ep, g);
}

/// Of the active items that nobody marked, those that have become ready.
fn unasked(g: &mut Inner, now: u64) -> usize {
    let new = |it: &&Item| !it.linked.load(Ordering::Relaxed) && !it.marked.load(Ordering::Relaxed);
    g.items().filter(new).filter(|it| it.note_unasked(now)).count()
}

fn activate_slot(ep: &Ep, g: &mut Inner, (c, slot): (&chan::Chan, usize), marks: &mut usize) {
    let Some(d) = c.desc(slot) else { return c.marked_in_vain() };
    let mut it = item::first(d);
    let mut news = false;
    for _ in 0..64 {
        let Some(i) = it else { break };
        if i.is(d, ep.index()) {
            i.note_when(d);
            g.activate(i);
            *marks += 1;
            news |= i.ready();
        }
        it = i.next();
    }
    if !news {
        c.marked_in_vain();
    }
}

impl Inner {
    /// As in the kernel's list: those that are in it, then those that come into it, in the order in which
    /// they became ready; then those that are only looked at.
    fn order(&mut self, marks: usize) {
        if marks == 0 {
            return;
        }
        if !self.in_order() {
            self.sort();
        }
        for it in self.items().filter(|it| it.marked.load(Ordering::Relaxed)) {
            it.marked.store(false, Ordering::Relaxed);
            it.linked.store(true, Ordering::Relaxed);
        }
    }

    /// When a peer first told one of them after `since`; 0: none has. Ticks.
    pub(super) fn notified_since(&self, since: u64) -> u64 {
        let notified = self.items().map(|it| it.notified_at.load(Ordering::Relaxed));
        notified.filter(|at| *at >= since).min().unwrap_or(0)
    }

    fn items(&self) -> impl Iterator<Item = &'static Item> + '_ {
        (0..self.n).filter_map(|k| ITEMS.get(self.at(k)))
    }

    /// Those that are only looked at may lie anywhere: they are not ready, or nobody knows since when.
    fn in_order(&self) -> bool {
        let mut last = None;
        self.items().all(|it| {
            if it.marked.load(Ordering::Relaxed) {
                let before = last.replace(it.notified_at.load(Ordering::Relaxed));
                return before <= last;
            }
            last.is_none() || !it.linked.load(Ordering::Relaxed)
        })
    }

    fn sort(&mut self) {
        let is = |flag: fn(&Item) -> &AtomicBool, i| ITEMS.get(i).is_some_and(|it| flag(it).load(Ordering::Relaxed));
        let marked = |i| is(|it| &it.marked, i);
        let n = self.n;
        for last in [false, true] {
            for k in 0..n {
                let i = self.at(k);
                let moves = if last { !is(|it| &it.linked, i) } else { marked(i) };
                if moves && i != NOBODY && self.push(i) {
                    self.set(k, NOBODY);
                }
            }
        }
        compact(self);
        let from = (0..self.n).find(|&k| marked(self.at(k))).unwrap_or(self.n);
        let notified_at = |i: &u32| ITEMS.get(*i).map_or(0, |it| it.notified_at.load(Ordering::Relaxed));
        let tail = self.tail(from);
        let end = tail.iter().position(|&i| !marked(i)).unwrap_or(tail.len());
        tail[..end].sort_unstable_by_key(notified_at);
    }
}

fn recheck_listeners(ep: &Ep, g: &mut Inner) {
    // Acquire: pairs with the release of who asks for it, with the item's.
    if ep.recheck.load(Ordering::Relaxed) && ep.recheck.swap(false, Ordering::Acquire) {
        let asked = |it: &&Item| it.recheck.load(Ordering::Relaxed);
        item::of_listeners(ep, |l| l.id.load(Ordering::Relaxed) != 0).filter(asked).for_each(|it| g.activate(it));
    }
}

/// Report ready active items; those that are armed and not ready leave the poll list.
///
/// What is reported goes behind all others, so everybody has a turn when the array is smaller
/// than what is ready. `now`: ticks, before the first look.
pub(super) fn report(g: &mut Inner, out: &mut Out, now: u64) {
    let n = g.n;
    if n == 0 {
        return;
    }
    for k in 0..n {
        if out.full() {
            break;
        }
        let i = g.at(k);
        let Some(it) = ITEMS.get(i) else { continue };
        let ev = it.take();
        if ev == crate::ready::PENDING {
            g.pending = true;
            continue;
        }
        it.was_looked_at(ev, now);
        if ev != 0 {
            let data = it.data.load(Ordering::Relaxed);
            if !it.kernel.load(Ordering::Relaxed) || !out.has(data) {
                out.push(ev, data);
            }
            it.was_marked();
            // With others only: alone it is first and last.
            if n > 1 && g.push(i) {
                g.set(k, NOBODY);
            }
        }
    }
    compact(g);
}

/// No item has this index.
const NOBODY: u32 = u32::MAX;

/// Drop dead items from the poll list, and idle ones that are armed or the
/// kernel's alone.
fn compact(g: &mut Inner) {
    let mut keep = 0;
    for k in 0..g.n {
        let i = g.at(k);
        let Some(it) = ITEMS.get(i) else { continue };
        // An item that was not looked at may be ready although it is armed.
        let cold = it.idle.swap(false, Ordering::Relaxed) && (it.is_armed() || it.passive());
        if cold || !it.live.load(Ordering::Relaxed) {
            item::reclaim(i);
        } else {
            g.set(keep, i);
            keep += 1;
        }
    }
    g.n = keep;
}

/// Arm every active item, and fence: what comes from now on is seen by the next look, or marked. They
/// stay in the list until the next look.
///
/// `root`: the instance that will sleep; it hears this one's waker and those inside.
pub(super) fn arm_all(ep: &Ep, g: &mut Inner, root: &Ep) -> bool {
    let Some(b) = ep.need_waker() else { return g.n == 0 };
    let mut all = true;
    let mut batch = waker::arming();
    for k in 0..g.n {
        if let Some(it) = ITEMS.get(g.at(k)) {
            it.arm(b, g, root, &mut batch);
            all &= it.is_armed() || it.passive() || it.nested();
        }
    }
    batch.fence();
    all
}

/// Other threads sleep in this instance while we return with events: what we
/// leave in the poll list must be able to wake them.
pub(super) fn share(ep: &Ep, g: &mut Inner) {
    if g.sleepers == 0 {
        return;
    }
    arm_all(ep, g, ep);
    if let Some(b) = ep.waker() {
        set_sleeping(g, true);
        // Also what was marked since we looked: its ring may have been ours.
        if marked(ep, g) || (0..g.n).any(|k| ITEMS.get(g.at(k)).is_some_and(|it| it.ready())) {
            b.ring_self();
        }
    }
}

/// Follow the connections of this instance that have changed their path. It
/// changes the items, so the lock is not held.
pub(super) fn settle(ep: &Ep) {
    for _ in 0..ITEMS.len() {
        let found = {
            let Ok(g) = ep.lock.lock() else { return };
            (0..g.n).find_map(|k| ITEMS.get(g.at(k)).and_then(|it| it.pending()))
        };
        let Some(d) = found else { return };
        if crate::path::follow(d) == Err(Errno::EAGAIN) {
            return; // in a signal handler on top of an operation on it
        }
    }
}

/// Has a peer marked anything? (In a parked channel: it has rung, and that was heard.) Changes nothing.
pub(super) fn marked(ep: &Ep, g: &Inner) -> bool {
    ep.waker().is_some_and(Waker::has_rung) || g.links.waiters().any(|w| w.summary.load(Ordering::Relaxed) != 0)
}

/// Say to all peers whether somebody sleeps here.
pub(super) fn set_sleeping(g: &Inner, on: bool) {
    for w in g.links.waiters() {
        w.sleeping.store(on as u32, Ordering::Relaxed);
    }
    if on {
        // Before the look for marks; whoever marks does the reverse.
        fence(Ordering::SeqCst);
    }
}
