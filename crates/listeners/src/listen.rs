//! Listeners: the kernel's, with SYN queues beside it.
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

/// Listeners per process.
pub const MAX: usize = 1024;
/// Channels per listener.
const CHANS: usize = fsocket_proto::CHANNELS_OF_LISTENER;
/// Connections of the own queue for one of a busy worker's (Affinity-Accept, 3.3.1).
const FAIR: u32 = 5;

pub struct Listener {
    /// Monitor's number; 0: free.
    pub id: AtomicU64,
    /// Worker number + 1; 0: not registered as a worker. WORKERS + 1: there
    /// were too many, this one only steals.
    worker: AtomicU32,
    /// It wants to be one, and the monitor has not answered: see [`crate::unjoined`].
    joins: AtomicBool,
    /// This process has it from its parent.
    inherited: AtomicBool,
    /// The description that listens.
    desc: AtomicU32,
    /// Entries of [`Listener::places`].
    n: AtomicU32,
    /// Where the next look at the queues starts.
    next: AtomicU32,
    /// Accepts since the kernel's queue was last looked at.
    pub since_kernel: AtomicU32,
    /// Taken from the own queue since the last turn of a busy worker's.
    fair: AtomicU32,
    pub any: AtomicBool,
    /// A process with other rights accepts there, too: what waits is to go to the kernel.
    wanted_by_others: AtomicBool,
    /// Connections are in the kernel's queue that were in ours before, and new ones go there. See [`fsocket_proto::notice::Untaken`].
    untaken: AtomicBool,
    /// The program's own backlog, as the kernel has taken it, plus one; 0: not known.
    backlog: AtomicU32,
    /// Connections that have come. Never reset, also for another listener in this place.
    arrivals: Arrivals,
    addr: Lock<Addr>,
}

static LISTENERS: Pieces<Listener, 51, { MAX.div_ceil(51) }> = Pieces::new();
// SAFETY: atomics and a lock around plain numbers.
unsafe impl Zero for Listener {}

/// Channel index + 1, by listener. (Not among the rest of it: all listeners are looked through for one with a number.)
static PLACES: Pieces<Places, 8, { MAX / 8 }> = Pieces::new();
/// Of the first listeners. (Not in a table of MiB: a fork would copy a page table for its beginning.)
static NEAR_PLACES: [Places; NEAR] = [const { [const { AtomicU16::new(0) }; CHANS] }; NEAR];
const NEAR: usize = 4;
type Places = [AtomicU16; CHANS];

/// Entries that were ever used: a fork must not touch all of them.
#[link_section = ".data.fsocket_start"]
static USED: AtomicU32 = AtomicU32::new(0);

pub fn used() -> impl Iterator<Item = &'static Listener> + Clone {
    LISTENERS.first(USED.load(Ordering::Acquire) as usize).map(|(_, l)| l)
}

/// Where it lies in the table, the same in all processes of the fork group that have it by inheritance.
pub fn place_of(l: &Listener) -> usize {
    LISTENERS.index(l).unwrap_or(MAX)
}

pub fn at(place: usize) -> Option<&'static Listener> {
    LISTENERS.get(place).filter(|_| place < USED.load(Ordering::Acquire) as usize)
}

/// The descriptor's listener, if it is one.
pub fn of(d: &Desc) -> Option<&'static Listener> {
    d.listening().object().filter(|_| d.is(Kind::Listener)).and_then(|place| LISTENERS.get(place as usize))
}

/// The kernel's `listen` has succeeded: tell the monitor. Failing to is no
/// error, the listener then is the kernel's alone. True: the program that this
/// one has replaced was a worker of it.
pub fn registered(fd: i32, d: &'static Desc) -> bool {
    register(fd, d).unwrap_or_else(|why| {
        stats::fall_back(why);
        false
    })
}

