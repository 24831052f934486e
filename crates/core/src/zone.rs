//! Kernel path: a local listen socket for each worker of a listener.
//!
//! A worker (a forked process, or a thread) gets its local listen socket when it
//! first uses the listener, and holds it alone: when it dies the kernel closes the
//! socket, and what waits there moves to the global one. See ADR 16.
//!
//! | file | concern |
//! | --- | --- |
//! | `zone` | which listeners, and their life |
//! | `zone/page` | what the processes of a fork group share about a listener |
//! | `zone/join` | making a local listen socket |
//! | `zone/successor` | listeners that go on in another program |
//! | `zone/cpu` | which CPU a worker's zone is |
//! | `zone/dwell` | workers that are away for long |
//! | `zone/accept` | the order of the queues |
//! | `zone/acceptor` | accepting without a local listen socket beside workers that have one |
//! | `zone/balance` | taking from the queues of busy or absent workers |
//! | `zone/handoff` | leaving in good order where nothing migrates |
//! | `zone/shared` | listeners that share their address by the program's own wish |
//! | `zone/watch` | epoll, poll, and being told to look |

pub mod accept;
mod acceptor;
pub mod balance;
mod cpu;
mod dwell;
mod handoff;
mod join;
mod page;
pub mod shared;
pub mod successor;
pub mod watch;

use crate::lock::Lock;
use crate::table::{self, kind, Desc};
use crate::{ctl, opts, process, socks, stats};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use fsocket_abi::arena::Counter;
use fsocket_proto::{kind as msg, Msg};
use fsocket_sys::{self as sys, Errno};
use fsocket_zones::listener::{reuse_port, Shape};
use fsocket_zones::reservation::{self, ReuseWindow};
use page::Page;

pub use cpu::Pin;
pub use join::{How, Who};

/// Listeners per process that can have zones.
const MAX: usize = 128;
/// Workers (threads) per process and listener.
const LOCALS: usize = 128;

#[link_section = ".data.fsocket_start"]
static ON: AtomicBool = AtomicBool::new(false);
/// Entries that were ever used.
#[link_section = ".data.fsocket_start"]
static USED: AtomicU32 = AtomicU32::new(0);
static ZONED: [Zoned; MAX] = [const { Zoned::new() }; MAX];

/// How far a listener has come.
mod state {
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
    state: AtomicU32,
    /// A number of the global listen socket.
    fd: AtomicI32,
    reservation: AtomicI32,
    /// Ends of a socket pair to receive from and to send to; see `handoff`.
    handoff: [AtomicI32; 2],
    page: AtomicPtr<Page>,
    /// The monitor's number of the group; 0: not asked.
    group: AtomicU64,
    /// Inherited by fork: using it makes this process a worker.
    inherited: AtomicBool,
    /// The thread that used it first; while it is the only one it needs nothing.
    first: AtomicU64,
    /// It has been counted that nobody knows how a worker waits.
    unseen: AtomicBool,
    /// Times that a local listen socket was given up, and when it was last.
    left: AtomicU32,
    left_at: AtomicU64,
    dwell: dwell::Dwell,
    /// As far as the page's deaths were answered.
    deaths: AtomicU32,
    shared: shared::Shared,
    n: AtomicU32,
    locals: [Local; LOCALS],
    watches: watch::List,
    peers: balance::Peers,
    asked: acceptor::Asked,
    /// Protects changes, not reading.
    change: Lock<()>,
}

/// A worker's local listen socket.
pub struct Local {
    /// 0: free.
    thread: AtomicU64,
    /// Of several threads that wait in its epoll instance the one that came last.
    delegate: AtomicU64,
    fd: AtomicI32,
    cpu: AtomicU32,
    /// Place at the monitor; 0: none.
    place: AtomicU32,
    /// Entry in the page.
    entry: AtomicU32,
    /// Generation of the global socket's options when they were copied.
    options: AtomicU32,
    /// Connections since the global queue was looked at, and after how many it is.
    turns: AtomicU32,
    every: AtomicU32,
    /// When it was, in ticks.
    turned: AtomicU64,
    /// Connections since its queue was found empty.
    since_empty: AtomicU32,
    /// No epoll instance watches the listener any more; see `watch`.
    unwatched: AtomicBool,
    /// Its thread waits in calls of ours, and is judged by its dwell time.
    sleeping: AtomicBool,
    /// Others of the group may steal from it, and it from them.
    shared: AtomicBool,
    /// Accepted from the own queue since the last turn of a busy zone.
    fair: AtomicU32,
    /// Since when its thread looks at the other queues, in ticks; 0: it does not.
    peers_since: AtomicU64,
    /// When it last did, in ticks.
    peers_looked: AtomicU64,
    /// An epoll instance with all peers, for when its thread sleeps in `poll` or `accept`;
    /// -1: none.
    inner: AtomicI32,
    /// With which events and data it lies in an epoll instance, mixed.
    put: AtomicU64,
    /// Instance out of which the application has taken the listener, but we not yet the
    /// socket; -1: none.
    lazy: AtomicI32,
}

