//! Taking from the queues of others: busy zones, connection stealing
//! (Affinity-Accept, 3.3.1; ADR 26).
//!
//! The monitor hands every worker of a group the local listen sockets of the others
//! ("peers"). They lie in the worker's epoll instance behind its own one, and the kernel
//! wakes who comes first in a socket's list and really waits: the socket's own worker, else
//! one of the others. So nobody is woken while the own worker waits, and somebody is
//! when it does not.
//!
//! Who is woken so does not take the connection at once: the own worker may be about to,
//! and it is better off there. It looks again until the connection is gone, or its worker
//! has not looked for a while ("patience"), or the zone is busy.

pub mod aloof;

use super::accept::Peer;
use super::{used, watch, Local, Zoned};
use crate::{ctl, process};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, Ordering};
use fsocket_abi::arena::zone_accept;
use fsocket_abi::balance::{Balance, Queue, BALANCE_SIZE, QUEUES, TRUST};
use fsocket_proto::{kind as msg, Msg};
use fsocket_sys::{self as sys, cpu, Result};

/// Marks a peer's socket in the kernel's epoll instance.
pub const PEER_MARK: u64 = 0xF50C_4E7B_E11A_0003;
/// Peers, and those that are gone and not yet empty.
const PEERS: usize = 2 * QUEUES;

const EXCLUSIVE: u32 = libc::EPOLLEXCLUSIVE as u32;
/// What may stand beside EPOLLEXCLUSIVE.
const BESIDE_EXCLUSIVE: u32 =
    (libc::EPOLLIN | libc::EPOLLERR | libc::EPOLLHUP | libc::EPOLLWAKEUP) as u32 | libc::EPOLLET as u32;

static ON: AtomicBool = AtomicBool::new(false);
/// Some thread is to look at its peers.
static PENDING: AtomicBool = AtomicBool::new(false);

/// Called once, before `main`.
pub fn init(on: bool) {
    ON.store(on, Ordering::Release);
}

/// Has the program not switched it off?
#[inline]
pub fn enabled() -> bool {
    ON.load(Ordering::Relaxed)
}

/// Another worker's local listen socket.
struct Sock {
    fd: AtomicI32,
    /// 0: free.
    place: AtomicU32,
    gone: AtomicBool,
}

/// What a process knows of the balance of a listener.
pub struct Peers {
    map: AtomicPtr<Balance>,
    n: AtomicU32,
    all: [Sock; PEERS],
    /// Place of the last victim.
    last: AtomicU32,
}

/// Somebody to steal from.
struct Victim {
    fd: i32,
    place: u32,
    gone: bool,
    /// In this process.
    near: bool,
    /// The kernel wakes us for it. (Not for a socket of the program's own, which it waits for
    /// in its own way: we would be woken beside its worker each time. The monitor nudges.)
    wakes: bool,
}

/// What a look at the peers shows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Waits {
    Nothing,
    /// Connections that are left to their worker for now.
    Later,
    /// Connections to be taken.
    Now,
}

impl Peers {
    #[allow(clippy::new_without_default)] // only ever in statics
    pub const fn new() -> Peers {
        Peers {
            map: AtomicPtr::new(core::ptr::null_mut()),
            n: AtomicU32::new(0),
            all: [const { Sock { fd: AtomicI32::new(-1), place: AtomicU32::new(0), gone: AtomicBool::new(false) } };
                PEERS],
            last: AtomicU32::new(0),
        }
    }

    fn iter(&self) -> impl Iterator<Item = &Sock> {
        let n = (self.n.load(Ordering::Acquire) as usize).min(PEERS);
        self.all[..n].iter().filter(|s| s.place.load(Ordering::Acquire) != 0)
    }

    pub fn moved(&self, swap: &impl Fn(&AtomicI32) -> bool) -> bool {
        self.all.iter().any(|s| swap(&s.fd))
    }

