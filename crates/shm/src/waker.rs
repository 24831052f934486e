//! Wakers: what a thread sleeps on when it waits for more than one thing.
//!
//! A waker is an epoll instance that only this process has. In it lie, by their edges, an eventfd
//! for the process's own threads and the read ends of the pipes by which peers wake it, one for
//! each peer process ([`hear`], ADR 38). No peer can block, drain or fill what another one uses.
//!
//! A ring says in which channel there is something. It is read where the waker's user wants to know that; else a ring
//! is an edge, and what was written is thrown away now and then.
//!
//! Long: a waker and its pipes' read ends use each other.

use crate::cow::Sparing;
use crate::number::Number;
use crate::pieces::{Pieces, Zero};
use crate::slab::{Slab, Slot};
use crate::{ctl, process};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use fsocket_abi::channel::waker_key;
use fsocket_proto::{notice, request};
use fsocket_sync::atomic::{fence, AtomicU32};
use fsocket_sync::doorbell::Batch;
use fsocket_sys as sys;

pub use crate::unarmed::Unarmed;

/// Wakers per process.
pub const MAX: usize = 255;

pub struct Waker {
    /// Its index.
    place: AtomicU32,
    /// The epoll instance.
    fd: Number,
    /// The eventfd in it.
    own: Number,
    used: AtomicBool,
    /// In the hands of one sleeping thread, not of an epoll instance.
    transient: AtomicBool,
    /// The listener in whose `accept` that thread is; 0: it waits for other things, or for more.
    only: AtomicU64,
    /// How often it was heard by its edges.
    rings: AtomicU32,
    /// Its user wants to know in which channels.
    names: AtomicBool,
    /// Numbers of channels whose peers have rung since [`Waker::rung`] was last asked; 0: none.
    rung: [AtomicU32; NAMED],
    /// There may be some.
    any_rung: AtomicBool,
    /// And in more than are named there.
    crowded: AtomicBool,
}

const NAMED: usize = 64;

static WAKERS: Pieces<Waker, 14, { MAX.div_ceil(14) }> = Pieces::new();
// SAFETY: atomics, and numbers that begin as zeros, as `Number` says of itself.
unsafe impl Zero for Waker {}

impl Waker {
    pub fn index(&self) -> usize {
        self.place.load(Ordering::Relaxed) as usize
    }
    pub fn fd(&self) -> i32 {
        self.fd.load(Ordering::Relaxed)
    }
    /// Its name in channels.
    pub fn key(&self) -> u64 {
        waker_key(process::nonce(), self.index())
    }
    /// Put it back; its descriptors are kept for the next user.
    pub fn release(&self) {
        self.only.store(0, Ordering::Relaxed);
        if self.transient.swap(false, Ordering::SeqCst) {
            SLEEPERS.fetch_sub(1, Ordering::SeqCst);
        }
        self.used.store(false, Ordering::Release);
    }
    /// This use is one sleep of one thread.
    pub fn for_one_sleep(&self) {
        self.transient.store(true, Ordering::SeqCst);
        SLEEPERS.fetch_add(1, Ordering::SeqCst);
    }
    /// It is for one `accept`, on this listener.
    pub fn for_listener(&self, id: u64) {
        self.for_one_sleep();
        // Before the look for channels, which is behind `arming`.
        self.only.store(id, Ordering::SeqCst);
    }
    pub fn ring_self(&self) {
        let _ = sys::eventfd_ring(self.own.load(Ordering::Relaxed));
    }
    /// Something that watches it by its edges was told that it has rung. There is nothing to
    /// forget, but now and then pipes must be emptied.
    #[inline]
    pub fn rang(&self) {
        let full = self.rings.fetch_add(1, Ordering::Relaxed) % EMPTIED == EMPTIED - 1;
        if full || self.names.load(Ordering::Relaxed) {
            self.look(full);
        }
    }
    /// From now on, who rings is asked for each time: [`Waker::rung`] says it. `on`: or not any more.
    pub fn name_channels(&self, on: bool) {
        self.names.store(on, Ordering::Relaxed);
    }
    #[inline]
    pub fn names(&self) -> bool {
        self.names.load(Ordering::Relaxed)
    }
    /// A peer has rung in a channel; 0: in some.
    pub fn note_rung(&self, channel: u32) {
        if !self.names.load(Ordering::Relaxed) {
            return;
        }
        // Release: with the peer's marks, which came before its ring. (Also for a number that is there already: it
        // may just be taken out, by a thread that has looked at the marks before these.)
        let put = |r: &AtomicU32| r.compare_exchange(0, channel, Ordering::Release, Ordering::Relaxed).is_ok();
        if channel == 0 || !self.rung.iter().any(put) {
            self.crowded.store(true, Ordering::Release);
        }
        // Behind them; `rung` does the reverse.
        self.any_rung.store(true, Ordering::Release);
    }
    /// Has [`Waker::rung`] something to say?
    #[inline]
    pub fn has_rung(&self) -> bool {
        self.any_rung.load(Ordering::Relaxed) && self.names.load(Ordering::Relaxed)
    }
    /// Calls `f` with each channel in which peers have rung since. True: there are others.
    pub fn rung(&self, mut f: impl FnMut(u32)) -> bool {
        if !self.any_rung.load(Ordering::Relaxed) || !self.any_rung.swap(false, Ordering::AcqRel) {
            return false;
        }
        for r in self.rung.iter().filter(|r| r.load(Ordering::Relaxed) != 0) {
            f(r.swap(0, Ordering::Acquire));
        }
        self.crowded.load(Ordering::Relaxed) && self.crowded.swap(false, Ordering::Acquire)
    }
    /// It has rung: forget that. Nothing is read but a pipe that may become full.
    pub fn clear(&self) {
        self.look(false);
    }
    #[cold]
    fn look(&self, empty: bool) {
        const AT_ONCE: usize = 16;
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; AT_ONCE];
        // As many rounds as there can be peers; who rings all the time does not keep us here.
        for _ in 0..MOST as usize / AT_ONCE {
            // SAFETY: room for AT_ONCE events.
            let n =
                unsafe { sys::epoll_wait(self.fd(), events.as_mut_ptr(), AT_ONCE as i32, Some(0), core::ptr::null()) };
            let n = n.unwrap_or(0);
            for e in &events[..n.min(AT_ONCE)] {
                if e.u64 < OTHER_MARKS {
                    listen_to(self, e.u64 as u32, e.events, empty);
                }
            }
            if n < AT_ONCE {
                return;
            }
        }
    }
}

