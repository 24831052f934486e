//! Listeners: a socket that listens in the kernel, with SYN queues beside it.
//!
//! Long: the state of a listener and its transitions; it wants a type of its own for each state.

use crate::chan::{self, Chan};
use crate::lock::Lock;
use crate::options::DEFER_ACCEPT;
use crate::pieces::{Pieces, Zero};
use crate::table::{Desc, Kind};
use crate::upcalls::watcher;
use crate::values;
use crate::{ctl, inspect, process, socks, stats, unhooked, unjoined};
use core::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, AtomicU64, Ordering};
use fsocket_abi::arena::{Counter, Reason};
use fsocket_abi::channel::WORKERS;
use fsocket_proto::values::{Unpublishing, Work};
use fsocket_proto::{answer, request, Addr};
use fsocket_sync::arrivals::Arrivals;
use fsocket_sys::{self as sys, Errno};

mod crowd;
mod queues;

/// The most listeners of a process.
pub const MAX: usize = 1024;
/// The most channels of a listener.
const CHANS: usize = fsocket_proto::CHANNELS_OF_LISTENER;
/// After this many connections from its own queue, a worker takes one from the queue of a busy
/// worker (Affinity-Accept, 3.3.1).
const FAIR: u32 = 5;

pub struct Listener {
    /// The number that the monitor gave the listener; 0: free.
    pub id: AtomicU64,
    /// Worker number + 1. 0: not registered as a worker. WORKERS + 1: there are too many workers,
    /// so this one has no queue and only steals.
    worker: AtomicU32,
    /// The process wants to be a worker, but the monitor has not answered yet: see
    /// [`crate::unjoined`].
    joins: AtomicBool,
    /// This process has inherited the listener from its parent.
    inherited: AtomicBool,
    /// Index of the description that listens.
    desc: AtomicU32,
    /// When it was registered, in nanoseconds.
    since: AtomicU64,
    /// Number of entries in [`Listener::places`].
    n: AtomicU32,
    /// The channel with which the next look at the queues begins.
    next: AtomicU32,
    /// Number of accepted connections since the last look at the kernel's queue.
    pub since_kernel: AtomicU32,
    /// Number of connections taken from the own queue since the last one from a busy worker's
    /// queue.
    fair: AtomicU32,
    pub any: AtomicBool,
    /// A process with other rights accepts on this listener, too. So waiting connections must go
    /// to the kernel.
    wanted_by_others: AtomicBool,
    /// A channel of this listener cannot be mapped.
    cannot_serve: AtomicBool,
    /// Connections moved from the SYN queues to the kernel's queue because no worker took them,
    /// and new ones go there, too. See [`fsocket_proto::notice::Untaken`].
    untaken: AtomicBool,
    /// The backlog that the program passed to the kernel, plus one; 0: unknown.
    backlog: AtomicU32,
    /// Counts all connections that came. Never reset, not even when another listener takes this
    /// place.
    arrivals: Arrivals,
    addr: Lock<Addr>,
    /// Held to accept from the kernel's queue when the call must not block.
    pub turn: Lock<()>,
}

static LISTENERS: Pieces<Listener, 51, { MAX.div_ceil(51) }> = Pieces::new();
// SAFETY: all fields are atomics, and locks around plain numbers, for which zero bytes are valid.
unsafe impl Zero for Listener {}

/// For each listener: indices + 1 of its channels. (Apart from the other fields, because a search
/// for a listener's number reads these of all listeners.)
static PLACES: Pieces<Places, 8, { MAX / 8 }> = Pieces::new();
/// The channels of the first listeners. (The table above takes some MiB, and a fork would copy a
/// page table for it.)
static NEAR_PLACES: [Places; NEAR] = [const { [const { AtomicU16::new(0) }; CHANS] }; NEAR];
const NEAR: usize = 4;
type Places = [AtomicU16; CHANS];

/// Number of entries that were ever used, so that a fork need not read all of them.
#[link_section = ".data.fsocket_start"]
static USED: AtomicU32 = AtomicU32::new(0);

pub fn used() -> impl Iterator<Item = &'static Listener> + Clone {
    LISTENERS.first(USED.load(Ordering::Acquire) as usize).map(|(_, l)| l)
}

