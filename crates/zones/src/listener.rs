//! A listener with zones: its state in this process, and the state of its workers' local listen
//! sockets.

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

/// Number of entries that were ever used.
#[link_section = ".data.fsocket_start"]
pub(super) static USED: AtomicU32 = AtomicU32::new(0);

pub(super) static ZONED: Pieces<Zoned, 1, MAX> = Pieces::new();
// SAFETY: the fields are atomics, locks and numbers, for which zero is valid.
unsafe impl Zero for Zoned {}

/// Stages of a listener.
pub(super) mod state {
    pub const FREE: u32 = 0;
    /// One process with one thread uses the listener, so nothing is prepared.
    pub const PLAIN: u32 = 1;
    /// The listener has a reservation and a page, so workers may join.
    pub const READY: u32 = 2;
    /// The listener has no zones, and the reason was counted.
    pub const OFF: u32 = 3;
}

/// A listener of this process.
pub struct Zoned {
    pub(super) state: AtomicU32,
    /// A descriptor of the global listen socket.
    pub(super) fd: Number,
    pub(super) reservation: Number,
    /// Ends of a socket pair to receive from and to send to; see `handoff`.
    pub(super) handoff: [Number; 2],
    pub(super) page: AtomicPtr<Page>,
    /// The monitor's number of the group; 0: not asked for yet.
    pub(super) group: AtomicU64,
    /// The process has inherited the listener by fork, so it becomes a worker when it uses the
    /// listener.
    pub(super) inherited: AtomicBool,
    /// The first thread that used the listener. While no other thread uses it, no local socket is
    /// needed.
    pub(super) first: AtomicU64,
    /// [`Reason::ZoneUnseen`] has been counted: a worker accepts, and the library does not see where it waits.
    pub(super) unseen: AtomicBool,
    /// How often a local listen socket was given up, and the time of the last one.
    pub(super) left: AtomicU32,
    pub(super) left_at: AtomicU64,
    pub(super) dwell: dwell::Dwell,
    /// Value of the page's count of deaths up to which this process has handled them.
    pub(super) deaths: AtomicU32,
    pub(super) shared: Shared,
    pub(super) n: AtomicU32,
    pub(super) locals: [Local; LOCALS],
    pub(super) watches: List,
    pub(super) peers: Peers,
    pub(super) asked: Asked,
    pub(super) rivals: Rivals,
    /// Held by threads that change the entry. Readers do not take it.
    pub(super) change: Lock<()>,
}

/// A worker's local listen socket.
pub struct Local {
    /// The worker's thread; 0: the entry is free.
    pub(super) thread: AtomicU64,
    /// If several threads wait in the worker's epoll instance: the thread that came last.
    pub(super) delegate: AtomicU64,
    pub(super) fd: Number,
    pub(super) cpu: AtomicU32,
    /// The worker's place in the monitor's group; 0: none.
    pub(super) place: AtomicU32,
    /// Index of the worker in [`Page::entry`].
    pub(super) entry: AtomicU32,
    /// Generation of the global socket's options when they were copied.
    pub(super) options: AtomicU32,
    /// Connections since the last look at the global queue, and the interval between two looks
    /// (in connections).
    pub(super) turns: AtomicU32,
    pub(super) every: AtomicU32,
    /// Time of the last look at the global queue, in ticks.
    pub(super) turned: AtomicU64,
    /// Number of connections since the worker last found its queue empty.
    pub(super) since_empty: AtomicU32,
    /// No epoll instance watches the listener any more; see `watch`.
    pub(super) unwatched: AtomicBool,
    /// The thread waits in `accept` or `poll`, so its dwell time decides whether it keeps the
    /// socket.
    pub(super) sleeping: AtomicBool,
    /// Other workers of the group may steal from it, and it may steal from them.
    pub(super) shared: AtomicBool,
    /// Connections accepted from the own queue since the last turn of a busy zone.
    pub(super) fair: AtomicU32,
    /// Time since which the thread looks at other workers' queues, in ticks; 0: it does not.
    pub(super) peers_since: AtomicU64,
    /// Time of the thread's last look at other workers' queues, in ticks.
    pub(super) peers_looked: AtomicU64,
    /// An epoll instance with all peers, for a thread that sleeps in `poll` or `accept`; -1: none.
    pub(super) inner: Number,
    /// Hash of the events and data with which the socket was last added to an epoll instance.
    pub(super) put: AtomicU64,
    /// Epoll instance from which the application has removed the listener, but the library has
    /// not removed the local socket yet; -1: none.
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

/// The state of this descriptor's listener, if it has zones.
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
        // SAFETY: the pointer leads to a mapping that is never removed.
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

    /// Ends the zones of this listener in this process.
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
        // The mapping of the page is not removed, because another thread may still read it. A
        // listener that forked costs two pages.
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
        self.rivals.since.store(0, Ordering::Relaxed);
        self.state.store(state::FREE, Ordering::Release);
    }
}

/// Counts a reason in the arena, where the monitor sees it.
pub(super) fn count(why: Reason) {
    socks::arena();
    stats::fall_back(why);
}

/// State of a listener for which the program has set SO_REUSEPORT. Zero: the program has not.
pub struct Shared {
    /// The monitor's number of the address. A forked child keeps it, to recognize listeners at
    /// the same address.
    pub(super) address: AtomicU64,
    /// The place of the worker that has this socket as its local one.
    pub(super) place: AtomicU32,
    pub(super) cpu: AtomicU32,
    /// The socket has its place in the group, but foreign sockets were at the address, so the
    /// monitor did not give its BPF program. The library has to ask for it again.
    pub(super) waits: AtomicBool,
    /// State of that worker for balancing, if it takes part. The program owns the worker's
    /// descriptor.
    pub(super) worker: Local,
}

/// Maximum number of peers. Sockets of exited workers count until they are empty.
pub(super) const PEERS: usize = 2 * QUEUES;

/// Another worker's local listen socket.
pub(super) struct Sock {
    pub(super) fd: Number,
    /// The place of the worker; 0: the entry is free.
    pub(super) place: AtomicU32,
    pub(super) gone: AtomicBool,
}

/// A process's state for the balance of a listener.
pub struct Peers {
    pub(super) map: AtomicPtr<Balance>,
    pub(super) n: AtomicU32,
    pub(super) all: [Sock; PEERS],
    /// Place of the worker that was stolen from last.
    pub(super) last: AtomicU32,
    /// Some workers may have exited.
    pub(super) orphans: AtomicBool,
}

/// Limits how often the monitor is asked for a waiting connection, and notes its refusal.
pub struct Asked {
    pub(super) in_vain: AtomicU32,
    pub(super) at: AtomicU64,
    /// The monitor has refused: it cannot say where connections wait.
    pub(super) refused: AtomicBool,
}

/// Notes that a connection in the global queue was left to the threads that block there.
pub struct Rivals {
    /// Time since which the connection waits, ns; 0: none waits.
    pub(super) since: AtomicU64,
    /// How many blocked threads had returned at that time.
    pub(super) out: AtomicU32,
}

/// Adds an entry, or changes an existing one.
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

/// Where `accept` puts the peer's address. Both pointers are null or come from the program, as
/// accept4(2) wants. The library never dereferences them: the kernel writes there, or a copy that
/// returns EFAULT.
#[derive(Clone, Copy)]
pub struct Peer {
    pub addr: *mut libc::sockaddr,
    pub len: *mut u32,
    pub flags: i32,
}

pub fn is_nonblocking(fd: i32) -> bool {
    sys::fcntl(fd, libc::F_GETFL, 0).unwrap_or(0) & libc::O_NONBLOCK != 0
}