#[link_section = ".data.fsocket_start"]
static SLEEPERS: AtomicU32 = AtomicU32::new(0);

/// Wake threads of ours in `poll`, `select` and `accept`: they must look again.
pub fn ring_sleepers() {
    if SLEEPERS.load(Ordering::SeqCst) != 0 {
        for b in first(made()) {
            if b.transient.load(Ordering::SeqCst) {
                b.ring_self();
            }
        }
    }
}

/// A waker for one user.
pub fn get() -> Option<&'static Waker> {
    let (i, b) = (0..MAX).map_while(|i| Some((i, WAKERS.make(i)?))).find(|(_, b)| {
        !b.used.load(Ordering::Relaxed)
            && b.used.compare_exchange(false, true, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    })?;
    if b.index() != i {
        b.place.store(i as u32, Ordering::Relaxed);
    }
    if b.fd() < 0 && !make(b) {
        b.release();
        return None;
    }
    b.names.put(false);
    Some(b)
}

/// In the epoll instance of a waker: its own eventfd, and the ends of peers. Other marks are pipes.
const OWN_MARK: u64 = u64::MAX;
const ENDS_MARK: u64 = u64::MAX - 1;
const OTHER_MARKS: u64 = ENDS_MARK;

/// While no monitor lives, every waker hears when a peer's process ends.
pub fn all_hear(ends: i32) {
    for b in first(made()).filter(|b| b.fd() >= 0) {
        put(b.fd(), ends, ENDS_MARK);
    }
}

fn make(b: &Waker) -> bool {
    // A forked child may watch its sockets before it listens or connects.
    if ctl::unmet() {
        ctl::wanted();
    }
    let Ok(own) = sys::eventfd().map(process::high_fd) else { return false };
    let made = crate::making::making(|| sys::epoll_create1(libc::EPOLL_CLOEXEC).map(process::high_fd));
    let Ok(fd) = made else {
        process::close_own(own);
        return false;
    };
    if !put(fd, own, OWN_MARK) {
        process::close_own(own);
        process::close_own(fd);
        return false;
    }
    b.own.store(own, Ordering::Relaxed);
    b.fd.store(fd, Ordering::SeqCst);
    // (Either this sees the instance, or who makes it sees this waker.)
    if let Some(ends) = ends() {
        put(fd, ends, ENDS_MARK);
    }
    true
}

/// By its edges: each ring is one, whether or not what was written before has been read.
fn put(instance: i32, fd: i32, mark: u64) -> bool {
    let ev = libc::epoll_event { events: (libc::EPOLLIN | libc::EPOLLET) as u32, u64: mark };
    sys::epoll_ctl(instance, libc::EPOLL_CTL_ADD, fd, Some(&ev)).is_ok()
}

/// Zero is valid.
#[repr(C)]
struct Heard {
    /// Plus one; 0: not in use.
    fd: AtomicI32,
    waker: AtomicU32,
    /// The process that rings, as the monitor calls it; 0: a monitor before this one did.
    ringer: AtomicU64,
    /// How often it was heard.
    times: AtomicU32,
    link: AtomicU32,
}

