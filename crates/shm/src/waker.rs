//! Wakers: an object on which a thread sleeps when it waits for several things at once.
//!
//! A waker is an epoll instance that only this process has. It watches an eventfd for the
//! process's own threads, and the read ends of the pipes through which peers wake it, all
//! edge-triggered. Each peer process has its own pipe ([`hear`], ADR 38), so no peer can block,
//! drain or fill a pipe that another peer uses.
//!
//! A *ring* writes the number of the channel that has an event into the pipe. The waker reads the
//! number only if its user wants to know. Otherwise a ring only counts as an edge, and its bytes
//! are discarded from time to time.
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
    /// The waker's own index.
    place: AtomicU32,
    /// The epoll instance.
    fd: Number,
    /// The eventfd in the instance.
    own: Number,
    used: AtomicBool,
    /// The waker serves one sleeping thread, not an epoll instance of the program.
    transient: AtomicBool,
    /// The listener on which that thread is in `accept`; 0: the thread waits for other or more
    /// things.
    only: AtomicU64,
    /// Number of edges that were reported.
    rings: AtomicU32,
    /// The user wants to know in which channels peers have rung.
    names: AtomicBool,
    /// Numbers of channels whose peers have rung since [`Waker::rung`] was last asked; 0: none.
    rung: [AtomicU32; NAMED],
    /// `rung` or `crowded` may have an answer.
    any_rung: AtomicBool,
    /// More channels have rung than `rung` has room for.
    crowded: AtomicBool,
}

const NAMED: usize = 64;

static WAKERS: Pieces<Waker, 14, { MAX.div_ceil(14) }> = Pieces::new();
// SAFETY: atomics, and `Number`s, for which zero bytes are valid, too.
unsafe impl Zero for Waker {}