    /// In a forked child: nothing of it is ours.
    pub fn become_child(&self) {
        for s in self.iter() {
            s.place.store(0, Ordering::Relaxed);
            close(&s.fd);
        }
        self.n.store(0, Ordering::Relaxed);
        let map = self.map.swap(core::ptr::null_mut(), Ordering::Relaxed);
        if !map.is_null() {
            // SAFETY: a child has one thread, and it is here.
            let _ = unsafe { sys::munmap(map as *mut u8, BALANCE_SIZE) };
        }
    }

    /// The listener is closed. The mapping stays: a stale reader may still be in it.
    pub fn forget(&self) {
        self.map.store(core::ptr::null_mut(), Ordering::Release);
        self.last.store(0, Ordering::Relaxed);
    }
}

pub(super) fn close(fd: &AtomicI32) {
    let fd = fd.swap(-1, Ordering::AcqRel);
    if fd >= 0 {
        process::close_own(fd);
    }
}

fn queue(b: &Balance, place: u32) -> Option<&Queue> {
    b.queue.get((place as usize).wrapping_sub(1))
}

fn bit(place: u32) -> u64 {
    1u64.checked_shl(place.wrapping_sub(1)).unwrap_or(0)
}

fn patience_ns(b: &Balance) -> u64 {
    b.patience.load(Ordering::Relaxed).clamp(10, 10_000_000) as u64 * 1000
}

/// While somebody is strained, else [`TRUST`] times as long.
fn usual_patience_ns(b: &Balance) -> u64 {
    patience_ns(b) * if b.strained.load(Ordering::Relaxed) == 0 { TRUST } else { 1 }
}

fn ticks(ns: u64) -> u64 {
    ns / 1000 * cpu::ticks_per_us()
}

impl Local {
    /// It looks at its queue.
    fn looks(&self, b: &Balance) {
        if let Some(q) = queue(b, self.place.load(Ordering::Relaxed)) {
            q.looked.store(cpu::ticks(), Ordering::Relaxed);
        }
    }
    fn is_waiting_for_peers(&self) -> bool {
        self.peers_since.load(Ordering::Relaxed) != 0
    }
    /// It has waited long enough.
    fn look_at_once(&self) {
        self.peers_since.store(1, Ordering::Relaxed);
        self.peers_looked.store(0, Ordering::Relaxed);
        PENDING.store(true, Ordering::Relaxed);
    }
    fn wait_for_peers(&self, since: u64) {
        let _ = self.peers_since.compare_exchange(0, since.max(1), Ordering::Relaxed, Ordering::Relaxed);
        PENDING.store(true, Ordering::Relaxed);
    }
}