impl Local {
    const fn new() -> Local {
        Local {
            thread: AtomicU64::new(0),
            delegate: AtomicU64::new(0),
            fd: AtomicI32::new(-1),
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
            inner: AtomicI32::new(-1),
            put: AtomicU64::new(0),
            lazy: AtomicI32::new(-1),
        }
    }
    fn fd(&self) -> i32 {
        self.fd.load(Ordering::Relaxed)
    }
}

/// Called once, before `main`.
pub fn init(on: bool, pin: Pin) {
    cpu::set_pin(pin);
    ON.store(on, Ordering::Release);
}

pub fn enabled() -> bool {
    ON.load(Ordering::Relaxed)
}

fn used() -> &'static [Zoned] {
    &ZONED[..(USED.load(Ordering::Acquire) as usize).min(MAX)]
}

/// The descriptor's zoned listener, if it is one.
#[inline(always)]
pub fn of(d: &Desc) -> Option<&'static Zoned> {
    match d.zone.load(Ordering::Relaxed) {
        0 => None,
        i => ZONED.get(i as usize - 1),
    }
}

/// The kernel's `listen` has succeeded.
pub fn listened(fd: i32) {
    if enabled() {
        listened_with(fd, None);
    }
}

/// `reservation`: it has one already, which the program before this one has made.
fn listened_with(fd: i32, reservation: Option<i32>) {
    let known = table::lookup(fd);
    if let Some(z) = known.and_then(of) {
        z.changed();
        return;
    }
    if Shape::of(fd).is_err() {
        return; // not TCP
    }
    let shared = reservation.is_none() && reservation::is_open_anyway(fd);
    let Some((i, z)) = ZONED.iter().enumerate().find(|(_, z)| z.claim()) else {
        return count(Counter::FbZoneResource);
    };
    USED.fetch_max(i as u32 + 1, Ordering::AcqRel);
    z.fd.store(fd, Ordering::Relaxed);
    z.reservation.store(reservation.unwrap_or(-1), Ordering::Relaxed);
    if shared && !z.announce(fd) {
        z.free();
        return count(Counter::FbZoneShared);
    }
    let d = match known {
        Some(d) => d,
        None => match table::alloc(kind::FRESH) {
            Some(d) if table::install(fd, d) => d,
            other => {
                if let Some(d) = other {
                    table::release(d);
                }
                return z.free();
            }
        },
    };
    if matches!(d.kind(), kind::FRESH | kind::BOUND) {
        // No SYN queues: the kernel's alone, but for us.
        crate::epoll::leave_to_kernel(d);
        let mut t = [0u8; 16];
        if sys::getsockopt(fd, libc::SOL_SOCKET, libc::SO_RCVTIMEO, &mut t) == Ok(16) {
            let half = |at: usize| t[at..].first_chunk().map_or(0, |v| i64::from_ne_bytes(*v)).max(0) as u64;
            d.rcvtimeo.store(half(0).saturating_mul(1_000_000_000) + half(8) * 1000, Ordering::Relaxed);
        }
        d.dirty.store(true, Ordering::Relaxed);
        d.kind.store(kind::KLISTENER, Ordering::Release);
    }
    d.zone.store(i as u32 + 1, Ordering::Release);
}

/// The last number of a listener is closed in this process, or `shutdown` ended
/// the listening: no local listen socket may outlive that.
pub fn closed(d: &Desc) {
    let i = d.zone.swap(0, Ordering::AcqRel);
    if let Some(z) = ZONED.get((i as usize).wrapping_sub(1)) {
        z.end();
    }
}

/// Who accepts is below us, and sees the global listen socket only. False: it was
/// the only one already.
pub fn leave(d: &Desc) -> bool {
    let Some(z) = of(d).filter(|z| z.state() != state::OFF) else { return false };
    z.off(Counter::FbZoneUnseen);
    true
}

/// `shutdown` of a listener: for all processes that share it.
pub fn shut(d: &Desc) {
    end_for_all(d, false);
    closed(d);
}

/// Somebody without the library is about to accept here, who sees the global listen socket only:
/// there are no others any more, in all processes that share it, and what waits is there.
pub fn pass_on(d: &Desc) {
    if end_for_all(d, true) {
        count(Counter::FbZoneShared);
    }
}