fn register(fd: i32, d: &'static Desc) -> core::result::Result<bool, Reason> {
    if let Some(l) = of(d) {
        l.note_backlog(fd);
        return Ok(false); // listen() again only changes the backlog
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
    // A client that opens a connection to us counts on our mapping its channel.
    if !chan::mappable() || !chan::reserve() {
        return Err(Reason::Resource);
    }
    let addr = inspect::bound_address(fd).ok_or(Reason::Option)?;
    let answer::Listen { listener, worked } = match ctl::request(shown(d), Some(fd)) {
        Ok((answer, _)) => answer,
        // It is shown to the one that comes, under the number that it will have then.
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
    l.untaken.store(false, Ordering::Relaxed);
    l.note_backlog(fd);
    if let Ok(mut a) = l.addr.lock() {
        *a = addr;
    }
    l.desc.store(d.index(), Ordering::Relaxed);
    d.listen(i as u32);
    stats::count(Counter::Listen);
    (watcher().became_listener)(d);
    Ok(worked)
}

/// What the monitor is told of a listener that it is shown.
fn shown(d: &Desc) -> request::Listen {
    request::Listen { held_elsewhere: d.listening().is_held_elsewhere() }
}

/// A socket listens that is the kernel's alone. Where one of ours has the same port it may be nearer to
/// some, who have to ask again.
pub fn came_beside(fd: i32) {
    let Some(reg) = ctl::registry() else { return };
    let Some(addr) = inspect::bound_address(fd) else { return };
    let n = (crate::route::volatile(&reg.entries) as usize).min(fsocket_proto::registry::ENTRIES);
    if reg.entry.iter().take(n).any(|e| crate::route::volatile(&e.addr).port == addr.port) {
        ctl::tell(request::Nearer { addr }, None);
    }
}

/// The process is about to fork, and what becomes of this socket is open. It is the kernel's
/// from here on, because two processes cannot decide it differently; but the one that calls `listen`
/// may listen over shared memory, and then all that accept have to.
pub fn keep_for_fork_group(d: &'static Desc) {
    if d.has_items() {
        // An instance that only the kernel serves would not learn of our queues.
        (watcher().leave_to_kernel)(d);
        return crate::table::forget(d);
    }
    // Another thread may be connecting it, and then it is a connection's, not ours to change.
    if d.bind_if_fresh() {
        d.placeholder().mark_changed();
        d.unconnected().mark_forked();
    }
}

/// A thread wants to accept on it, or waits for that: has another process of the fork group called `listen`?
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

/// A channel was handed to us for listener `id`.
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

/// The client of a channel is gone; its queue may still hold connections that
/// it opened before: they are accepted as long as the slots say so.
pub fn drop_channel(c: &Chan) {
    let v = c.index() as u16 + 1;
    for l in used() {
        if l.id.load(Ordering::Acquire) == c.listener.load(Ordering::Relaxed) {
            l.drop_places(|place| place == v);
        }
    }
}

/// The last descriptor of a listener is closed in this process.
pub fn closed(d: &Desc) {
    ended(d, false);
}

/// The socket is shut down: processes of the fork group that hold it do not listen either.
pub fn shut(d: &Desc) {
    ended(d, true);
}

fn ended(d: &Desc, for_all: bool) {
    if let Some(l) = of(d) {
        let id = l.id.load(Ordering::Relaxed);
        let m = request::Unlisten { listener: id, for_all };
        // With an answer: what waits in our queues is reset when `close` returns. A forked child that has no
        // queue, and closes what its parent goes on with (a process for each connection), waits for nothing.
        // Nor does one that reads messages of the monitor (`give_up`).
        let waits = for_all || l.is_worker() || !l.inherited.load(Ordering::Relaxed);
        let answered = waits && ctl::request(m, None).is_ok();
        if !answered {
            ctl::tell(m, None);
        }
        if waits && !answered {
            // The port may be another listener's before the monitor knows.
            chan::retire_of(id);
        }
        l.drop_places(|_| true);
        l.n.store(0, Ordering::Relaxed);
        l.id.store(0, Ordering::Release);
    }
}

pub fn exec_prepared() -> impl Iterator<Item = &'static Desc> {
    crate::table::all().filter(|d| d.kind() == Kind::Listener && d.listening().is_exec_prepared())
}

/// Has this process a listener that it has prepared for the next program?
pub fn any_exec_prepared() -> bool {
    exec_prepared().next().is_some()
}

/// `how`: of [`fsocket_proto::unpublish`]. True: done, and no connection comes to its queues from here on.
pub fn unpublish_id(id: u64, how: Unpublishing) -> bool {
    let m = request::Unpublish { listener: id, how };
    let desc = used().find(|l| l.id.load(Ordering::Acquire) == id).and_then(Listener::desc);
    id != 0 && ctl::request(m, desc.and_then(crate::table::fd_of)).is_ok()
}

/// Connections to listener `id` waited in its queues for too long ([`fsocket_proto::notice::Untaken`]).
pub fn untaken(id: u64) {
    for l in used().filter(|l| l.id.load(Ordering::Acquire) == id) {
        l.untaken.store(true, Ordering::Release);
    }
}

/// Does this process hold any listener?
pub fn any() -> bool {
    used().any(|l| l.id.load(Ordering::Relaxed) != 0)
}

/// In a forked child: registered nowhere yet.
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
    }
}