/// The index of a listener in the table. It is the same in all processes of the fork group that
/// have inherited the listener.
pub fn place_of(l: &Listener) -> usize {
    LISTENERS.index(l).unwrap_or(MAX)
}

pub fn at(place: usize) -> Option<&'static Listener> {
    LISTENERS.get(place).filter(|_| place < USED.load(Ordering::Acquire) as usize)
}

/// The listener of a description, if it listens.
pub fn of(d: &Desc) -> Option<&'static Listener> {
    d.listening().object().filter(|_| d.is(Kind::Listener)).and_then(|place| LISTENERS.get(place as usize))
}

/// Called after the kernel's `listen` has succeeded: tells the monitor. If that fails, only the
/// kernel serves the listener. True: the program that this one has replaced was a worker of the
/// listener.
pub fn registered(fd: i32, d: &'static Desc) -> bool {
    register(fd, d).unwrap_or_else(|why| {
        stats::fall_back(why);
        false
    })
}

fn register(fd: i32, d: &'static Desc) -> core::result::Result<bool, Reason> {
    if let Some(l) = of(d) {
        l.note_backlog(fd);
        return Ok(false); // a second listen() only changes the backlog
    }
    if d.unconnected().take_forked() {
        values::adopt(fd, d);
    }
    ctl::wanted();
    let _telling = crowd::Telling::begin().ok_or(Reason::Resource)?;
    unhooked::noticed_now();
    if !process::enabled() {
        return Err(Reason::Disabled);
    }
    socks::arena().ok_or(Reason::Resource)?;
    let defers = d.options().value(DEFER_ACCEPT) > 0;
    if defers || d.unconnected().is_for_kernel() {
        return Err(Reason::Option);
    }
    // A client that opens a connection relies on this process to map the channel.
    if !chan::mappable() || !chan::reserve() {
        return Err(Reason::Resource);
    }
    let addr = inspect::bound_address(fd).ok_or(Reason::Option)?;
    let answer::Listen { listener, worked } = match ctl::request(shown(d), Some(fd)) {
        Ok((answer, _)) => answer,
        // The program shows the listener to the next monitor, under this number.
        Err(_) if ctl::may_come() => {
            stats::fall_back(ctl::why_none());
            answer::Listen { listener: crate::successor::cookie(fd).ok_or(Reason::Resource)?, worked: false }
        }
        Err(Errno::EIO) => return Err(ctl::why_none()),
        Err(_) => return Err(Reason::Resource),
    };
    let (i, l) = (0..MAX)
        .map_while(|i| Some((i, LISTENERS.make(i).filter(|_| i < NEAR || PLACES.make(i - NEAR).is_some())?)))
        .find(|(_, l)| l.id.compare_exchange(0, listener, Ordering::AcqRel, Ordering::Relaxed).is_ok())
        .ok_or(Reason::Resource)?;
    USED.fetch_max(i as u32 + 1, Ordering::AcqRel);
    l.worker.store(0, Ordering::Relaxed);
    l.joins.store(false, Ordering::Relaxed);
    l.inherited.store(false, Ordering::Relaxed);
    l.n.store(0, Ordering::Relaxed);
    l.wanted_by_others.store(false, Ordering::Relaxed);
    l.cannot_serve.store(false, Ordering::Relaxed);
    l.untaken.store(false, Ordering::Relaxed);
    l.note_backlog(fd);
    if let Ok(mut a) = l.addr.lock() {
        *a = addr;
    }
    l.desc.store(d.index(), Ordering::Relaxed);
    l.since.store(sys::now_ns(), Ordering::Relaxed);
    d.listen(i as u32);
    stats::count(Counter::Listen);
    (watcher().became_listener)(d);
    Ok(worked)
}

/// The message that shows a listener to the monitor.
fn shown(d: &Desc) -> request::Listen {
    request::Listen { held_elsewhere: d.listening().is_held_elsewhere() }
}

