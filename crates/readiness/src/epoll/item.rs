//! One watched descriptor in one epoll instance.

use super::instance::{Ep, Inner};
use crate::listen;
use crate::lock::Lock;
use crate::ready::{self};
use crate::slab::{Slab, Slot};
use crate::stage;
use crate::table::{self, Desc, Kind};
use core::sync::atomic::{fence, AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use fsocket_abi::channel::{record, status};
use fsocket_ring as ring;
use fsocket_sync::doorbell::Want;
use fsocket_sys::{cpu, Errno, Result};

mod arm;
mod edges;

pub static ITEMS: Slab<Item, { 1 << 19 }> = Slab::new();
/// Guards the per-descriptor lists against concurrent change.
static LISTS: Lock<()> = Lock::new(());

/// Up to where edges were reported. Zero is valid.
struct Reported {
    /// Ring position.
    scan: AtomicU64,
    /// Status of the peer; of a listener its arrivals, of an instance its pulses.
    seen: AtomicU64,
    /// `tx_blocked` of the socket when EPOLLOUT was last an edge.
    blocked: AtomicU32,
    /// Not once since it was added or modified: readiness itself is an edge.
    fresh: AtomicBool,
}

impl Reported {
    /// Is a count that never falls another one than at the last report? None: that cannot be told just now.
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
    /// What was passed on to instances that watch this one.
    passed: Reported,
    next: AtomicU32,
    link: AtomicU32,
    pub live: AtomicBool,
    pub active: AtomicBool,
    armed: AtomicBool,
    /// One-shot, and it has fired.
    disabled: AtomicBool,
    /// Also registered in the kernel's instance.
    pub kernel: AtomicBool,
    /// A kernel connection that may go over, or a listener to which no channel leads yet. Until then nothing but the
    /// kernel's instance reports it.
    watched_only: AtomicBool,
    pub recheck: AtomicBool,
    /// Looked at and not ready in the current pass.
    pub idle: AtomicBool,
    /// In the kernel it would be in the list of what is ready: it was when it was added, has come
    /// into it since it was looked at, or is level-triggered and was reported then.
    pub linked: AtomicBool,
    /// It comes into that list with this look, and since when it should be there, in ticks.
    pub marked: AtomicBool,
    pub notified_at: AtomicU64,
    /// When it was last looked at, or set, without being linked from then on; ticks.
    looked_at: AtomicU64,
}

// SAFETY: zero is valid; `link` is the slab's.
unsafe impl Slot for Item {
    fn link(&self) -> &AtomicU32 {
        &self.link
    }
}

const ET: u32 = libc::EPOLLET as u32;
const ONESHOT: u32 = libc::EPOLLONESHOT as u32;
/// With IN and RDNORM, what the arrival of data is an edge for.
const DATA: u32 = (libc::EPOLLPRI | libc::EPOLLRDBAND) as u32;
const EXCLUSIVE: u32 = libc::EPOLLEXCLUSIVE as u32;

pub fn first(d: &Desc) -> Option<&'static Item> {
    ITEMS.get(d.first_item().wrapping_sub(1))
}

/// The items of an instance that watch such listeners.
pub fn of_listeners(ep: &Ep, such: impl Fn(&listen::Listener) -> bool) -> impl Iterator<Item = &'static Item> {
    let ep = ep.index();
    let those = listen::used().filter(move |l| such(l)).filter_map(listen::Listener::desc);
    those.flat_map(move |d| core::iter::successors(first(d), |i| i.next()).take(4096).filter(move |i| i.is(d, ep)))
}

/// The item of (descriptor, instance, number).
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
        // The item is in the list before the look at the descriptor; `became_conn` and `listener_changed` do the reverse.
        fence(Ordering::SeqCst);
    }
    // When there is a channel, the waker wakes a thread that sleeps in the kernel.
    let no_channel = || listen::of(d).is_some_and(|l| !l.has_channels()) && ep.need_waker().is_some();
    let watched_only = kernel && (d.kind() == Kind::Kernel || d.kind() == Kind::Listener && no_channel());
    it.watched_only.store(watched_only, Ordering::Relaxed);
    ep.items.fetch_add(1, Ordering::SeqCst);
    if !watched_only {
        // SeqCst: against a thread that is about to sleep, see `wait`.
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
        // And for the first one, which was alone.
        2 => (0..g.n).for_each(|k| _ = ITEMS.get(g.at(k)).map(|it| it.hint(ep, g))),
        _ => it.hint(ep, g),
    }
    Ok(())
}

/// Take an item out of its descriptor's list.
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

