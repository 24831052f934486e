//! The active items of an instance: items that may have something to report. A mark of a peer
//! makes an item active. An armed item that is not ready becomes inactive.

use super::instance::{Ep, Inner};
use super::item::{self, Item, ITEMS};
use super::out::Out;
use crate::waker::{self, Waker};
use crate::{chan, ctl, unjoined};
use core::sync::atomic::{fence, AtomicBool, Ordering};
use fsocket_abi::channel::SUMMARY_SYN;
use fsocket_sys::Errno;

/// Does the kernel's instance report everything? And if the instance has listeners: will a thread
/// that sleeps there be notified of a listener's first channel?
pub(super) fn is_plain(ep: &Ep) -> bool {
    let is_told = || ep.ctl_added.load(Ordering::Relaxed) && ctl::is_watched() && !unjoined::any();
    ep.is_plain() && (is_told() || item::of_listeners(ep, |_| true).next().is_none())
}

/// Activates the items that peers have marked. `now`: ticks.
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
        // Acquire: makes the marks visible, and everything that was published before them.
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

/// Counts the active items that have become ready without a mark.
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
    /// Is any active item ready?
    pub fn any_ready(&self) -> bool {
        (0..self.n).any(|k| ITEMS.get(self.at(k)).is_some_and(|it| it.ready()))
    }
    /// One more of the active items is dead. A look removes it, but a wait in the kernel alone looks at none: a server
    /// of kernel connections would keep each item that it ever had.
    pub(super) fn has_dead(&mut self) {
        const FEW: usize = 16;
        self.dead += 1;
        if self.dead <= FEW.max(self.n / 2) {
            return;
        }
        let mut keep = 0;
        for k in 0..self.n {
            let i = self.at(k);
            if ITEMS.get(i).is_some_and(|it| it.live.load(Ordering::Relaxed)) {
                self.set(keep, i);
                keep += 1;
            } else {
                item::reclaim(i);
            }
        }
        (self.n, self.dead) = (keep, 0);
    }
    /// Puts an active item behind all others.
    pub(super) fn put_last(&mut self, it: &Item) {
        if let Some(k) = (0..self.n).find(|&k| self.at(k) == it.index()) {
            self.tail(k).rotate_left(1);
        }
    }
    /// From now on the library looks at the item on every call, until the item is armed again.
    /// (It may now wait for other events.)
    pub(super) fn activate(&mut self, it: &Item) {
        it.was_marked();
        if !it.active.swap(true, Ordering::Relaxed) && !self.push(it.index()) {
            it.active.store(false, Ordering::Relaxed);
        }
    }
}

impl Inner {
    /// Sorts the active items as the kernel would: first the items that are in its list of ready
    /// files, then new ones in the order in which they became ready. Items without a mark come
    /// last.
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

    /// The earliest time at which a peer marked one of the items after `since`; 0: none did.
    /// Ticks.
    pub(super) fn notified_since(&self, since: u64) -> u64 {
        let notified = self.items().map(|it| it.notified_at.load(Ordering::Relaxed));
        notified.filter(|at| *at >= since).min().unwrap_or(0)
    }

    fn items(&self) -> impl Iterator<Item = &'static Item> + '_ {
        (0..self.n).filter_map(|k| ITEMS.get(self.at(k)))
    }

    /// Is the list in order? Items without a mark may be anywhere: they are not ready, or the
    /// time is unknown.
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
    // Acquire: pairs with the release of the thread that stored the item's `recheck`.
    if ep.recheck.load(Ordering::Relaxed) && ep.recheck.swap(false, Ordering::Acquire) {
        let asked = |it: &&Item| it.recheck.load(Ordering::Relaxed);
        item::of_listeners(ep, |l| l.id.load(Ordering::Relaxed) != 0).filter(asked).for_each(|it| g.activate(it));
    }
}

/// Reports ready active items. Armed items that are not ready leave the poll list.
///
/// A reported item moves behind all others. So every item has its turn even if more items are
/// ready than the array holds. `now`: time before the first look, ticks.
pub(super) fn report(ep: &Ep, g: &mut Inner, out: &mut Out, now: u64) {
    let n = g.n;
    if n == 0 {
        return;
    }
    // (An outer instance may watch this one. It was notified when an event came, but has not
    // looked yet.)
    let watched = ep.wrapper.watched.load(Ordering::Relaxed);
    for k in 0..n {
        if out.full() {
            break;
        }
        let i = g.at(k);
        let Some(it) = ITEMS.get(i) else { continue };
        if watched {
            ep.pulses.fetch_add(it.pulse() as u32, Ordering::Relaxed);
        }
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
            it.silence_kernel(ep);
            // An item that is alone keeps its place.
            if n > 1 && g.push(i) {
                g.set(k, NOBODY);
            }
        }
    }
    compact(g);
}

/// Marks an unused place of the list: no item has this index.
const NOBODY: u32 = u32::MAX;

/// Removes dead items from the list of active items, and idle ones that are armed or known to the
/// kernel only.
fn compact(g: &mut Inner) {
    let mut keep = 0;
    for k in 0..g.n {
        let i = g.at(k);
        let Some(it) = ITEMS.get(i) else { continue };
        // (An item that this pass did not look at may be ready although it is armed.)
        let cold = it.idle.swap(false, Ordering::Relaxed) && (it.is_armed() || it.passive());
        if cold || !it.live.load(Ordering::Relaxed) {
            item::reclaim(i);
        } else {
            g.set(keep, i);
            keep += 1;
        }
    }
    (g.n, g.dead) = (keep, 0);
}

/// Arms every active item, and fences. After that the next look sees an event, or the event's
/// peer marks the item. The items stay in the list until the next look.
///
/// `root`: the instance that will sleep. Wake-ups for this instance and its inner ones go there.
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

/// Called when the calling thread returns with events while other threads sleep in this instance.
/// Items that stay active must be able to wake those threads.
pub(super) fn share(ep: &Ep, g: &mut Inner) {
    if g.sleepers == 0 {
        return;
    }
    arm_all(ep, g, ep);
    if let Some(b) = ep.waker() {
        set_sleeping(g, true);
        // This includes items that were marked since the look, because this thread may have taken
        // the wake-up.
        if marked(ep, g) || (0..g.n).any(|k| ITEMS.get(g.at(k)).is_some_and(|it| it.ready())) {
            b.ring_self();
        }
    }
}

/// Follows the connections of this instance that have changed their path. This changes the items,
/// so the caller must not hold the lock.
pub(super) fn settle(ep: &Ep) {
    for _ in 0..ITEMS.len() {
        let found = {
            let Ok(g) = ep.lock.lock() else { return };
            (0..g.n).find_map(|k| ITEMS.get(g.at(k)).and_then(|it| it.pending()))
        };
        let Some(d) = found else { return };
        if crate::path::follow(d) == Err(Errno::EAGAIN) {
            return; // this is a signal handler, which has interrupted an operation on the connection
        }
    }
}

/// Has a peer marked anything? (A peer in a parked channel has rung, and the ring was heard.)
pub(super) fn marked(ep: &Ep, g: &Inner) -> bool {
    ep.waker().is_some_and(Waker::has_rung) || g.links.waiters().any(|w| w.summary.load(Ordering::Relaxed) != 0)
}

/// Tells all peers whether a thread sleeps here.
pub(super) fn set_sleeping(g: &Inner, on: bool) {
    for w in g.links.waiters() {
        w.sleeping.store(on as u32, Ordering::Relaxed);
    }
    if on {
        // The store comes before the look for marks. A peer marks first, and then reads the flag.
        fence(Ordering::SeqCst);
    }
}