// SAFETY: zero is valid for all fields; `link` is the slab's.
unsafe impl Slot for Heard {
    fn link(&self) -> &AtomicU32 {
        &self.link
    }
}

/// Peers that wake wakers of this process by pipes; others do by way of the monitor.
const MOST: u32 = 1 << 14;
/// There will be no more than now.
pub fn trim() {
    HEARD.trim();
}
static HEARD: Slab<Heard, MOST, NEAR> = Slab::new();
const NEAR: usize = 16;
/// After so many rings a pipe is emptied. It holds 4,096 bytes at least, a ring has four, and an honest peer
/// writes once for each sleep; a full one is rung by way of the monitor.
const EMPTIED: u32 = 256;

/// Channels that have ended since all ends were last looked at.
static GONE: AtomicU32 = AtomicU32::new(0);
/// Rings by way of the monitor: the process that rings, and how many there were in the low byte. (Two processes with
/// one place begin anew in turns.)
static BY_MONITOR: Pieces<AtomicU64, 512, { PLACES / 512 }> = Pieces::new();
const PLACES: usize = 1 << 13;

impl Heard {
    fn fd(&self) -> Option<i32> {
        self.fd.load(Ordering::Acquire).checked_sub(1).filter(|fd| *fd >= 0)
    }

    /// Has the other end been closed? Its process has ended, or has no channel with us any more.
    fn has_ended(&self) -> bool {
        let Some(fd) = self.fd() else { return true };
        let mut p = libc::pollfd { fd, events: 0, revents: 0 };
        // SAFETY: one pollfd.
        let r = unsafe { sys::ppoll(&mut p, 1, Some(0), core::ptr::null()) };
        r == Ok(1) && p.revents & (libc::POLLHUP | libc::POLLERR) != 0
    }

    fn forget(&self) {
        let Some(fd) = self.fd.swap(0, Ordering::AcqRel).checked_sub(1).filter(|fd| *fd >= 0) else { return };
        if let Some(b) = at(self.waker.load(Ordering::Relaxed) as usize) {
            let _ = sys::epoll_ctl(b.fd(), libc::EPOLL_CTL_DEL, fd, None);
        }
        process::close_own(fd);
        HEARD.free(HEARD.index(self));
    }
}

fn heard() -> impl Iterator<Item = &'static Heard> {
    (0..HEARD.len()).filter_map(|i| HEARD.get(i)).filter(|p| p.fd().is_some())
}

impl Waker {
    /// A process has rung by way of the monitor. Is it time for a pipe?
    pub fn wants_pipe(&self, ringer: u64) -> bool {
        const OFTEN: u64 = 3;
        let key = ringer.wrapping_mul(31).wrapping_add(self.index() as u64);
        let Some(place) = BY_MONITOR.make(key as usize % PLACES) else { return false };
        let before = place.load(Ordering::Relaxed);
        let times = if before >> 8 == key & u64::MAX >> 8 { before & 0xff } else { 0 } + 1;
        place.store((key << 8) | (times % OFTEN), Ordering::Relaxed);
        if times < OFTEN {
            return false;
        }
        let index = self.index() as u32;
        let mut have =
            heard().filter(|p| p.waker.load(Ordering::Relaxed) == index && p.ringer.load(Ordering::Relaxed) == ringer);
        have.all(|p| {
            let ended = p.has_ended();
            if ended {
                p.forget();
            }
            ended
        })
    }
}

/// The pipe that was asked for, to be watched from now on. True: `fd` is ours.
pub fn hear(m: notice::WakerRead, fd: i32) -> bool {
    let Some(b) = at(m.waker.into()).filter(|b| b.fd() >= 0) else { return false };
    let Some((i, p)) = HEARD.alloc() else { return false };
    let Some(fd) = process::spare_fd(fd) else {
        HEARD.free(i);
        return false;
    };
    p.waker.store(b.index() as u32, Ordering::Relaxed);
    p.ringer.store(m.ringer, Ordering::Relaxed);
    p.times.store(0, Ordering::Relaxed);
    p.fd.store(fd + 1, Ordering::Release);
    let notice::WakerRead { waker, channel, waiter, ringer } = m;
    let ready = request::WakerReady { waker, channel, waiter, ringer };
    if !put(b.fd(), fd, i as u64) || !ctl::tell(ready, None) {
        p.forget();
    }
    true
}

/// A peer's pipe has something; `i` is its index. `empty`: it may have had for long.
#[cold]
fn listen_to(b: &Waker, i: u32, events: u32, empty: bool) {
    let Some((p, fd)) = HEARD.get(i).and_then(|p| Some((p, p.fd()?))) else { return };
    let full = p.times.fetch_add(1, Ordering::Relaxed) % EMPTIED == EMPTIED - 1 || empty;
    if full || b.names() {
        read_rings(b, fd);
    }
    if events & (libc::EPOLLHUP | libc::EPOLLERR) as u32 != 0 {
        p.forget();
    }
}