/// Called for another socket that listens only in the kernel. If a listener of the library has the
/// same port, the new socket may be the better match for some clients. So these clients must ask
/// the monitor again.
pub fn came_beside(fd: i32) {
    let Some(reg) = ctl::registry() else { return };
    let Some(addr) = inspect::bound_address(fd) else { return };
    let n = (crate::route::volatile(&reg.entries) as usize).min(fsocket_proto::registry::ENTRIES);
    if reg.entry.iter().take(n).any(|e| crate::route::volatile(&e.addr).port == addr.port) {
        ctl::tell(request::Nearer { addr }, None);
    }
}

/// Called for an unconnected socket before a fork, when it is unknown what will become of it. From
/// now on the kernel serves it, because two processes cannot choose different paths. (But if one
/// of them calls `listen`, it may listen over shared memory, and then all acceptors must do so.)
pub fn keep_for_fork_group(d: &'static Desc) {
    if d.has_items() {
        // An epoll instance that only the kernel serves would not notice the SYN queues.
        (watcher().leave_to_kernel)(d);
        return crate::table::forget(d);
    }
    // Another thread may be connecting the socket. Then it must not change.
    if d.bind_if_fresh() {
        d.placeholder().mark_changed();
        d.unconnected().mark_forked();
    }
}

/// Called when a thread wants to accept on this socket, or waits for a connection. Registers the
/// listener if another process of the fork group has called `listen`.
#[inline]
pub fn look_at_fork_group(fd: i32, d: &'static Desc) {
    if d.unconnected().was_forked() && d.kind() == Kind::Bound {
        join_fork_group(fd, d);
    }
}

#[cold]
fn join_fork_group(fd: i32, d: &'static Desc) {
    let mut listens = [0u8; 4];
    if sys::getsockopt(fd, libc::SOL_SOCKET, libc::SO_ACCEPTCONN, &mut listens).is_err() || listens == [0; 4] {
        return;
    }
    registered(fd, d);
    crate::zone::successor::inherited(fd);
}

/// The monitor has handed over a channel of listener `id`.
pub fn add_channel(id: u64, c: &'static Chan) {
    let Some(l) = used().find(|l| l.id.load(Ordering::Acquire) == id) else { return };
    let v = c.index() as u16 + 1;
    let n = l.n.load(Ordering::Relaxed) as usize;
    if l.places().iter().take(n).any(|x| x.load(Ordering::Relaxed) == v) {
        return;
    }
    let free = l.places().iter().take(n).find(|x| x.load(Ordering::Relaxed) == 0);
    match free {
        Some(x) => x.store(v, Ordering::Release),
        None if n < CHANS => {
            l.places()[n].store(v, Ordering::Relaxed);
            l.n.store(n as u32 + 1, Ordering::Release);
        }
        None => {}
    }
    (watcher().listener_changed)(id);
}

/// The client of a channel has ended. Connections that it opened before may still be in the queue,
/// and are accepted if their slots are valid.
pub fn drop_channel(c: &Chan) {
    let v = c.index() as u16 + 1;
    for l in used() {
        if l.id.load(Ordering::Acquire) == c.listener.load(Ordering::Relaxed) {
            l.drop_places(|place| place == v);
        }
    }
}

/// The process has closed the last descriptor of a listener.
pub fn closed(d: &Desc) {
    ended(d, false);
}

/// The program has shut down the socket: other processes of the fork group that hold it stop
/// listening, too.
pub fn shut(d: &Desc) {
    ended(d, true);
}

fn ended(d: &Desc, for_all: bool) {
    if let Some(l) = of(d) {
        let id = l.id.load(Ordering::Relaxed);
        let m = request::Unlisten { listener: id, for_all };
        // Waits for the answer, so that connections in the queues are reset when `close` returns.
        // A forked child that has no queue, and closes a listener that its parent keeps (a process
        // for each connection), does not wait.
        let waits = for_all || l.is_worker() || !l.inherited.load(Ordering::Relaxed);
        let answered = waits && ctl::request(m, None).is_ok();
        if !answered {
            ctl::tell(m, None);
        }
        if waits && !answered {
            // The port may belong to another listener before the monitor notices.
            chan::retire_of(id);
        }
        if !l.inherited.load(Ordering::Relaxed) {
            crowd::ended(l.since.load(Ordering::Relaxed));
        }
        l.drop_places(|_| true);
        l.n.store(0, Ordering::Relaxed);
        l.id.store(0, Ordering::Release);
    }
}

