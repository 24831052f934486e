//! One watched descriptor in one epoll instance. The lock of the instance guards the item's place in its list.

use super::instance::{Ep, Inner};
use crate::listen;
use crate::lock::Lock;
use crate::ready;
use crate::slab::{Slab, Slot};
use crate::table::{self, Desc, Kind};
use core::sync::atomic::{fence, AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use fsocket_abi::channel::{record, status};
use fsocket_abi::path_switch::{Event, Next};
use fsocket_ring as ring;
use fsocket_sync::doorbell::Want;
use fsocket_sys::{cpu, Errno, Result};

mod arm;
mod edges;

pub static ITEMS: Slab<Item, { 1 << 19 }> = Slab::new();
/// Guards the per-descriptor lists against concurrent change.
static LISTS: Lock<()> = Lock::new(());

/// The state up to which edges were reported. Zero is valid.
struct Reported {
    /// Position in the ring. In `passed` of a listener: number of arrived connections.
    scan: AtomicU64,
    /// Peer's status; for a listener: arrivals; for an instance: pulses.
    seen: AtomicU64,
    /// `tx_blocked` of the socket when EPOLLOUT was last an edge.
    blocked: AtomicU32,
    /// Nothing was reported since the item was added or modified, so readiness itself is an edge.
    fresh: AtomicBool,
}

impl Reported {
    /// Has a count that never falls changed since the last report? None: it is unknown now.
    fn has_grown(&self, count: Option<u64>) -> bool {
        count != Some(self.seen.load(Ordering::Relaxed))
    }
}

/// Zero is valid.
#[repr(C)]
pub struct Item {
    pub ep: AtomicU32,
    pub fd: AtomicI32,
    pub desc: AtomicU32,
    pub events: AtomicU32,
    pub data: AtomicU64,
    reported: Reported,
    /// Events that were passed on to outer instances.
    passed: Reported,
    next: AtomicU32,
    link: AtomicU32,
    pub live: AtomicBool,
    pub active: AtomicBool,
    armed: AtomicBool,
    /// A one-shot item that has fired.
    disabled: AtomicBool,
    /// The item is also registered in the kernel's instance.
    pub kernel: AtomicBool,
    /// Only the kernel reports it: a kernel connection that may move, or a listener without a
    /// channel.
    watched_only: AtomicBool,
    pub recheck: AtomicBool,
    /// The current pass has looked at the item, and it is not ready.
    pub idle: AtomicBool,
    /// The kernel would have the item in its list of ready files: it was ready when it was added,
    /// has become ready since the last look, or is level-triggered and was reported then.
    pub linked: AtomicBool,
    /// The item enters that list now. `notified_at`: the time since which it belongs there, ticks.
    pub marked: AtomicBool,
    pub notified_at: AtomicU64,
    /// Time of the last look (or `epoll_ctl`) after which it was not in the list; ticks.
    looked_at: AtomicU64,
}

// SAFETY: zero is valid for atomics; only the slab uses `link`.
unsafe impl Slot for Item {
    fn link(&self) -> &AtomicU32 {
        &self.link
    }
}

const ET: u32 = libc::EPOLLET as u32;
const ONESHOT: u32 = libc::EPOLLONESHOT as u32;
/// Together with IN and RDNORM: the events for which arriving data counts as an edge.
const DATA: u32 = (libc::EPOLLPRI | libc::EPOLLRDBAND) as u32;
const EXCLUSIVE: u32 = libc::EPOLLEXCLUSIVE as u32;

pub fn first(d: &Desc) -> Option<&'static Item> {
    ITEMS.get(d.first_item().wrapping_sub(1))
}

/// The items of an instance that watch a listener for which `such` is true.
pub fn of_listeners(ep: &Ep, such: impl Fn(&listen::Listener) -> bool) -> impl Iterator<Item = &'static Item> {
    let ep = ep.index();
    let those = listen::used().filter(move |l| such(l)).filter_map(listen::Listener::desc);
    those.flat_map(move |d| core::iter::successors(first(d), |i| i.next()).take(4096).filter(move |i| i.is(d, ep)))
}