/// Reads the rings of a peer, which may have written anything.
fn read_rings(b: &Waker, fd: i32) {
    let mut bytes = [0u8; 4096];
    for _ in 0..16 {
        // SAFETY: within `bytes`. (The end is non-blocking, and nobody else has it.)
        let n = unsafe { sys::read(fd, bytes.as_mut_ptr(), bytes.len()) }.unwrap_or(0).min(bytes.len());
        let mut last = 0;
        for channel in bytes[..n].chunks_exact(4).map(|c| u32::from_ne_bytes([c[0], c[1], c[2], c[3]])) {
            if core::mem::replace(&mut last, channel) != channel {
                b.note_rung(channel);
            }
        }
        if n < bytes.len() {
            break;
        }
    }
}

/// A channel is unmapped here, and so it is at its other side, perhaps with the last pipe. (To look at all ends each
/// time would take long where there are many.)
pub fn channel_gone() {
    if GONE.fetch_add(1, Ordering::Relaxed) >= HEARD.len() / 4 {
        GONE.store(0, Ordering::Relaxed);
        heard().filter(|p| p.has_ended()).for_each(Heard::forget);
    }
}

/// The next one gives processes other numbers.
pub fn monitor_died() {
    heard().for_each(|p| p.ringer.store(0, Ordering::Relaxed));
}

/// The waker with this index.
pub fn at(i: usize) -> Option<&'static Waker> {
    WAKERS.get(i)
}

fn first(n: usize) -> impl Iterator<Item = &'static Waker> {
    WAKERS.first(n).map(|(_, b)| b)
}

/// Wakers are made in order of their index.
fn made() -> usize {
    made_so_far()
}

fn made_so_far() -> usize {
    (0..MAX).find(|i| WAKERS.get(*i).is_none_or(|b| b.fd() < 0 && !b.used.load(Ordering::Relaxed))).unwrap_or(MAX)
}

/// For what is armed before a sleep on a waker. [`Batch::fence`] lies between arming and the last
/// look: what a peer publishes is seen, or it sees that we sleep.
pub fn arming() -> Batch<'static> {
    // The waker before the look for channels; `ring_all` does the reverse.
    fence(Ordering::SeqCst);
    Batch::new(sys::heavy_fence)
}

/// Wake every thread of this process that sleeps on a waker and may wait for `listener`: something it
/// must arm for has appeared.
pub fn ring_all(listener: u64) {
    fence(Ordering::SeqCst);
    for b in first(made()) {
        let only = b.only.load(Ordering::Relaxed);
        if b.used.load(Ordering::Relaxed) && (only == 0 || only == listener) {
            b.ring_self();
        }
    }
}

/// Wake every thread of this process that sleeps on a waker: what it has armed for is gone.
pub fn ring_everybody() {
    for b in first(made()).filter(|b| b.used.load(Ordering::Relaxed)) {
        b.ring_self();
    }
}

/// In a forked child: what rings is the parent's.
#[link_section = ".text.fsocket_start"]
pub fn become_child() {
    SLEEPERS.put(0);
    for b in first(made_so_far()) {
        for fd in [&b.fd, &b.own] {
            if fd.load(Ordering::Relaxed) >= 0 {
                process::close_own(fd.swap(-1, Ordering::AcqRel));
            }
        }
        b.used.put(false);
        b.transient.put(false);
        b.names.put(false);
    }
    for p in heard() {
        // Not taken out of the instance, which is the parent's as well.
        process::close_own(p.fd.swap(0, Ordering::Relaxed) - 1);
        HEARD.free(HEARD.index(p));
    }
}

/// A descriptor of a waker got another number. (Instances that watch it go on watching the file
/// itself.)
pub fn renumbered(old: i32, new: i32) -> bool {
    let swap = |fd: &Number| fd.compare_exchange(old, new, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    WAKERS.all().any(|b| swap(&b.fd) || swap(&b.own)) || {
        let swap = |p: &Heard| p.fd.compare_exchange(old + 1, new + 1, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        heard().any(swap)
    }
}

/// The waker that has this name in channels.
pub fn by_key(key: u64) -> Option<&'static Waker> {
    first(made()).find(|b| b.key() == key)
}

/// The epoll instance with the ends of peers, while no monitor lives; -1: none.
pub static ENDS: AtomicI32 = AtomicI32::new(-1);

/// For a waker: readable when a process has ended.
pub fn ends() -> Option<i32> {
    Some(ENDS.load(Ordering::Acquire)).filter(|fd| *fd >= 0)
}