/// Take the first item out of a descriptor's list.
pub fn pop(d: &Desc) -> Option<&'static Item> {
    let _l = LISTS.lock().ok()?;
    let it = first(d)?;
    d.set_first_item(it.next.load(Ordering::Relaxed));
    Some(it)
}

/// Nobody refers to it any more, except maybe the list of active items.
pub fn kill(ep: &Ep, _locked: &mut Inner, it: &Item) {
    it.live.store(false, Ordering::Release);
    ep.items.fetch_sub(1, Ordering::Relaxed);
    if !it.watched_only.load(Ordering::Relaxed) {
        ep.looked_at.fetch_sub(1, Ordering::Relaxed);
    }
    if !it.active.load(Ordering::Relaxed) {
        ITEMS.free(it.index());
    }
}

/// A dead item leaves the list of active items.
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
    /// Lists are walked without their lock: is this still the item it was?
    pub fn is(&self, d: &Desc, ep: u32) -> bool {
        self.live.load(Ordering::Acquire)
            && self.ep.load(Ordering::Relaxed) == ep
            && self.desc.load(Ordering::Relaxed) == d.index()
    }

    /// From here on the instance has to be looked at, and not only the kernel's.
    pub(super) fn is_ours_now(&self, ep: &Ep) {
        if self.watched_only.swap(false, Ordering::Relaxed) {
            ep.looked_at.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// What `epoll_ctl` said.
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
        if let Some(d) = self.desc().filter(|d| self.shut_both(d)) {
            self.reported.fresh.store(ready::events(d, self.wanted()) != 0, Ordering::Relaxed);
        }
    }

    /// What the kernel is to be told for the same registration. A one-shot that
    /// has fired stays silent.
    pub fn event(&self) -> libc::epoll_event {
        let events = self.events.load(Ordering::Relaxed);
        let events = if self.disabled.load(Ordering::Relaxed) { events & (ET | ONESHOT) } else { events };
        libc::epoll_event { events, u64: self.data.load(Ordering::Relaxed) }
    }

    /// The connection behind it has changed its path and must be followed.
    pub fn pending(&self) -> Option<&'static Desc> {
        self.desc().filter(|d| self.live.load(Ordering::Relaxed) && d.is_conn() && stage::can_follow(d))
    }

    /// It was added or set. If it is ready, the kernel has it in its list from now on. True: and
    /// had not before.
    pub fn enlist(&self) -> bool {
        self.ready() && !self.linked.swap(true, Ordering::Relaxed)
    }

    /// What `take` has said.
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

    /// A peer has marked what it belongs to. When?
    pub fn note_when(&self, d: &Desc) {
        let at = |w: &Want| w.notified_at.load(Ordering::Relaxed);
        self.note_at(at(&d.rx().1.want_data).max(at(&d.tx().1.want_space)));
    }

    /// Ready, and no peer was asked to say so: since when, as far as can be known. Data says when
    /// its sender turned to it from another connection (crate `streams`); if it does not, the
    /// sender was here already at our last look, and whatever it turned to since came later.
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

    /// More does not change the place of what is in the list.
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
        self.edge(d, &self.reported, false) && ready::events(d, self.wanted()) != 0
    }

    /// Nothing to do with us (yet): only the kernel knows its readiness.
    pub fn passive(&self) -> bool {
        self.desc().is_none_or(|d| !matches!(d.kind(), Kind::Shm | Kind::Listener | Kind::Epoll))
    }

    /// An epoll instance inside this one. It is looked at on every call: its
    /// own waits undo what we arm for it.
    pub fn nested(&self) -> bool {
        self.desc().is_some_and(|d| d.kind() == Kind::Epoll)
    }

    /// Where the peer runs, for the decision to spin; None: not a connection.
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

impl Inner {
    /// Is an item ready that may be?
    pub fn any_ready(&self) -> bool {
        (0..self.n).any(|k| ITEMS.get(self.at(k)).is_some_and(|it| it.ready()))
    }
    /// An active item goes behind all others.
    pub(super) fn put_last(&mut self, it: &Item) {
        if let Some(k) = (0..self.n).find(|&k| self.at(k) == it.index()) {
            self.tail(k).rotate_left(1);
        }
    }
    /// Look at an item on every call from now on, until it is armed again: what
    /// it was armed for may not be all that it waits for now.
    pub(super) fn activate(&mut self, it: &Item) {
        it.was_marked();
        if !it.active.swap(true, Ordering::Relaxed) && !self.push(it.index()) {
            it.active.store(false, Ordering::Relaxed);
        }
    }
}
