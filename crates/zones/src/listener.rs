//! A listener with zones: its state in this process, and that of its workers' local listen sockets.

use super::dwell;
use super::page::Page;
use super::watches::List;
use crate::lock::Lock;
use crate::number::Number;
use crate::pieces::{Pieces, Zero};
use crate::table::Desc;
use crate::{process, socks, stats};
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use fsocket_abi::arena::Reason;
use fsocket_abi::balance::{Balance, QUEUES};
use fsocket_sys::{self as sys, Result};

/// Listeners per process that can have zones.
pub(super) const MAX: usize = 128;

/// Workers (threads) per process and listener.
pub(super) const LOCALS: usize = 128;

#[link_section = ".data.fsocket_start"]
pub(super) static ON: AtomicBool = AtomicBool::new(false);

/// Entries that were ever used.
#[link_section = ".data.fsocket_start"]
pub(super) static USED: AtomicU32 = AtomicU32::new(0);

pub(super) static ZONED: Pieces<Zoned, 1, MAX> = Pieces::new();
// SAFETY: atomics, locks and numbers that begin as zeros, as `Number` says of itself.
unsafe impl Zero for Zoned {}

/// How far a listener has come.
pub(super) mod state {
    pub const FREE: u32 = 0;
    /// One process, one thread: nothing is done yet.
    pub const PLAIN: u32 = 1;
    /// There is a reservation and a page: workers may join.
    pub const READY: u32 = 2;
    /// Not possible; the reason has been counted.
    pub const OFF: u32 = 3;
}

/// A listener of this process.
pub struct Zoned {
    pub(super) state: AtomicU32,
    /// A number of the global listen socket.
    pub(super) fd: Number,
    pub(super) reservation: Number,
    /// Ends of a socket pair to receive from and to send to; see `handoff`.
    pub(super) handoff: [Number; 2],
    pub(super) page: AtomicPtr<Page>,
    /// The monitor's number of the group; 0: not asked.
    pub(super) group: AtomicU64,
    /// Inherited by fork: using it makes this process a worker.
    pub(super) inherited: AtomicBool,
    /// The thread that used it first; while it is the only one it needs nothing.
    pub(super) first: AtomicU64,
    /// It has been counted that nobody knows how a worker waits.
    pub(super) unseen: AtomicBool,
    /// Times that a local listen socket was given up, and when it was last.
    pub(super) left: AtomicU32,
    pub(super) left_at: AtomicU64,
    pub(super) dwell: dwell::Dwell,
    /// As far as the page's deaths were answered.
    pub(super) deaths: AtomicU32,
    pub(super) shared: Shared,
    pub(super) n: AtomicU32,
    pub(super) locals: [Local; LOCALS],
    pub(super) watches: List,
    pub(super) peers: Peers,
    pub(super) asked: Asked,
    /// Protects changes, not reading.
    pub(super) change: Lock<()>,
}

/// A worker's local listen socket.
pub struct Local {
    /// 0: free.
    pub(super) thread: AtomicU64,
    /// Of several threads that wait in its epoll instance the one that came last.
    pub(super) delegate: AtomicU64,
    pub(super) fd: Number,
    pub(super) cpu: AtomicU32,
    /// Place at the monitor; 0: none.
    pub(super) place: AtomicU32,
    /// Entry in the page.
    pub(super) entry: AtomicU32,
    /// Generation of the global socket's options when they were copied.
    pub(super) options: AtomicU32,
    /// Connections since the global queue was looked at, and after how many it is.
    pub(super) turns: AtomicU32,
    pub(super) every: AtomicU32,
    /// When it was, in ticks.
    pub(super) turned: AtomicU64,
    /// Connections since its queue was found empty.
    pub(super) since_empty: AtomicU32,
    /// No epoll instance watches the listener any more; see `watch`.
    pub(super) unwatched: AtomicBool,
    /// Its thread waits in calls of ours, and is judged by its dwell time.
    pub(super) sleeping: AtomicBool,
    /// Others of the group may steal from it, and it from them.
    pub(super) shared: AtomicBool,
    /// Accepted from the own queue since the last turn of a busy zone.
    pub(super) fair: AtomicU32,
    /// Since when its thread looks at the other queues, in ticks; 0: it does not.
    pub(super) peers_since: AtomicU64,
    /// When it last did, in ticks.
    pub(super) peers_looked: AtomicU64,
    /// An epoll instance with all peers, for when its thread sleeps in `poll` or `accept`;
    /// -1: none.
    pub(super) inner: Number,
    /// With which events and data it lies in an epoll instance, mixed.
    pub(super) put: AtomicU64,
    /// Instance out of which the application has taken the listener, but we not yet the
    /// socket; -1: none.
    pub(super) lazy: Number,
}