/// `goes_on`: the global socket does. Whether there could be others.
fn end_for_all(d: &Desc, goes_on: bool) -> bool {
    let Some((z, p)) = of(d).and_then(|z| Some((z, z.page()?))) else { return false };
    p.shut.store(1, Ordering::Release);
    if !z.is_shared() {
        // Now: what waits there goes to the global one, and may end with it.
        z.leave_all();
        z.shut_others(p, goes_on);
    }
    !z.is_shared()
}

/// An option of a listener was set: the local ones follow.
pub fn option_set(d: &Desc, level: i32, name: i32) {
    let Some(z) = of(d) else { return };
    // Keys cannot be read back from a socket.
    const TCP_AO_ADD_KEY: i32 = 38;
    if level == libc::IPPROTO_TCP && matches!(name, libc::TCP_MD5SIG | TCP_AO_ADD_KEY) {
        z.off(Counter::FbZoneOption);
    }
    if level == libc::SOL_SOCKET && name == libc::SO_REUSEPORT && (z.state() == state::PLAIN || z.is_shared()) {
        z.off(Counter::FbZoneShared);
    }
    if let Some(p) = z.page() {
        opts::extra::merge(&p.extra, &d.extra);
    }
    z.changed();
}

/// Where another process of the fork group may have set options of a listener: what they are as of now.
pub fn follow_options(fd: i32, d: &Desc) {
    let Some(p) = of(d).and_then(|z| z.page()) else { return };
    let now = p.options.load(Ordering::Acquire);
    if d.options.load(Ordering::Relaxed) != now {
        d.options.store(now, Ordering::Relaxed);
        opts::adopt(fd, d);
        opts::extra::merge(&d.extra, &p.extra);
    }
}

/// Would `getsockopt` tell of our SO_REUSEPORT?
pub fn hides(d: &Desc, level: i32, name: i32) -> bool {
    level == libc::SOL_SOCKET
        && name == libc::SO_REUSEPORT
        && of(d)
            .is_some_and(|z| z.state() == state::READY && !z.is_shared() || z.reservation.load(Ordering::Relaxed) >= 0)
}

/// Before a fork: the child may become a worker.
pub fn prepare() {
    for z in used() {
        if z.state() == state::PLAIN {
            z.make_ready();
        }
    }
}

/// Has no listener of this process been looked at for zones?
pub fn is_unused() -> bool {
    USED.load(Ordering::Acquire) == 0
}

/// Is there a listener that a forked child could work for?
pub fn any() -> bool {
    used().iter().any(|z| z.state() == state::READY)
}

/// Is any thread of this process a worker?
pub fn has_workers() -> bool {
    used().iter().any(|z| z.is_active() || z.has_member())
}

/// The program ends: what waits for this worker is not lost with it.
pub fn at_exit() {
    used().iter().for_each(Zoned::leave_all);
}

/// In a forked child: the parent's local listen sockets are not ours.
pub fn become_child() {
    for z in used() {
        z.change.reset_after_fork();
        let n = (z.n.swap(0, Ordering::Relaxed) as usize).min(LOCALS);
        for l in &z.locals[..n] {
            if l.thread.swap(0, Ordering::Relaxed) != 0 {
                process::close_own(l.fd.swap(-1, Ordering::Relaxed));
                l.shared.store(false, Ordering::Relaxed);
                l.peers_since.store(0, Ordering::Relaxed);
                l.lazy.store(-1, Ordering::Relaxed);
                balance::close(&l.inner);
            }
        }
        z.peers.become_child();
        z.inherited.store(true, Ordering::Relaxed);
        z.shared.become_child();
        z.group.store(0, Ordering::Relaxed);
        z.left.store(0, Ordering::Relaxed);
        z.unseen.store(false, Ordering::Relaxed);
        z.dwell.reset();
        z.first.store(0, Ordering::Relaxed);
        z.watches.clear();
    }
}