impl Waker {
    pub fn index(&self) -> usize {
        self.place.load(Ordering::Relaxed) as usize
    }
    pub fn fd(&self) -> i32 {
        self.fd.load(Ordering::Relaxed)
    }
    /// The name by which channels identify this waker.
    pub fn key(&self) -> u64 {
        waker_key(process::nonce(), self.index())
    }
    /// Returns the waker to the pool. Its descriptors are kept for the next user.
    pub fn release(&self) {
        self.only.store(0, Ordering::Relaxed);
        if self.transient.swap(false, Ordering::SeqCst) {
            SLEEPERS.fetch_sub(1, Ordering::SeqCst);
        }
        self.used.store(false, Ordering::Release);
    }
    /// The waker serves one sleep of one thread.
    pub fn for_one_sleep(&self) {
        self.transient.store(true, Ordering::SeqCst);
        SLEEPERS.fetch_add(1, Ordering::SeqCst);
    }
    /// The waker serves one `accept`, on this listener.
    pub fn for_listener(&self, id: u64) {
        self.for_one_sleep();
        // This store comes before the look for channels, which follows `arming`.
        self.only.store(id, Ordering::SeqCst);
    }
    pub fn ring_self(&self) {
        let _ = sys::eventfd_ring(self.own.load(Ordering::Relaxed));
    }
    /// Called when an edge-triggered watcher reports this waker. An edge needs no clearing, but
    /// the pipes must be emptied from time to time.
    #[inline]
    pub fn rang(&self) {
        let full = self.rings.fetch_add(1, Ordering::Relaxed) % EMPTIED == EMPTIED - 1;
        if full || self.names.load(Ordering::Relaxed) {
            self.look(full);
        }
    }
    /// Switches on or off that [`Waker::rung`] names the channels of rings.
    pub fn name_channels(&self, on: bool) {
        self.names.store(on, Ordering::Relaxed);
    }
    #[inline]
    pub fn names(&self) -> bool {
        self.names.load(Ordering::Relaxed)
    }
    /// A peer has rung in this channel; 0: the channel is unknown.
    pub fn note_rung(&self, channel: u32) {
        if !self.names.load(Ordering::Relaxed) {
            return;
        }
        // Release: publishes the peer's marks, which came before its ring. (The number is stored
        // even if it is there already, because another thread may be taking that one out now,
        // after it looked at earlier marks.)
        let put = |r: &AtomicU32| r.compare_exchange(0, channel, Ordering::Release, Ordering::Relaxed).is_ok();
        if channel == 0 || !self.rung.iter().any(put) {
            self.crowded.store(true, Ordering::Release);
        }
        // This store comes after those above; `rung` loads in the reverse order.
        self.any_rung.store(true, Ordering::Release);
    }
    /// Has [`Waker::rung`] an answer?
    #[inline]
    pub fn has_rung(&self) -> bool {
        self.any_rung.load(Ordering::Relaxed) && self.names.load(Ordering::Relaxed)
    }
    /// Calls `f` with each channel in which peers have rung since the last call. True: further
    /// channels have rung, too.
    pub fn rung(&self, mut f: impl FnMut(u32)) -> bool {
        if !self.any_rung.load(Ordering::Relaxed) || !self.any_rung.swap(false, Ordering::AcqRel) {
            return false;
        }
        for r in self.rung.iter().filter(|r| r.load(Ordering::Relaxed) != 0) {
            f(r.swap(0, Ordering::Acquire));
        }
        self.crowded.load(Ordering::Relaxed) && self.crowded.swap(false, Ordering::Acquire)
    }
    /// Clears the waker after a ring. Only pipes that may become full are read.
    pub fn clear(&self) {
        self.look(false);
    }
    #[cold]
    fn look(&self, empty: bool) {
        const AT_ONCE: usize = 16;
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; AT_ONCE];
        // The number of rounds is limited by the number of peers, so a peer that rings all the
        // time cannot keep this thread here.
        for _ in 0..MOST as usize / AT_ONCE {
            // SAFETY: `events` has room for AT_ONCE events.
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

/// Wakes the process's threads in `poll`, `select` and `accept`, to look again.
pub fn ring_sleepers() {
    if SLEEPERS.load(Ordering::SeqCst) != 0 {
        for b in first(made()) {
            if b.transient.load(Ordering::SeqCst) {
                b.ring_self();
            }
        }
    }
}

/// Takes a waker for one user.
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

/// Marks in a waker's epoll instance: for its own eventfd, and for the instance that reports ended
/// peers. All lower marks are indices of pipes.
const OWN_MARK: u64 = u64::MAX;
const ENDS_MARK: u64 = u64::MAX - 1;
const OTHER_MARKS: u64 = ENDS_MARK;

/// Adds the instance that reports ended peers to all wakers. Used while no monitor lives.
pub fn all_hear(ends: i32) {
    for b in first(made()).filter(|b| b.fd() >= 0) {
        put(b.fd(), ends, ENDS_MARK);
    }
}

fn make(b: &Waker) -> bool {
    // A forked child may watch its sockets before it listens or connects, so it needs the monitor
    // now.
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
    // Either this thread sees the instance here, or the thread that made the instance sees this
    // waker.
    if let Some(ends) = ends() {
        put(fd, ends, ENDS_MARK);
    }
    true
}

/// Edge-triggered: each ring is an edge, whether or not earlier bytes were read.
fn put(instance: i32, fd: i32, mark: u64) -> bool {
    let ev = libc::epoll_event { events: (libc::EPOLLIN | libc::EPOLLET) as u32, u64: mark };
    sys::epoll_ctl(instance, libc::EPOLL_CTL_ADD, fd, Some(&ev)).is_ok()
}

/// The read end of a peer's pipe. All bytes zero is a valid value.
#[repr(C)]
struct Heard {
    /// The descriptor + 1; 0: not in use.
    fd: AtomicI32,
    waker: AtomicU32,
    /// The monitor's number of the process that rings; 0: the pipe is from a former monitor.
    ringer: AtomicU64,
    /// Number of rings that were heard.
    times: AtomicU32,
    link: AtomicU32,
}

// SAFETY: zero is a valid value of all fields, and only the slab uses `link`.
unsafe impl Slot for Heard {
    fn link(&self) -> &AtomicU32 {
        &self.link
    }
}

/// The most peers that wake this process by pipes. Further ones do so through the monitor.
const MOST: u32 = 1 << 14;
/// Gives back unused address space. The table cannot grow afterwards.
pub fn trim() {
    HEARD.trim();
}
static HEARD: Slab<Heard, MOST, NEAR> = Slab::new();
const NEAR: usize = 16;
/// A pipe is emptied after this many rings. It holds at least 4,096 bytes, and a ring has four. An
/// honest peer writes once for each sleep, and rings through the monitor if the pipe is full.
const EMPTIED: u32 = 256;

/// Channels that have ended since all pipes were last checked.
static GONE: AtomicU32 = AtomicU32::new(0);
/// Rings that came through the monitor: the process that rings, with the count in the low byte.
/// (Two processes that share a place each reset the count of the other.)
static BY_MONITOR: Pieces<AtomicU64, 512, { PLACES / 512 }> = Pieces::new();
const PLACES: usize = 1 << 13;

impl Heard {
    fn fd(&self) -> Option<i32> {
        self.fd.load(Ordering::Acquire).checked_sub(1).filter(|fd| *fd >= 0)
    }

    /// Has the writer closed its end? Then its process has ended, or shares no channel with this
    /// one any more.
    fn has_ended(&self) -> bool {
        let Some(fd) = self.fd() else { return true };
        let mut p = libc::pollfd { fd, events: 0, revents: 0 };
        // SAFETY: the pointer and the count describe one local `pollfd`.
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
    /// A process has rung through the monitor. True: it has done so often enough to get a pipe.
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

/// Takes the requested pipe, and watches it from now on. Returns true if `fd` was taken.
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

/// A peer's pipe has bytes; `i` is its index. `empty`: read the bytes even if no limit is reached.
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

/// Reads the rings of a peer. A hostile peer may have written anything.
fn read_rings(b: &Waker, fd: i32) {
    let mut bytes = [0u8; 4096];
    for _ in 0..16 {
        // SAFETY: the pointer and the length describe `bytes`. (The read does not block: the end
        // is non-blocking, and no other process has it.)
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

/// A channel was unmapped here and at its other side, perhaps the last one that used a pipe.
/// (Checking all pipes each time would take long if there are many.)
pub fn channel_gone() {
    if GONE.fetch_add(1, Ordering::Relaxed) >= HEARD.len() / 4 {
        GONE.store(0, Ordering::Relaxed);
        heard().filter(|p| p.has_ended()).for_each(Heard::forget);
    }
}

/// Called when the monitor has died: the next monitor gives processes other numbers.
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

/// The number of wakers that exist. They are made in the order of their index.
fn made() -> usize {
    made_so_far()
}

fn made_so_far() -> usize {
    (0..MAX).find(|i| WAKERS.get(*i).is_none_or(|b| b.fd() < 0 && !b.used.load(Ordering::Relaxed))).unwrap_or(MAX)
}

/// Collects the words that a thread arms before it sleeps on a waker. The caller runs
/// [`Batch::fence`] between arming and its last look. So either this thread sees what a peer
/// publishes, or the peer sees that this thread sleeps.
pub fn arming() -> Batch<'static> {
    // The waker is taken before the look for channels; `ring_all` works in the reverse order.
    fence(Ordering::SeqCst);
    Batch::new(sys::heavy_fence)
}

/// Wakes every thread of this process that sleeps on a waker and may wait for `listener`, because
/// the thread must arm a new channel.
pub fn ring_all(listener: u64) {
    fence(Ordering::SeqCst);
    for b in first(made()) {
        let only = b.only.load(Ordering::Relaxed);
        if b.used.load(Ordering::Relaxed) && (only == 0 || only == listener) {
            b.ring_self();
        }
    }
}

/// Wakes every thread of this process that sleeps on a waker, because something it has armed is
/// gone.
pub fn ring_everybody() {
    for b in first(made()).filter(|b| b.used.load(Ordering::Relaxed)) {
        b.ring_self();
    }
}

/// In a forked child: closes the pipes and the eventfds, which belong to the parent.
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
        // Not removed from the epoll instance, which the parent still uses.
        process::close_own(p.fd.swap(0, Ordering::Relaxed) - 1);
        HEARD.free(HEARD.index(p));
    }
}

/// The library has moved a descriptor from `old` to `new`. True: it belongs to a waker. Epoll instances that watch the
/// descriptor watch the open file, so they need no change.
pub fn renumbered(old: i32, new: i32) -> bool {
    let swap = |fd: &Number| fd.compare_exchange(old, new, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    WAKERS.all().any(|b| swap(&b.fd) || swap(&b.own)) || {
        let swap = |p: &Heard| p.fd.compare_exchange(old + 1, new + 1, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        heard().any(swap)
    }
}

/// The waker with this name in channels.
pub fn by_key(key: u64) -> Option<&'static Waker> {
    first(made()).find(|b| b.key() == key)
}

/// The epoll instance that reports ended peer processes while no monitor lives; -1: none.
pub static ENDS: AtomicI32 = AtomicI32::new(-1);

/// A descriptor for wakers that is readable when a watched process has ended.
pub fn ends() -> Option<i32> {
    Some(ENDS.load(Ordering::Acquire)).filter(|fd| *fd >= 0)
}