pub fn exec_prepared() -> impl Iterator<Item = &'static Desc> {
    crate::table::all().filter(|d| d.kind() == Kind::Listener && d.listening().is_exec_prepared())
}

/// Has this process prepared a listener for the next program?
pub fn any_exec_prepared() -> bool {
    exec_prepared().next().is_some()
}

/// Asks the monitor to unpublish a listener. True: done, so no further connection comes to its
/// queues.
pub fn unpublish_id(id: u64, how: Unpublishing) -> bool {
    let m = request::Unpublish { listener: id, how };
    let desc = used().find(|l| l.id.load(Ordering::Acquire) == id).and_then(Listener::desc);
    id != 0 && ctl::request(m, desc.and_then(crate::table::fd_of)).is_ok()
}

/// The monitor reports that connections to listener `id` have waited in the SYN queues for too
/// long ([`fsocket_proto::notice::Untaken`]).
pub fn untaken(id: u64) {
    for l in used().filter(|l| l.id.load(Ordering::Acquire) == id) {
        l.untaken.store(true, Ordering::Release);
    }
}

/// Does this process hold a listener?
pub fn any() -> bool {
    used().any(|l| l.id.load(Ordering::Relaxed) != 0)
}

/// In a forked child: it is not registered as a worker yet.
#[link_section = ".text.fsocket_start"]
pub fn become_child() {
    crate::zone::become_child();
    crowd::become_child();
    for l in used() {
        l.worker.store(0, Ordering::Relaxed);
        l.joins.store(false, Ordering::Relaxed);
        l.inherited.store(true, Ordering::Relaxed);
        l.arrivals.become_child();
        l.addr.reset_after_fork();
        l.turn.reset_after_fork();
    }
}

/// A set of this process's listeners.
pub type Those = crate::bits::Bits<{ MAX / 64 }>;

/// A listener may be marked for [`take_wanted_by_others`].
static WANTED_BY_OTHERS: AtomicBool = AtomicBool::new(false);

/// The monitor reports that workers with other rights want to accept on listener `id`.
pub fn wanted_by_others(id: u64) {
    for l in used().filter(|l| l.id.load(Ordering::Acquire) == id) {
        l.wanted_by_others.store(true, Ordering::Relaxed);
        WANTED_BY_OTHERS.store(true, Ordering::Release);
        ctl::defer();
    }
}

/// Returns these listeners, each once.
#[inline]
pub fn take_wanted_by_others() -> impl Iterator<Item = &'static Desc> {
    let any = WANTED_BY_OTHERS.load(Ordering::Relaxed) && WANTED_BY_OTHERS.swap(false, Ordering::AcqRel);
    let wanted = |d: &&Desc| of(d).is_some_and(|l| l.wanted_by_others.swap(false, Ordering::Relaxed));
    any.then(|| crate::table::all().filter(wanted)).into_iter().flatten()
}

/// A listener may be marked for [`take_unserved`].
static UNSERVED: AtomicBool = AtomicBool::new(false);

/// A channel of listener `id` cannot be mapped. This is only noted, because the message may arrive
/// while the process waits for another answer of the monitor, and the next step needs an answer,
/// too.
pub fn cannot_serve(id: u64) {
    for l in used().filter(|l| l.id.load(Ordering::Acquire) == id) {
        l.cannot_serve.store(true, Ordering::Relaxed);
        UNSERVED.store(true, Ordering::Release);
        ctl::defer();
    }
}

/// Returns these listeners, each once.
#[inline]
pub fn take_unserved() -> impl Iterator<Item = u64> {
    let any = UNSERVED.load(Ordering::Relaxed) && UNSERVED.swap(false, Ordering::AcqRel);
    let those = used().filter(|l| l.cannot_serve.swap(false, Ordering::Relaxed)).map(|l| l.id.load(Ordering::Relaxed));
    any.then_some(those).into_iter().flatten()
}