/// One of our descriptors got another number.
pub fn renumbered(old: i32, new: i32) -> bool {
    let swap = |a: &AtomicI32| a.compare_exchange(old, new, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    used().iter().any(|z| {
        swap(&z.reservation)
            || z.handoff.iter().any(swap)
            || z.locals.iter().any(|l| swap(&l.fd) || swap(&l.inner))
            || z.peers.renumbered(&swap)
    })
}

impl Zoned {
    const fn new() -> Zoned {
        Zoned {
            state: AtomicU32::new(state::FREE),
            fd: AtomicI32::new(-1),
            reservation: AtomicI32::new(-1),
            handoff: [const { AtomicI32::new(-1) }; 2],
            page: AtomicPtr::new(core::ptr::null_mut()),
            group: AtomicU64::new(0),
            inherited: AtomicBool::new(false),
            first: AtomicU64::new(0),
            unseen: AtomicBool::new(false),
            left: AtomicU32::new(0),
            left_at: AtomicU64::new(0),
            dwell: dwell::Dwell::new(),
            deaths: AtomicU32::new(0),
            shared: shared::Shared::new(),
            n: AtomicU32::new(0),
            locals: [const { Local::new() }; LOCALS],
            watches: watch::List::new(),
            peers: balance::Peers::new(),
            asked: acceptor::Asked::new(),
            change: Lock::new(()),
        }
    }

    fn claim(&self) -> bool {
        self.state.compare_exchange(state::FREE, state::PLAIN, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }
    fn state(&self) -> u32 {
        self.state.load(Ordering::Acquire)
    }

    fn page(&self) -> Option<&'static Page> {
        let p = self.page.load(Ordering::Acquire);
        // SAFETY: a mapping that is never taken away.
        (!p.is_null()).then(|| unsafe { &*p })
    }

    /// Local listen sockets of this process.
    fn locals(&self) -> impl Iterator<Item = &Local> {
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

    fn local_of(&self, thread: u64) -> Option<&Local> {
        self.locals().find(|l| l.thread.load(Ordering::Relaxed) == thread)
    }

    fn changed(&self) {
        if let Some(p) = self.page() {
            p.options.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// No zones for this listener in this process.
    fn off(&self, why: Counter) {
        if self.state.swap(state::OFF, Ordering::AcqRel) != state::OFF {
            count(why);
        }
        self.leave_membership();
        self.leave_all();
    }

    fn leave_all(&self) {
        while let Some(l) = self.locals().next() {
            self.leave(l);
        }
    }

    fn end(&self) {
        self.leave_membership();
        self.leave_all();
        self.drop_handoff();
        let reservation = self.reservation.swap(-1, Ordering::AcqRel);
        if reservation >= 0 {
            process::close_own(reservation);
        }
        self.free();
    }

    fn free(&self) {
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

    /// The reservation and the page, which children inherit.
    fn make_ready(&self) {
        let Ok(_l) = self.change.lock() else { return };
        if self.state() != state::PLAIN {
            return;
        }
        let fd = self.fd.load(Ordering::Relaxed);
        if self.is_shared() {
            // The program wants its address shared: there is nothing to reserve.
            if let Some(p) = page::make() {
                self.page.store(p, Ordering::Release);
                self.state.store(state::READY, Ordering::Release);
            }
            return;
        }
        let made = match self.reservation.load(Ordering::Relaxed) {
            inherited @ 0.. => Ok(inherited),
            _ => Shape::of(fd).and_then(|shape| self.make_reservation(fd, &shape)).map(process::high_fd),
        };
        match made {
            Ok(reservation) => match page::make() {
                Some(p) => {
                    self.reservation.store(reservation, Ordering::Release);
                    self.page.store(p, Ordering::Release);
                    self.make_handoff();
                    self.state.store(state::READY, Ordering::Release);
                }
                None => {
                    process::close_own(reservation);
                    self.reservation.store(-1, Ordering::Release);
                    self.refused(fd, Counter::FbZoneResource);
                }
            },
            Err(e) => self.refused(fd, reason(e)),
        }
    }

    fn refused(&self, fd: i32, why: Counter) {
        let _ = reuse_port(fd, false);
        self.state.store(state::OFF, Ordering::Release);
        count(why);
    }

    fn make_reservation(&self, fd: i32, shape: &Shape) -> fsocket_sys::Result<i32> {
        let own = || {
            let window = ReuseWindow::new(shape)?;
            reuse_port(fd, true)?;
            let reservation = reservation::reserve(fd, shape)?;
            window.close(shape).and_then(|()| reuse_port(reservation, false)).inspect_err(|_| {
                let _ = sys::close(reservation);
            })?;
            Ok(reservation)
        };
        own().or_else(|e| {
            // The monitor sets SO_REUSEPORT itself.
            let mut m = Msg::new(msg::CLONE);
            m.arg0 = 1;
            match ctl::request(m, Some(fd)) {
                Ok((_, Some(reservation))) => Ok(reservation),
                _ => Err(e),
            }
        })
    }
}

/// Count a reason where the monitor sees it.
fn count(why: Counter) {
    socks::arena();
    stats::count(why);
}

/// What a failure is called.
fn reason(e: Errno) -> Counter {
    match e.raw() {
        libc::EPERM | libc::EACCES | libc::EADDRINUSE | libc::EXDEV => Counter::FbZoneDenied,
        libc::EOPNOTSUPP | libc::EINVAL | libc::ENOPROTOOPT => Counter::FbZoneOption,
        _ => Counter::FbZoneResource,
    }
}