/// The item for this description, instance and descriptor.
pub fn find(d: &Desc, ep: u32, fd: i32) -> Option<&'static Item> {
    let mut it = first(d);
    for _ in 0..4096 {
        let i = it?;
        if i.is(d, ep) && i.fd.load(Ordering::Relaxed) == fd {
            return Some(i);
        }
        it = i.next();
    }
    None
}

pub fn add(ep: &Ep, g: &mut Inner, d: &Desc, fd: i32, ev: &libc::epoll_event, kernel: bool) -> Result<()> {
    g.reserve()?;
    let (i, it) = ITEMS.alloc().ok_or(Errno::ENOMEM)?;
    it.ep.store(ep.index(), Ordering::Relaxed);
    it.fd.store(fd, Ordering::Relaxed);
    it.desc.store(d.index(), Ordering::Relaxed);
    it.kernel.store(kernel, Ordering::Relaxed);
    it.active.store(false, Ordering::Relaxed);
    it.armed.store(false, Ordering::Relaxed);
    it.recheck.store(false, Ordering::Relaxed);
    it.marked.store(false, Ordering::Relaxed);
    it.set(ev);
    it.live.store(true, Ordering::Release);
    it.linked.store(false, Ordering::Relaxed);
    it.enlist();
    {
        let _l = LISTS.lock().map_err(|_| Errno::EAGAIN)?;
        it.next.store(d.first_item(), Ordering::Relaxed);
        d.set_first_item(i + 1);
    }
    if kernel {
        // The item enters the list before the look at the descriptor. `became_conn` and
        // `listener_changed` do the reverse, so one of the two sees the other's change.
        fence(Ordering::SeqCst);
    }
    // Once there is a channel, this waker wakes a thread that sleeps in the kernel.
    let no_channel = || listen::of(d).is_some_and(|l| !l.has_channels()) && ep.need_waker().is_some();
    let watched_only = kernel && (d.kind() == Kind::Kernel || d.kind() == Kind::Listener && no_channel());
    it.watched_only.store(watched_only, Ordering::Relaxed);
    ep.items.fetch_add(1, Ordering::SeqCst);
    if !watched_only {
        // SeqCst: pairs with a thread that is about to sleep, see `wait`.
        ep.looked_at.fetch_add(1, Ordering::SeqCst);
    }
    if kernel {
        ep.kernel.store(true, Ordering::Relaxed);
    }
    // (A bound socket becomes a listener later.)
    g.may_listen |= kernel;
    g.activate(it);
    match ep.items.load(Ordering::Relaxed) {
        1 => {}
        // Now the first item is not alone any more, so it gets a hint, too.
        2 => (0..g.n).for_each(|k| _ = ITEMS.get(g.at(k)).map(|it| it.hint(ep, g))),
        _ => it.hint(ep, g),
    }
    Ok(())
}

/// Removes an item from its descriptor's list.
pub fn unlink(d: &Desc, it: &Item) {
    let Ok(_l) = LISTS.lock() else { return };
    let me = it.index() + 1;
    if d.first_item() == me {
        d.set_first_item(it.next.load(Ordering::Relaxed));
        return;
    }
    let mut at = first(d);
    while let Some(i) = at {
        if i.next.load(Ordering::Relaxed) == me {
            i.next.store(it.next.load(Ordering::Relaxed), Ordering::Release);
            return;
        }
        at = i.next();
    }
}

/// Removes the first item from a descriptor's list.
pub fn pop(d: &Desc) -> Option<&'static Item> {
    let _l = LISTS.lock().ok()?;
    let it = first(d)?;
    d.set_first_item(it.next.load(Ordering::Relaxed));
    Some(it)
}