/// Some of this process's listeners.
pub type Those = crate::bits::Bits<{ MAX / 64 }>;

/// Are there any that were not taken by [`take_wanted_by_others`]?
static WANTED_BY_OTHERS: AtomicBool = AtomicBool::new(false);

/// Workers with other rights want to accept on listener `id`.
pub fn wanted_by_others(id: u64) {
    for l in used().filter(|l| l.id.load(Ordering::Acquire) == id) {
        l.wanted_by_others.store(true, Ordering::Relaxed);
        WANTED_BY_OTHERS.store(true, Ordering::Release);
        ctl::defer();
    }
}

/// Those listeners, once.
#[inline]
pub fn take_wanted_by_others() -> impl Iterator<Item = &'static Desc> {
    let any = WANTED_BY_OTHERS.load(Ordering::Relaxed) && WANTED_BY_OTHERS.swap(false, Ordering::AcqRel);
    let wanted = |d: &&Desc| of(d).is_some_and(|l| l.wanted_by_others.swap(false, Ordering::Relaxed));
    any.then(|| crate::table::all().filter(wanted)).into_iter().flatten()
}

/// Asks again for what the monitor has not answered.
#[inline]
pub fn join_again() {
    if unjoined::take() {
        let those = used().filter(|l| l.id.load(Ordering::Relaxed) != 0 && l.joins.load(Ordering::Relaxed));
        those.for_each(Listener::join);
    }
}

/// The channels of all listeners are about to go; the listeners stay. Returns those of which this
/// process was a worker.
pub fn leave_channels() -> Those {
    let those = Those::new();
    for (i, l) in used().enumerate() {
        those.set(i as i32, l.worker.swap(0, Ordering::AcqRel) != 0);
        l.drop_places(|_| true);
        l.n.store(0, Ordering::Release);
    }
    those
}

/// Become a worker of these again.
pub fn join_those(those: &Those) {
    for (i, l) in used().enumerate() {
        if those.has(i as i32) && l.id.load(Ordering::Relaxed) != 0 {
            l.join();
        }
    }
}

/// To another monitor, as at `listen`: which listeners this process holds.
pub fn announce_again() {
    for d in crate::table::all() {
        let (Some(l), Some(fd)) = (of(d), crate::table::fd_of(d)) else { continue };
        // (One that it refuses is the kernel's alone from now on; what waits in its queues is accepted.)
        let Ok((m, _)) = ctl::request(shown(d), Some(fd)) else { continue };
        if l.id.swap(m.listener, Ordering::AcqRel) != m.listener {
            l.chans().for_each(|c| c.listener.store(m.listener, Ordering::Relaxed));
        }
    }
}

/// This process works for the listeners that it worked for, under another monitor. Where it can under the
/// same numbers: there are queues for them.
pub fn work_again() {
    for l in used().filter(|l| l.id.load(Ordering::Relaxed) != 0) {
        let before = l.worker.swap(0, Ordering::AcqRel);
        if before != 0 || l.joins.load(Ordering::Relaxed) {
            l.join_as(if before as usize <= WORKERS { before } else { 0 }, false);
        }
    }
}

/// Become a worker of every listener.
pub fn join_all() {
    for l in used().filter(|l| l.id.load(Ordering::Relaxed) != 0) {
        l.join();
    }
}