impl Local {
    #[cfg(test)]
    pub(super) const fn new() -> Local {
        Local {
            thread: AtomicU64::new(0),
            delegate: AtomicU64::new(0),
            fd: Number::none(),
            cpu: AtomicU32::new(0),
            place: AtomicU32::new(0),
            entry: AtomicU32::new(0),
            options: AtomicU32::new(0),
            turns: AtomicU32::new(0),
            every: AtomicU32::new(0),
            turned: AtomicU64::new(0),
            since_empty: AtomicU32::new(0),
            unwatched: AtomicBool::new(false),
            sleeping: AtomicBool::new(false),
            shared: AtomicBool::new(false),
            fair: AtomicU32::new(0),
            peers_since: AtomicU64::new(0),
            peers_looked: AtomicU64::new(0),
            inner: Number::none(),
            put: AtomicU64::new(0),
            lazy: Number::none(),
        }
    }
    pub(super) fn fd(&self) -> i32 {
        self.fd.load(Ordering::Relaxed)
    }
}

pub fn enabled() -> bool {
    ON.load(Ordering::Relaxed)
}

pub(super) fn used() -> impl Iterator<Item = &'static Zoned> {
    ZONED.first(USED.load(Ordering::Acquire) as usize).map(|(_, z)| z)
}

/// The descriptor's zoned listener, if it is one.
#[inline(always)]
pub fn of(d: &Desc) -> Option<&'static Zoned> {
    d.listening().zone().and_then(|place| ZONED.get(place as usize))
}

impl Zoned {
    pub(super) fn claim(&self) -> bool {
        self.state.compare_exchange(state::FREE, state::PLAIN, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }
    pub(super) fn state(&self) -> u32 {
        self.state.load(Ordering::Acquire)
    }

    pub(super) fn page(&self) -> Option<&'static Page> {
        let p = self.page.load(Ordering::Acquire);
        // SAFETY: a mapping that is never taken away.
        (!p.is_null()).then(|| unsafe { &*p })
    }

    /// Local listen sockets of this process.
    pub(super) fn locals(&self) -> impl Iterator<Item = &Local> {
        let n = (self.n.load(Ordering::Acquire) as usize).min(LOCALS);
        self.locals[..n].iter().filter(|l| l.thread.load(Ordering::Acquire) != 0)
    }

    /// The calling thread's local listen socket, if it has one.
    #[inline]
    pub fn own(&self) -> Option<&Local> {
        if self.n.load(Ordering::Relaxed) == 0 {
            return None;
        }
        self.local_of(process::thread())
    }

    /// Descriptor of the calling thread's local listen socket.
    pub fn own_fd(&self) -> Option<i32> {
        self.own().map(Local::fd)
    }

    /// Has any thread a local listen socket?
    pub fn is_active(&self) -> bool {
        self.n.load(Ordering::Relaxed) != 0 && self.locals().next().is_some()
    }

    pub(super) fn local_of(&self, thread: u64) -> Option<&Local> {
        self.locals().find(|l| l.thread.load(Ordering::Relaxed) == thread)
    }