/// Ends an item. Only the list of active items may still refer to it.
pub fn kill(ep: &Ep, g: &mut Inner, it: &Item) {
    it.live.store(false, Ordering::Release);
    ep.items.fetch_sub(1, Ordering::Relaxed);
    if !it.watched_only.load(Ordering::Relaxed) {
        ep.looked_at.fetch_sub(1, Ordering::Relaxed);
    }
    if it.active.load(Ordering::Relaxed) {
        g.has_dead();
    } else {
        ITEMS.free(it.index());
    }
}

/// Removes a dead item from the list of active items.
pub fn reclaim(i: u32) {
    if let Some(it) = ITEMS.get(i) {
        it.active.store(false, Ordering::Relaxed);
        if !it.live.load(Ordering::Relaxed) {
            ITEMS.free(i);
        }
    }
}

pub fn reset_lock_after_fork() {
    LISTS.reset_after_fork();
}

impl Item {
    pub fn index(&self) -> u32 {
        ITEMS.index(self)
    }
    pub fn next(&self) -> Option<&'static Item> {
        ITEMS.get(self.next.load(Ordering::Acquire).wrapping_sub(1))
    }
    /// Is this still the same item? (Lists are walked without their lock.)
    pub fn is(&self, d: &Desc, ep: u32) -> bool {
        self.live.load(Ordering::Acquire)
            && self.ep.load(Ordering::Relaxed) == ep
            && self.desc.load(Ordering::Relaxed) == d.index()
    }

    /// From now on the library looks at the item; the kernel alone does not report it any more.
    pub(super) fn is_ours_now(&self, ep: &Ep) {
        if self.watched_only.swap(false, Ordering::Relaxed) {
            ep.looked_at.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Stores the arguments of `epoll_ctl`.
    pub fn set(&self, ev: &libc::epoll_event) {
        let (events, data) = (ev.events, ev.u64);
        self.events.store(events, Ordering::Relaxed);
        self.data.store(data, Ordering::Relaxed);
        self.disabled.store(false, Ordering::Relaxed);
        self.looked_at.store(cpu::ticks(), Ordering::Relaxed);
        for t in [&self.reported, &self.passed] {
            t.fresh.store(true, Ordering::Relaxed);
            t.scan.store(0, Ordering::Relaxed);
        }
        if let Some(arrivals) = self.listener().and_then(listen::Listener::arrivals) {
            self.passed.scan.store(arrivals, Ordering::Relaxed);
        }
        if let Some(d) = self.desc().filter(|d| self.shut_both(d)) {
            self.reported.fresh.store(ready::events(d, self.wanted()) != 0, Ordering::Relaxed);
        }
    }

    /// The kernel's event mask for the same registration. A fired one-shot has no events.
    pub fn event(&self) -> libc::epoll_event {
        let events = self.events.load(Ordering::Relaxed);
        let events = if self.disabled.load(Ordering::Relaxed) { events & (ET | ONESHOT) } else { events };
        libc::epoll_event { events, u64: self.data.load(Ordering::Relaxed) }
    }

    /// The description of the item, if its connection has changed its path and must be followed.
    pub fn pending(&self) -> Option<&'static Desc> {
        self.desc().filter(|d| self.live.load(Ordering::Relaxed) && d.path_state().next(Event::Look) == Next::Follow)
    }

    /// Adds a ready item to the kernel's list of ready files, in effect. True: it was not in
    /// there.
    pub fn enlist(&self) -> bool {
        self.ready() && !self.linked.swap(true, Ordering::Relaxed)
    }

    /// Notes the result of `take`.
    pub fn was_looked_at(&self, ev: u32, now: u64) {
        self.idle.store(ev == 0, Ordering::Relaxed);
        let level = self.events.load(Ordering::Relaxed) & (ET | ONESHOT) == 0;
        let linked = ev != 0 && level;
        self.linked.store(linked, Ordering::Relaxed);
        if !linked {
            self.looked_at.store(now, Ordering::Relaxed);
        }
    }

    pub fn is_exclusive(&self) -> bool {
        self.events.load(Ordering::Relaxed) & EXCLUSIVE != 0
    }

    fn wanted(&self) -> u32 {
        self.events.load(Ordering::Relaxed) & !(ET | ONESHOT | EXCLUSIVE)
    }

    fn desc(&self) -> Option<&'static Desc> {
        table::DESCS.get(self.desc.load(Ordering::Relaxed))
    }

    pub fn listener(&self) -> Option<&'static listen::Listener> {
        self.desc().filter(|_| self.live.load(Ordering::Relaxed)).and_then(listen::of)
    }

    pub fn was_marked(&self) {
        self.armed.store(false, Ordering::Relaxed);
    }

    /// A peer has marked the connection or listener of this item: notes the time of the mark.
    pub fn note_when(&self, d: &Desc) {
        let at = |w: &Want| w.notified_at.load(Ordering::Relaxed);
        self.note_at(at(&d.rx().1.want_data).max(at(&d.tx().1.want_space)));
    }

    /// The item is ready although no peer was asked to mark it: notes since when. False: unknown.
    /// For data, the sender stores the time when it turned to this connection from another one
    /// (crate `streams`). Without a time, the sender was there already at the last look.
    pub fn note_unasked(&self, now: u64) -> bool {
        if !self.live.load(Ordering::Relaxed) || self.disabled.load(Ordering::Relaxed) {
            return false;
        }
        let Some(d) = self.desc().filter(|d| d.is_conn()) else { return false };
        let (r, rx, h) = d.rx();
        let edge = self.events.load(Ordering::Relaxed) & ET != 0;
        let scan = if edge { self.reported.scan.load(Ordering::Relaxed) } else { 0 };
        let at = match ring::turned(r, rx, h, scan) {
            Some(0) => 0,
            Some(stamp) => record::time(stamp, now),
            None if rx.prod.status.load(Ordering::Relaxed) & (status::FIN | status::RST) == 0 => return false,
            None => rx.want_data.notified_at.load(Ordering::Relaxed),
        };
        self.note_at(at.max(self.looked_at.load(Ordering::Relaxed)));
        true
    }

    /// Notes since when the item is ready. Later events do not change its place in the list.
    pub fn note_at(&self, at: u64) {
        if !self.linked.load(Ordering::Relaxed) {
            self.notified_at.store(at, Ordering::Relaxed);
            self.marked.store(true, Ordering::Relaxed);
        }
    }

    /// Would `take` report something? Changes nothing.
    #[inline]
    pub fn ready(&self) -> bool {
        if !self.live.load(Ordering::Relaxed) || self.disabled.load(Ordering::Relaxed) {
            return false;
        }
        let Some(d) = self.desc() else { return false };
        if self.shut_both(d) && !self.reported.fresh.load(Ordering::Relaxed) {
            return false;
        }
        let events = self.events.load(Ordering::Relaxed);
        if events & ET == 0 || self.reported.fresh.load(Ordering::Relaxed) || self.pending().is_some() {
            return ready::events(d, self.wanted()) != 0;
        }
        self.edge(d, &self.reported, false) && self.events_at_edge(d) != 0
    }

    /// Is the readiness of the item known to the kernel only, so far?
    pub fn passive(&self) -> bool {
        self.desc().is_none_or(|d| !matches!(d.kind(), Kind::Shm | Kind::Listener | Kind::Epoll))
    }

    /// Is the item an epoll instance inside this one? Such an item is looked at on every call,
    /// because waits in the inner instance disarm its items.
    pub fn nested(&self) -> bool {
        self.desc().is_some_and(|d| d.kind() == Kind::Epoll)
    }

    /// The CPU of the peer, to decide about spinning. None: the item is no connection.
    pub fn peer_cpu(&self) -> Option<u32> {
        self.desc().filter(|d| d.is_conn()).map(ready::peer_cpu)
    }

    pub fn is_armed(&self) -> bool {
        self.armed.load(Ordering::Relaxed) && !self.fresh_listener()
    }
    fn fresh_listener(&self) -> bool {
        self.recheck.load(Ordering::Relaxed)
    }
}