impl Zoned {
    /// The group's shared counts, if this listener is balanced.
    #[inline]
    pub(super) fn balance(&self) -> Option<&'static Balance> {
        let p = self.peers.map.load(Ordering::Acquire);
        // SAFETY: a whole mapping that lasts as long as it can be seen.
        (!p.is_null()).then(|| unsafe { &*p })
    }

    /// The monitor's program selects among us: map its counts.
    pub(super) fn map_balance(&self) {
        if self.balance().is_none() {
            self.map_balance_again();
        }
    }

    /// Perhaps another monitor's. What was mapped stays until then: peers may be told of
    /// meanwhile.
    pub(super) fn map_balance_again(&self) {
        if !ON.load(Ordering::Relaxed) {
            return;
        }
        let mut m = Msg::new(msg::BALANCE);
        m.id = self.group.load(Ordering::Relaxed);
        let Ok((_, Some(fd))) = ctl::request(m, None) else { return };
        if let Ok(p) = sys::mmap(BALANCE_SIZE, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED, fd, 0) {
            self.peers.map.store(p as *mut Balance, Ordering::Release);
        }
        let _ = sys::close(fd);
    }

    /// The worker waits for its local listen socket: others may steal from it now. Not
    /// earlier, because who is first in the socket's list is woken first.
    pub(super) fn share(&self, l: &Local) {
        let Some(b) = self.balance() else { return };
        let place = l.place.load(Ordering::Relaxed);
        if !(1..=QUEUES as u32).contains(&place) || l.shared.swap(true, Ordering::AcqRel) {
            return;
        }
        l.looks(b);
        if !self.member().is_some_and(|m| core::ptr::eq(l, m)) {
            for w in self.watches.active().filter(|w| w.thread() != l.thread.load(Ordering::Relaxed)) {
                put_peer(w.ep(), l.fd());
            }
            let own = l.inner.load(Ordering::Relaxed);
            self.inners().filter(|inner| *inner != own).for_each(|inner| put_inner(inner, l.fd()));
        }
        let mut m = Msg::new(msg::SHARE);
        m.id = self.group.load(Ordering::Relaxed);
        m.arg0 = place as u64;
        let _ = ctl::tell(m, Some(l.fd()));
        // Whatever came before anybody else could be told.
        l.wait_for_peers(cpu::ticks());
    }

    /// How the own socket is to lie in an epoll instance: first in its list, and without
    /// others being woken beside it.
    pub(super) fn put_local(&self, ep: i32, l: &Local, ev: &libc::epoll_event) -> Result<()> {
        if self.balance().is_none() {
            return watch::put(ep, l.fd(), ev);
        }
        let mine = libc::epoll_event { events: ev.events & BESIDE_EXCLUSIVE | EXCLUSIVE, u64: ev.u64 };
        let add = || sys::epoll_ctl(ep, libc::EPOLL_CTL_ADD, l.fd(), Some(&mine));
        let same = l.put.swap(mine.u64 ^ (mine.events as u64) << 32, Ordering::Relaxed);
        match add() {
            // Still there from before the application took the listener out and put it back.
            Err(e) if e.raw() == libc::EEXIST && same == mine.u64 ^ (mine.events as u64) << 32 => return Ok(()),
            Err(e) if e.raw() == libc::EEXIST => {
                let _ = sys::epoll_ctl(ep, libc::EPOLL_CTL_DEL, l.fd(), None);
                add()?;
            }
            r => r?,
        }
        for v in self.victims(l).filter(|v| v.wakes) {
            put_peer(ep, v.fd);
        }
        Ok(())
    }

    /// The listener is not watched there any more.
    pub(super) fn take_out_peers(&self, ep: i32) {
        for s in self.peers.iter() {
            let _ = sys::epoll_ctl(ep, libc::EPOLL_CTL_DEL, s.fd.load(Ordering::Relaxed), None);
        }
        for l in self.locals().filter(|l| l.shared.load(Ordering::Relaxed)) {
            let _ = sys::epoll_ctl(ep, libc::EPOLL_CTL_DEL, l.fd(), None);
        }
    }

    /// A local listen socket is about to be closed here. Others have descriptors of it,
    /// so it stays in every instance it is not taken out of.
    pub(super) fn unshare(&self, l: &Local, fd: i32) {
        if !l.shared.swap(false, Ordering::AcqRel) {
            return;
        }
        l.peers_since.store(0, Ordering::Relaxed);
        close(&l.inner);
        self.take_out_of_inner(fd);
        let lazy = l.lazy.swap(-1, Ordering::Relaxed);
        for ep in self.watches.active().map(|w| w.ep()).chain((lazy >= 0).then_some(lazy)) {
            let _ = sys::epoll_ctl(ep, libc::EPOLL_CTL_DEL, fd, None);
        }
        if lazy >= 0 {
            self.take_out_peers(lazy);
        }
        self.drop_peers_if_idle();
    }

    /// Nobody is left in this process who could steal.
    pub(super) fn drop_peers_if_idle(&self) {
        if self.workers().next().is_none() {
            for s in self.peers.iter() {
                self.drop_peer(s);
            }
        }
    }

    fn drop_peer(&self, s: &Sock) {
        let fd = s.fd.load(Ordering::Relaxed);
        for w in self.watches.active() {
            let _ = sys::epoll_ctl(w.ep(), libc::EPOLL_CTL_DEL, fd, None);
        }
        self.take_out_of_inner(fd);
        close(&s.fd);
        s.gone.store(false, Ordering::Relaxed);
        s.place.store(0, Ordering::Release);
    }

    /// Instances of those that sleep in `poll` or `accept`.
    fn inners(&self) -> impl Iterator<Item = i32> + '_ {
        self.locals().map(|l| l.inner.load(Ordering::Acquire)).filter(|fd| *fd >= 0)
    }

    fn take_out_of_inner(&self, fd: i32) {
        for inner in self.inners() {
            let _ = sys::epoll_ctl(inner, libc::EPOLL_CTL_DEL, fd, None);
        }
    }

    /// Whom a worker may steal from.
    fn victims<'a>(&'a self, l: &'a Local) -> impl Iterator<Item = Victim> + 'a {
        let far = self.peers.iter().map(|s| Victim {
            fd: s.fd.load(Ordering::Relaxed),
            place: s.place.load(Ordering::Relaxed),
            gone: s.gone.load(Ordering::Relaxed),
            near: false,
            wakes: !self.is_shared(),
        });
        let of = |o: &Local, wakes| Victim {
            fd: o.fd(),
            place: o.place.load(Ordering::Relaxed),
            gone: false,
            near: true,
            wakes,
        };
        let other = |o: &&Local| !core::ptr::eq(*o, l) && o.shared.load(Ordering::Relaxed);
        let near = self.locals().filter(other).map(move |o| of(o, true));
        let siblings = self.sibling_members(l).map(move |o| of(o, false));
        far.chain(near).chain(siblings).filter(|v| v.fd >= 0)
    }

    /// The calling thread as a worker that may take part.
    fn me(&self) -> Option<&Local> {
        self.own().or_else(|| self.own_member())
    }

    /// All of this process.
    fn workers(&self) -> impl Iterator<Item = &Local> {
        self.locals().chain(self.member())
    }

    /// The counts, for a worker that takes part.
    #[inline]
    pub(super) fn balance_of(&self, l: &Local) -> Option<&'static Balance> {
        if !l.shared.load(Ordering::Relaxed) {
            return None;
        }
        self.balance()
    }

    /// A connection was accepted from the own queue.
    #[inline]
    pub(super) fn took_own(&self, l: &Local) {
        if let Some(q) = self.balance_of(l).and_then(|b| queue(b, l.place.load(Ordering::Relaxed))) {
            q.taken.fetch_add(1, Ordering::Relaxed);
            q.looked.store(cpu::ticks(), Ordering::Relaxed);
            l.fair.store(l.fair.load(Ordering::Relaxed).saturating_add(1), Ordering::Relaxed);
        }
    }

    /// A connection was accepted from the queue of a worker.
    pub(super) fn took_from(&self, place: u32) {
        self.map_balance();
        if let Some(q) = self.balance().and_then(|b| queue(b, place)) {
            q.taken.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// At the start of an `accept`: a turn for a busy zone, after so many local ones.
    #[inline]
    pub(super) fn take_for_balance(&self, l: &Local, peer: Peer) -> Option<Result<i32>> {
        let b = self.balance_of(l)?;
        l.looks(b);
        let (busy, mine) = (b.busy.load(Ordering::Relaxed), bit(l.place.load(Ordering::Relaxed)));
        if busy & !mine == 0 || busy & mine != 0 || l.fair.load(Ordering::Relaxed) < b.ratio.load(Ordering::Relaxed) {
            return None;
        }
        l.fair.store(0, Ordering::Relaxed);
        self.steal(b, l, peer, |v| busy & bit(v.place) != 0)
    }

    /// Nothing local: busy zones first, then those whose worker does not look.
    pub(super) fn take_from_peers(&self, peer: Peer) -> Option<Result<i32>> {
        let l = self.me()?;
        let b = self.balance_of(l)?;
        let (busy, mine) = (b.busy.load(Ordering::Relaxed), bit(l.place.load(Ordering::Relaxed)));
        let may = busy & mine == 0;
        if busy & !mine != 0 && may {
            if let Some(r) = self.steal(b, l, peer, |v| busy & bit(v.place) != 0) {
                return Some(r);
            }
        }
        if !l.is_waiting_for_peers() {
            return None;
        }
        self.steal(b, l, peer, |v| v.gone || may && is_left_alone(b, l, v))
    }

    fn steal(&self, b: &Balance, l: &Local, peer: Peer, from: impl Fn(&Victim) -> bool) -> Option<Result<i32>> {
        let last = self.peers.last.load(Ordering::Relaxed);
        // Round-robin by place, beginning behind the last one.
        for behind in [true, false] {
            for v in self.victims(l).filter(|v| (v.place > last) == behind && from(v)) {
                match peer.accept(v.fd) {
                    Ok(n) => {
                        self.peers.last.store(v.place, Ordering::Relaxed);
                        if let Some(q) = queue(b, v.place) {
                            q.taken.fetch_add(1, Ordering::Relaxed);
                        }
                        let me = l.place.load(Ordering::Relaxed) as usize;
                        let pair = b.stolen.get(me.wrapping_sub(1)).and_then(|row| row.get(v.place as usize - 1));
                        if let Some(pair) = pair.filter(|_| !v.gone) {
                            pair.fetch_add(1, Ordering::Relaxed);
                        }
                        let how = if v.near { zone_accept::REMOTE } else { zone_accept::STOLEN };
                        return Some(self.accepted(n, l.cpu.load(Ordering::Relaxed), how));
                    }
                    Err(e) if matches!(e.raw(), libc::EAGAIN | libc::EBADF | libc::EINVAL | libc::ENOTSOCK) => {}
                    Err(e) => return Some(Err(e)),
                }
            }
        }
        None
    }

    /// Asks the kernel whether anything waits at the peers, and closes those that are
    /// gone and empty: the kernel then moves their handshakes.
    fn look_at_peers(&self, l: &Local) -> Waits {
        let Some(b) = self.balance_of(l) else { return Waits::Nothing };
        let blank = libc::pollfd { fd: -1, events: libc::POLLIN, revents: 0 };
        let mut p = [blank; PEERS + QUEUES];
        let mut n = 0;
        for v in self.victims(l).take(p.len()) {
            p[n].fd = v.fd;
            n += 1;
        }
        // SAFETY: n entries.
        if n == 0 || unsafe { sys::ppoll(p.as_mut_ptr(), n, Some(0), core::ptr::null()) }.is_err() {
            return Waits::Nothing;
        }
        let ready = |fd: i32| p[..n].iter().any(|p| p.fd == fd && p.revents & libc::POLLIN != 0);
        for s in self.peers.iter().filter(|s| s.gone.load(Ordering::Relaxed)) {
            if !ready(s.fd.load(Ordering::Relaxed)) {
                self.drop_peer(s);
                let mut m = Msg::new(msg::PEER_CLOSED);
                m.id = self.group.load(Ordering::Relaxed);
                let _ = ctl::tell(m, None);
            }
        }
        let busy = b.busy.load(Ordering::Relaxed);
        let may = busy & bit(l.place.load(Ordering::Relaxed)) == 0;
        let mut waits = Waits::Nothing;
        for v in self.victims(l).filter(|v| ready(v.fd)) {
            if v.gone || may && (busy & bit(v.place) != 0 || is_left_alone(b, l, &v)) {
                return Waits::Now;
            }
            // Also while this worker is busy itself: nobody would tell it again.
            waits = Waits::Later;
        }
        waits
    }

    /// For a worker that sleeps in `poll` or `accept`: readable when a peer's queue may be
    /// in need of somebody; -1 while it looks by itself, or there is nothing.
    pub fn peers_fd(&self) -> i32 {
        let Some(l) = self.own().filter(|l| self.balance_of(l).is_some()) else { return -1 };
        if l.is_waiting_for_peers() {
            return -1;
        }
        let inner = l.inner.load(Ordering::Acquire);
        if inner >= 0 {
            return inner;
        }
        let made = crate::foreign::making(|| sys::epoll_create1(libc::EPOLL_CLOEXEC).map(process::high_fd));
        let Ok(fd) = made else { return -1 };
        // Nobody but its thread makes one; who joins from now on finds it.
        l.inner.store(fd, Ordering::Release);
        for v in self.victims(l).filter(|v| v.wakes) {
            put_inner(fd, v.fd);
        }
        fd
    }

    /// After such a sleep; `spoke`: [`Zoned::peers_fd`] was readable. True: an accept would
    /// get something from a peer now.
    pub fn peers_spoke(&self, spoke: bool) -> bool {
        let Some(l) = self.own() else { return false };
        if spoke {
            l.wait_for_peers(cpu::ticks());
        }
        l.is_waiting_for_peers() && self.settle_peers(l) == Waits::Now
    }

    fn settle_peers(&self, l: &Local) -> Waits {
        let waits = self.look_at_peers(l);
        if waits == Waits::Nothing {
            l.peers_since.store(0, Ordering::Relaxed);
        }
        waits
    }
}

/// Has the victim's worker not looked for so long that its connections are better off
/// with us? Nor may we have only just seen them: it may be waking up for them.
fn is_left_alone(b: &Balance, l: &Local, v: &Victim) -> bool {
    let Some(q) = queue(b, v.place) else { return false };
    let strained = b.strained.load(Ordering::Relaxed) & bit(v.place) != 0;
    let ticks = ticks(patience_ns(b) * if strained { 1 } else { TRUST });
    let now = cpu::ticks();
    // Clocks of two CPUs may differ a little: what lies ahead is now.
    let ago = |then: u64| now.saturating_sub(then);
    ago(q.looked.load(Ordering::Relaxed)) > ticks && ago(l.peers_since.load(Ordering::Relaxed)) > ticks
}

fn put_peer(ep: i32, fd: i32) {
    let ev = libc::epoll_event { events: (libc::EPOLLIN | libc::EPOLLET) as u32 | EXCLUSIVE, u64: PEER_MARK };
    let _ = sys::epoll_ctl(ep, libc::EPOLL_CTL_ADD, fd, Some(&ev));
}

fn put_inner(inner: i32, fd: i32) {
    let ev = libc::epoll_event { events: libc::EPOLLIN as u32 | EXCLUSIVE, u64: PEER_MARK };
    let _ = sys::epoll_ctl(inner, libc::EPOLL_CTL_ADD, fd, Some(&ev));
}

/// [`msg::PEER`]. True: the descriptor is kept.
pub fn came(group: u64, place: u64, fd: i32) -> bool {
    let Some(z) = used().iter().find(|z| z.group.load(Ordering::Relaxed) == group && z.balance().is_some()) else {
        return false;
    };
    let Some(i) = z.peers.all.iter().position(|s| s.place.load(Ordering::Relaxed) == 0) else { return false };
    if place == 0 || place > QUEUES as u64 {
        return false;
    }
    let s = &z.peers.all[i];
    let fd = process::high_fd(fd);
    s.fd.store(fd, Ordering::Relaxed);
    s.gone.store(false, Ordering::Relaxed);
    s.place.store(place as u32, Ordering::Release);
    z.peers.n.fetch_max(i as u32 + 1, Ordering::AcqRel);
    if !z.is_shared() {
        z.watches.active().for_each(|w| put_peer(w.ep(), fd));
        z.inners().for_each(|inner| put_inner(inner, fd));
    }
    true
}

/// [`msg::PEER_GONE`].
pub fn went(group: u64, place: u64) {
    for z in used().iter().filter(|z| z.group.load(Ordering::Relaxed) == group) {
        for s in z.peers.iter().filter(|s| s.place.load(Ordering::Relaxed) as u64 == place) {
            s.gone.store(true, Ordering::Relaxed);
        }
        for l in z.workers() {
            l.look_at_once();
        }
    }
}

/// [`msg::NUDGE`]: somebody's connections wait, and he does not look.
pub fn nudged(group: u64) {
    for z in used().iter().filter(|z| z.group.load(Ordering::Relaxed) == group) {
        for l in z.workers() {
            l.look_at_once();
        }
    }
}

/// The monitor has died: nobody says any more whose worker is gone. Every socket is its
/// worker's alone again, and dies with it.
pub fn alone() {
    for z in used() {
        for l in z.workers() {
            l.shared.store(false, Ordering::Relaxed);
            l.peers_since.store(0, Ordering::Relaxed);
            close(&l.inner);
        }
        for s in z.peers.iter() {
            z.drop_peer(s);
        }
    }
}

/// A peer has spoken in an epoll instance in which the calling thread waits.
#[cold]
pub fn spoke() {
    let now = cpu::ticks();
    for z in used() {
        let Some((l, b)) = z.me().and_then(|l| Some((l, z.balance_of(l)?))) else { continue };
        if !l.is_waiting_for_peers() {
            // Nothing can be taken before its worker has had its time, but from the busy.
            let others = b.busy.load(Ordering::Relaxed) & !bit(l.place.load(Ordering::Relaxed));
            l.peers_looked.store(if others == 0 { now } else { 0 }, Ordering::Relaxed);
        }
        l.wait_for_peers(now);
    }
}

/// Is the calling thread to look at its peers now and then?
#[inline]
pub fn pending() -> bool {
    PENDING.load(Ordering::Relaxed) && own_pending()
}

#[cold]
fn own_pending() -> bool {
    let mut any = false;
    for z in used() {
        any |= z.workers().any(Local::is_waiting_for_peers);
        if z.me().is_some_and(Local::is_waiting_for_peers) {
            return true;
        }
    }
    if !any {
        PENDING.store(false, Ordering::Relaxed);
        // Somebody may have begun in between.
        if used().iter().any(|z| z.workers().any(Local::is_waiting_for_peers)) {
            PENDING.store(true, Ordering::Relaxed);
        }
    }
    false
}

/// While that is so: a sleep of `limit` is cut.
pub fn cut(limit: Option<u64>) -> Option<u64> {
    if !pending() {
        return limit;
    }
    let mut ns = u64::MAX;
    for z in used() {
        if let (Some(l), Some(b)) = (z.me(), z.balance()) {
            if l.is_waiting_for_peers() {
                ns = ns.min(usual_patience_ns(b));
            }
        }
    }
    Some(limit.map_or(ns, |l| l.min(ns)))
}

/// Looks at the peers of the listeners that are watched in `ep`, and reports those
/// (events, data) that would get something from them.
pub fn look(ep: i32, mut report: impl FnMut(u32, u64)) {
    for z in used() {
        let Some(l) = z.me().filter(|l| l.is_waiting_for_peers()) else { continue };
        // While there is enough to do, that costs a system call a millisecond, not one a turn.
        let now = cpu::ticks();
        let ago = now.saturating_sub(l.peers_looked.load(Ordering::Relaxed));
        if z.balance().is_some_and(|b| ago < ticks(usual_patience_ns(b))) {
            continue;
        }
        let waits = z.settle_peers(l);
        // What is reported is reported again until it is gone.
        l.peers_looked.store(if waits == Waits::Later { now } else { 0 }, Ordering::Relaxed);
        if waits == Waits::Now {
            for w in z.watches.active().filter(|w| w.ep() == ep) {
                report(libc::EPOLLIN as u32, w.data());
            }
        }
    }
}

/// The calling thread is about to wait: its queues are looked at.
#[inline]
pub fn before_sleep() {
    if ON.load(Ordering::Relaxed) {
        for z in used() {
            if let Some((l, b)) = z.me().and_then(|l| Some((l, z.balance_of(l)?))) {
                l.looks(b);
            }
        }
    }
}