/// Repeats requests to become a worker that the monitor has not answered.
#[inline]
pub fn join_again() {
    if unjoined::take() {
        let those = used().filter(|l| l.id.load(Ordering::Relaxed) != 0 && l.joins.load(Ordering::Relaxed));
        those.for_each(Listener::join);
    }
}

/// Forgets the channels of all listeners before they are unmapped; the listeners stay. Returns the
/// listeners of which this process was a worker.
pub fn leave_channels() -> Those {
    let those = Those::new();
    for (i, l) in used().enumerate() {
        those.set(i as i32, l.worker.swap(0, Ordering::AcqRel) != 0);
        l.drop_places(|_| true);
        l.n.store(0, Ordering::Release);
    }
    those
}

/// Becomes a worker of these listeners again.
pub fn join_those(those: &Those) {
    for (i, l) in used().enumerate() {
        if those.has(i as i32) && l.id.load(Ordering::Relaxed) != 0 {
            l.join();
        }
    }
}

/// Shows a new monitor the listeners of this process, as `listen` does.
pub fn announce_again() {
    for d in crate::table::all() {
        let (Some(l), Some(fd)) = (of(d), crate::table::fd_of(d)) else { continue };
        // If the monitor refuses, only the kernel serves the listener from now on. Waiting
        // connections are still accepted.
        let Ok((m, _)) = ctl::request(shown(d), Some(fd)) else { continue };
        if l.id.swap(m.listener, Ordering::AcqRel) != m.listener {
            l.chans().for_each(|c| c.listener.store(m.listener, Ordering::Relaxed));
        }
    }
}

/// Becomes a worker of the same listeners under a new monitor. The process keeps its worker
/// numbers if possible, because connections wait in the queues with these numbers.
pub fn work_again() {
    for l in used().filter(|l| l.id.load(Ordering::Relaxed) != 0) {
        let before = l.worker.swap(0, Ordering::AcqRel);
        if before != 0 || l.joins.load(Ordering::Relaxed) {
            l.join_as(if before as usize <= WORKERS { before } else { 0 });
        }
    }
}

/// Becomes a worker of every listener.
pub fn join_all() {
    for l in used().filter(|l| l.id.load(Ordering::Relaxed) != 0) {
        l.join();
    }
}

/// Handles an answer to WORKER that came when no thread waited for it any more: the monitor counts
/// this process as a worker.
pub fn joined_late(id: u64, number: u64) {
    if let Some(l) = used().find(|l| id != 0 && l.id.load(Ordering::Acquire) == id) {
        if (number as usize) < WORKERS {
            let _ = l.worker.compare_exchange(0, number as u32 + 1, Ordering::AcqRel, Ordering::Relaxed);
        }
    }
}

impl Listener {
    /// Is this process a worker of the listener?
    pub fn is_worker(&self) -> bool {
        self.worker.load(Ordering::Relaxed) != 0
    }

    /// Becomes a worker: from now on this process has a SYN queue, and the monitor hands it every
    /// channel of the listener.
    pub fn join(&self) {
        self.join_as(0);
    }

    /// Becomes a worker with the number + 1 that the process had under another monitor; 0: any
    /// number.
    fn join_as(&self, before: u32) {
        if self.is_worker() {
            return;
        }
        if socks::arena().is_none() {
            if socks::fails_for_now() && !ctl::dead() {
                self.join_later();
            }
            return;
        }
        if ctl::dead() {
            self.joins.store(ctl::may_come(), Ordering::Relaxed);
            return;
        }
        let join = request::Worker {
            listener: self.id.load(Ordering::Relaxed),
            number: before.checked_sub(1),
            work: Work::Looks,
        };
        let w = match ctl::request(join, None) {
            Ok((a, _)) if (a.number as usize) < WORKERS => {
                self.untaken.store(a.untaken, Ordering::Relaxed);
                a.number + 1
            }
            // EPERM, EACCES: the process gets no channels, so it cannot steal.
            Ok(_) | Err(Errno::EAGAIN | Errno::EPERM | Errno::EACCES) => WORKERS as u32 + 1,
            Err(Errno::EOPNOTSUPP) => {
                // The shared memory belongs to processes with other rights, so it may not be used
                // any more.
                stats::fall_back(Reason::Option);
                self.drop_places(|_| true);
                self.n.store(0, Ordering::Release);
                WORKERS as u32 + 1
            }
            Err(Errno::EIO) => {
                self.join_later();
                return;
            }
            Err(_) => return,
        };
        self.joins.store(false, Ordering::Relaxed);
        self.worker.store(w, Ordering::Relaxed);
    }