/// The answer to WORKER came when nobody waited for it any more: the monitor counts this process.
pub fn joined_late(id: u64, number: u64) {
    if let Some(l) = used().find(|l| id != 0 && l.id.load(Ordering::Acquire) == id) {
        if (number as usize) < WORKERS {
            let _ = l.worker.compare_exchange(0, number as u32 + 1, Ordering::AcqRel, Ordering::Relaxed);
        }
    }
}

impl Listener {
    /// Does this process accept from its queues?
    pub fn is_worker(&self) -> bool {
        self.worker.load(Ordering::Relaxed) != 0
    }

    /// Become a worker: from now on there is a SYN queue for us, and the
    /// monitor hands us every channel.
    pub fn join(&self) {
        self.join_as(0, false);
    }

    /// For the channels alone: what waits in them is to go to the kernel.
    pub fn join_to_leave(&self) {
        self.join_as(0, true);
    }

    /// The same with the number that it had under another monitor, plus one; 0: any.
    fn join_as(&self, before: u32, leaves: bool) {
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
            work: if leaves { Work::Leaves } else { Work::Looks },
        };
        let w = match ctl::request(join, None) {
            Ok((a, _)) if (a.number as usize) < WORKERS => {
                self.untaken.store(a.untaken, Ordering::Relaxed);
                a.number + 1
            }
            // EPERM, EACCES: it gets no channels, and has nothing to steal from.
            Ok(_) | Err(Errno::EAGAIN | Errno::EPERM | Errno::EACCES) => WORKERS as u32 + 1,
            Err(Errno::EOPNOTSUPP) => {
                // What is mapped here is not this process's any more.
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

    /// Must this process empty the queue of the kernel before it uses ours again?
    #[inline]
    pub fn is_untaken(&self) -> bool {
        self.untaken.load(Ordering::Relaxed)
    }

    /// It is empty: new connections come over shared memory.
    #[cold]
    pub fn is_taken_again(&self) {
        if !self.untaken.swap(false, Ordering::AcqRel) || ctl::dead() {
            return;
        }
        // A connection that has come there meanwhile is older than those that come here.
        self.since_kernel.store(u32::MAX, Ordering::Relaxed);
        let (id, number) = (self.id.load(Ordering::Relaxed), self.worker.load(Ordering::Relaxed));
        let accepts = request::Worker { listener: id, number: number.checked_sub(1), work: Work::Accepts };
        let still = ctl::request(accepts, None).map_or(true, |(a, _)| a.untaken);
        self.untaken.store(still && self.id.load(Ordering::Relaxed) == id, Ordering::Relaxed);
    }

    /// Clients may wait for this process already. It does not sleep for long until it has joined.
    fn join_later(&self) {
        self.joins.store(true, Ordering::Relaxed);
        unjoined::note();
        ctl::defer();
    }

    fn note_backlog(&self, fd: i32) {
        let limit = fsocket_reuseport::listener::backlog(fd).map_or(0, |(limit, _)| limit.min(i32::MAX as u32) + 1);
        self.backlog.store(limit, Ordering::Relaxed);
    }

    /// The program's own backlog. Not what the kernel says now: another process of the fork group may have raised
    /// it for a moment.
    pub fn backlog(&self) -> Option<i32> {
        self.backlog.load(Ordering::Relaxed).checked_sub(1).map(|limit| limit as i32)
    }

    pub fn addr(&self) -> Addr {
        self.addr.lock().map(|a| *a).unwrap_or_default()
    }

    /// The description that listens, unless it has just ended.
    pub fn desc(&self) -> Option<&'static Desc> {
        let is_it = |d: &&Desc| of(d).is_some_and(|l| core::ptr::eq(l, self));
        crate::table::DESCS.get(self.desc.load(Ordering::Relaxed)).filter(is_it)
    }

    fn places(&self) -> &'static [AtomicU16] {
        let place = place_of(self);
        NEAR_PLACES.get(place).or_else(|| PLACES.get(place - NEAR)).map_or(&[], |places| places)
    }

    /// Does a channel lead here, or did one?
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

    /// Channels go, and what has come through them stays counted. Before their memory goes.
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