    pub(super) fn changed(&self) {
        if let Some(p) = self.page() {
            p.options.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// No zones for this listener in this process.
    pub(super) fn off(&self, why: Reason) {
        if self.state.swap(state::OFF, Ordering::AcqRel) != state::OFF {
            count(why);
        }
        self.leave_membership();
        self.leave_all();
    }

    pub(super) fn leave_all(&self) {
        while let Some(l) = self.locals().next() {
            self.leave(l);
        }
    }

    pub(super) fn end(&self) {
        self.leave_membership();
        self.leave_all();
        self.drop_handoff();
        let reservation = self.reservation.swap(-1, Ordering::AcqRel);
        if reservation >= 0 {
            process::close_own(reservation);
        }
        self.free();
    }

    pub(super) fn free(&self) {
        // The page stays mapped: a stale reader may still be in it. It is one
        // page a listener that forked.
        self.page.store(core::ptr::null_mut(), Ordering::Release);
        self.group.store(0, Ordering::Relaxed);
        self.inherited.store(false, Ordering::Relaxed);
        self.first.store(0, Ordering::Relaxed);
        self.left.store(0, Ordering::Relaxed);
        self.unseen.store(false, Ordering::Relaxed);
        self.n.store(0, Ordering::Relaxed);
        self.dwell.reset();
        self.shared.reset();
        self.deaths.store(0, Ordering::Relaxed);
        self.watches.clear();
        self.peers.forget();
        self.state.store(state::FREE, Ordering::Release);
    }
}

/// Count a reason where the monitor sees it.
pub(super) fn count(why: Reason) {
    socks::arena();
    stats::fall_back(why);
}

/// What is known of such a listener. Zero: it is none.
pub struct Shared {
    /// The monitor's number of the address; stays through fork, to tell siblings.
    pub(super) address: AtomicU64,
    /// Of the worker in this process for which the socket itself is the local one.
    pub(super) place: AtomicU32,
    pub(super) cpu: AtomicU32,
    /// It has its place, but strangers were at the address, and we were not given the
    /// program that selects: to be asked for again.
    pub(super) waits: AtomicBool,
    /// What balance keeps of that worker, if it takes part. Its descriptor is the program's.
    pub(super) worker: Local,
}

/// Peers, and those that are gone and not yet empty.
pub(super) const PEERS: usize = 2 * QUEUES;

/// Another worker's local listen socket.
pub(super) struct Sock {
    pub(super) fd: Number,
    /// 0: free.
    pub(super) place: AtomicU32,
    pub(super) gone: AtomicBool,
}

/// What a process knows of the balance of a listener.
pub struct Peers {
    pub(super) map: AtomicPtr<Balance>,
    pub(super) n: AtomicU32,
    pub(super) all: [Sock; PEERS],
    /// Place of the last victim.
    pub(super) last: AtomicU32,
    /// Some may be gone.
    pub(super) orphans: AtomicBool,
}

/// How often the monitor is asked.
pub struct Asked {
    pub(super) in_vain: AtomicU32,
    pub(super) at: AtomicU64,
    /// It cannot tell.
    pub(super) refused: AtomicBool,
}

/// Add, or change what is there.
pub(super) fn put(ep: i32, fd: i32, ev: &libc::epoll_event) -> Result<()> {
    match sys::epoll_ctl(ep, libc::EPOLL_CTL_ADD, fd, Some(ev)) {
        Err(e) if e.raw() == libc::EEXIST => sys::epoll_ctl(ep, libc::EPOLL_CTL_MOD, fd, Some(ev)),
        r => r,
    }
}

pub(super) fn close(fd: &Number) {
    let fd = fd.swap(-1, Ordering::AcqRel);
    if fd >= 0 {
        process::close_own(fd);
    }
}

/// Where `accept` puts the peer's address.
#[derive(Clone, Copy)]
pub struct Peer {
    pub addr: *mut libc::sockaddr,
    pub len: *mut u32,
    pub flags: i32,
}

pub fn is_nonblocking(fd: i32) -> bool {
    sys::fcntl(fd, libc::F_GETFL, 0).unwrap_or(0) & libc::O_NONBLOCK != 0
}