    /// Must this process empty the kernel's queue before it uses the SYN queues again?
    #[inline]
    pub fn is_untaken(&self) -> bool {
        self.untaken.load(Ordering::Relaxed)
    }

    /// Called when the kernel's queue is empty: new connections may use shared memory again.
    #[cold]
    pub fn is_taken_again(&self) {
        if !self.untaken.swap(false, Ordering::AcqRel) || ctl::dead() {
            return;
        }
        // A connection that came to the kernel's queue meanwhile is older than later ones in the
        // SYN queues.
        self.since_kernel.store(u32::MAX, Ordering::Relaxed);
        let (id, number) = (self.id.load(Ordering::Relaxed), self.worker.load(Ordering::Relaxed));
        let accepts = request::Worker { listener: id, number: number.checked_sub(1), work: Work::Accepts };
        let still = ctl::request(accepts, None).map_or(true, |(a, _)| a.untaken);
        self.untaken.store(still && self.id.load(Ordering::Relaxed) == id, Ordering::Relaxed);
    }

    /// Asks again soon. Clients may wait for this process already, so it sleeps only briefly until
    /// it has joined.
    fn join_later(&self) {
        self.joins.store(true, Ordering::Relaxed);
        unjoined::note();
        ctl::defer();
    }

    fn note_backlog(&self, fd: i32) {
        let limit = fsocket_reuseport::listener::backlog(fd).map_or(0, |(limit, _)| limit.min(i32::MAX as u32) + 1);
        self.backlog.store(limit, Ordering::Relaxed);
    }

    /// The backlog that the program has set. The kernel's present value may differ, because
    /// another process of the fork group can raise it for a moment.
    pub fn backlog(&self) -> Option<i32> {
        self.backlog.load(Ordering::Relaxed).checked_sub(1).map(|limit| limit as i32)
    }

    pub fn addr(&self) -> Addr {
        self.addr.lock().map(|a| *a).unwrap_or_default()
    }

    /// The description that listens, unless the listener has just ended.
    pub fn desc(&self) -> Option<&'static Desc> {
        let is_it = |d: &&Desc| of(d).is_some_and(|l| core::ptr::eq(l, self));
        crate::table::DESCS.get(self.desc.load(Ordering::Relaxed)).filter(is_it)
    }

    fn places(&self) -> &'static [AtomicU16] {
        let place = place_of(self);
        NEAR_PLACES.get(place).or_else(|| PLACES.get(place - NEAR)).map_or(&[], |places| places)
    }

    /// Has the listener a channel, or had it one earlier?
    pub fn has_channels(&self) -> bool {
        self.n.load(Ordering::Acquire) != 0
    }

    pub fn chans(&self) -> impl Iterator<Item = &'static Chan> + '_ {
        self.placed().filter(|c| c.id.load(Ordering::Relaxed) != 0 && !c.is_broken())
    }

    fn placed(&self) -> impl Iterator<Item = &'static Chan> + '_ {
        let n = (self.n.load(Ordering::Acquire) as usize).min(CHANS);
        self.places().iter().take(n).filter_map(|x| match x.load(Ordering::Acquire) {
            0 => None,
            i => chan::CHANS.get(i as u32 - 1),
        })
    }

    /// Removes channels before their memory is unmapped. Connections that came through them stay
    /// counted.
    fn drop_places(&self, which: impl Fn(u16) -> bool) {
        let n = (self.n.load(Ordering::Relaxed) as usize).min(CHANS);
        let out = |x: &AtomicU16| match x.load(Ordering::Relaxed) {
            v if v != 0 && which(v) => {
                x.store(0, Ordering::Release);
                chan::CHANS.get(u32::from(v) - 1).map_or(0, Chan::arrivals)
            }
            _ => 0,
        };
        self.arrivals.leave(|| self.places().iter().take(n).map(out).sum());
    }
}
