//! Routes: through which channel a destination is reached, or whether only the kernel reaches it.
//!
//! Long: one table of routes, and everything that decides on a route.

use crate::chan::{self, Chan};
use crate::cow::Sparing;
use crate::lock::Lock;
use crate::{ctl, identity, kept, name, pool, process, registry, socks, table};
use core::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use fsocket_abi::arena::Reason;
use fsocket_abi::channel::CLIENT;
use fsocket_proto::registry::Registry;
use fsocket_proto::{request, Addr, ODD, ROUTE_SECS};
use fsocket_sys as sys;

mod best;
mod cache;
mod met;

use best::Best;
pub use best::{scan, volatile};
use cache::{Basis, Known, Route, FAN};
pub use met::several;

/// Held while a thread asks the monitor. If several threads ask for one destination, only the
/// first answer brings the channel's memory; the other threads find it mapped.
#[link_section = ".data.fsocket_start"]
static ASKING: Lock<()> = Lock::new(());
/// Hashes of the destinations for which threads of this process ask the monitor, or wait to ask;
/// 0: free. The number is limited, because a longer wait would take more time than a connection
/// through the kernel.
static ASKED: [AtomicU64; 32] = [const { AtomicU64::new(0) }; 32];
/// SO_NETNS_COOKIE of this process; 0: not asked yet.
static NETNS: AtomicU64 = AtomicU64::new(0);

/// A socket that the kernel must connect first, because the monitor wants to see that connection.
struct First {
    /// The socket's descriptor + 1.
    fd: AtomicI32,
    identity: AtomicU64,
}
/// Indexed by descriptor number. If an entry is overwritten, a later connection is shown to the
/// monitor instead.
static FIRST: [First; 16] = [const { First { fd: AtomicI32::new(0), identity: AtomicU64::new(0) } }; 16];

/// Forgets all routes, because there is another monitor or this is a forked child.
pub fn clear() {
    cache::clear();
}
pub fn reset_after_fork() {
    ASKING.reset_after_fork();
    if !process::was_alone() {
        for a in &ASKED {
            a.put(0);
        }
    }
    cache::reset_after_fork();
}

/// The right to ask the monitor and wait for its answer.
struct Turn(Option<&'static AtomicU64>);

impl Turn {
    /// None: the process asks for too many destinations already.
    fn wait_for(dst: &Addr) -> Option<Turn> {
        let key =
            dst.ip.iter().fold(u64::from(dst.port) + 1, |k, b| k.wrapping_mul(31).wrapping_add(u64::from(*b))) | 1;
        if ASKED.iter().any(|a| a.load(Ordering::Relaxed) == key) {
            return Some(Turn(None)); // the answer for the other thread serves this one, too
        }
        let take = |a: &&AtomicU64| a.compare_exchange(0, key, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        ASKED.iter().find(take).map(|a| Turn(Some(a)))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if let Some(a) = self.0 {
            a.store(0, Ordering::Relaxed);
        }
    }
}

/// Why a channel is needed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum For {
    /// For a connection that the program is making now.
    New,
    /// For an established kernel TCP connection that moves to shared memory.
    Upgrade,
    /// For later connections: the kernel has just made one of the same kind. Has the identity of
    /// its socket.
    Next(u64),
}

impl For {
    /// The identity of socket `fd`, by which the kernel's policy may distinguish it. None: the
    /// socket has unusual options, so it can prove nothing.
    fn identity(self, fd: i32) -> Option<u64> {
        match self {
            For::Next(identity) => Some(identity),
            _ => identity_of(fd),
        }
    }
}

fn identity_of(fd: i32) -> Option<u64> {
    let d = table::lookup(fd)?;
    // A bound socket has an address that the program chose. A socket that was shared by fork may
    // get options from another process at any time.
    let bound = d.kind() == table::Kind::Bound || d.unconnected().was_forked();
    if bound || !kept::is_plain(d) {
        return None;
    }
    match d.placeholder().identity() {
        identity::RECYCLED => None,
        identity::UNKNOWN => {
            let made = identity::has_made(fd).then(identity::now)?;
            d.placeholder().set_identity(made);
            Some(made)
        }
        known => Some(known),
    }
}

/// The channel for a connection to `dst`, or the reason why the kernel must make the connection.
pub fn find(dst: &Addr, fd: i32, what: For) -> Result<&'static Chan, Reason> {
    if crate::sealed::restricted() {
        // Landlock has removed this process's memory and counters. A new arena shows the
        // administrator the reason.
        let _ = socks::arena();
        return Err(Reason::Disabled);
    }
    if !process::enabled() {
        return Err(if ctl::mismatch() { Reason::Version } else { Reason::Disabled });
    }
    if crate::arena::monitor_has_died() {
        // The listener may have found the next monitor already, which does not know this process's
        // ports yet.
        ctl::died();
    }
    ctl::wanted();
    let reg = ctl::registry().ok_or_else(ctl::why_none)?;
    if ctl::dead() {
        return Err(ctl::why_none());
    }
    if let Some(known) = known(reg, dst, fd, what) {
        return known;
    }
    let _turn = Turn::wait_for(dst).ok_or(Reason::Resource)?;
    // The lock is held until the channel is mapped.
    let _asking = ASKING.lock().map_err(|_| Reason::Reentry)?;
    if let Some(known) = known(reg, dst, fd, what) {
        return known;
    }
    let r = discover(reg, dst, fd, what)?;
    cache::put(&r);
    match r.refused {
        Some(why) => Err(why),
        None => r.chans[..r.n].first().and_then(channel).ok_or(Reason::NoListener),
    }
}

/// A channel to `dst`, or the reason why there is none, if a recent answer of the monitor is known
/// and still valid.
fn known(reg: &Registry, dst: &Addr, fd: i32, what: For) -> Option<Result<&'static Chan, Reason>> {
    let (mut r, turn) = cache::get(dst)?;
    let age = sys::cpu::ticks().wrapping_sub(r.basis.asked);
    let is_over = r.refused.is_none() && r.basis.closings != registry::closings(dst.port);
    if is_over || age >= ROUTE_SECS * 1_000_000 * sys::cpu::ticks_per_us() {
        return None;
    }
    if r.basis.generation != reg.generation.load(Ordering::Acquire) {
        // Some listener has come or gone. Checks whether that concerns this destination.
        let now = matching(reg, dst, fd).ok()?.basis;
        if (now.touched, now.listeners) != (r.basis.touched, r.basis.listeners) {
            return None;
        }
        r.basis.generation = now.generation;
        cache::put(&r);
    }
    if let (For::New, Some(proved_for)) = (what, r.basis.proved_for) {
        if identity_of(fd) != Some(proved_for) {
            return Some(Err(Reason::KernelFirst));
        }
    }
    match r.refused {
        // The monitor refused a socket that can prove nothing. It may accept another socket.
        Some(Reason::KernelFirst) if what != For::New || identity_of(fd).is_some() => None,
        Some(why) => Some(Err(why)),
        None => (0..r.n).find_map(|i| channel(&r.chans[(turn as usize + i) % r.n])).map(Ok),
    }
}

/// The channel, if the same one is still in this place, and usable.
fn channel(known: &Known) -> Option<&'static Chan> {
    chan::CHANS.get(known.place).filter(|c| c.id.load(Ordering::Acquire) == known.id && usable(c))
}

/// Asks the monitor for the channels to `dst`. Called under the lock `ASKING`.
fn discover(reg: &Registry, dst: &Addr, fd: i32, what: For) -> Result<Route, Reason> {
    let Matching { count, basis } = matching(reg, dst, fd)?;
    let mut r = Route {
        dst: (dst.ip, dst.port),
        chans: [Known { place: 0, id: 0 }; FAN],
        n: 0,
        refused: None,
        basis: Basis { asked: sys::cpu::ticks(), ..basis },
    };
    let identity = what.identity(fd);
    // Listeners that share the address by SO_REUSEPORT: the monitor returns their channels in
    // turn.
    for _ in 0..count.min(FAN) * 2 {
        let Granted { chan: c, closings, proved } = match ask(dst, fd, 0, identity) {
            Ok(answer) => answer,
            // A refusal is valid as long as an answer with channels.
            Err(why @ (Reason::OtherUser | Reason::Policy)) => {
                r.refused = Some(why);
                break;
            }
            Err(Reason::KernelFirst) if identity.is_none() => {
                r.refused = Some(Reason::KernelFirst);
                break;
            }
            Err(why) => return Err(why),
        };
        if r.n == 0 {
            r.basis.closings = closings;
        }
        if proved {
            r.basis.proved_for = identity;
        }
        let c = Known { place: c.index(), id: c.id.load(Ordering::Relaxed) };
        if r.chans[..r.n].contains(&c) {
            continue;
        }
        r.chans[r.n] = c;
        r.n += 1;
        if r.n >= count.min(FAN) {
            break;
        }
    }
    Ok(r)
}

/// Called after the kernel was asked to connect `fd` to `dst`. On this host the connection is
/// usually established at once, even if the program does not wait. Then the library shows it to
/// the monitor, and later connections use shared memory.
#[cold]
fn show(fd: i32, dst: &Addr, identity: u64) {
    const TCP_ESTABLISHED: u8 = 1;
    let mut state = [0u8; 1];
    let known = sys::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, &mut state).is_ok();
    if known && state[0] == TCP_ESTABLISHED {
        let _ = find(dst, fd, For::Next(identity));
    }
}

/// Called after the kernel's `connect` of `fd`, which has succeeded or is in progress.
///
/// # Safety
/// `addr` is readable for `len` bytes.
#[inline]
pub unsafe fn connected(fd: i32, addr: *const libc::sockaddr, len: u32) {
    let first = &FIRST[fd.max(0) as usize % FIRST.len()];
    if fd >= 0 && first.fd.load(Ordering::Relaxed) == fd + 1 {
        first.fd.store(0, Ordering::Relaxed);
        // SAFETY: the kernel has just read `len` bytes at `addr`, and the copy is guarded.
        if let Some(dst) = unsafe { name::parse(addr, len) } {
            show(fd, &Addr { ip: name::destination(dst.ip), ..dst }, first.identity.load(Ordering::Relaxed));
        }
    }
}

/// Another channel to the same destination, because all slots of `full` are in use.
pub fn another(dst: &Addr, fd: i32, full: &Chan) -> Result<&'static Chan, Reason> {
    // An earlier channel may have a free slot again.
    let listener = full.listener.load(Ordering::Relaxed);
    let mut last = full.id.load(Ordering::Relaxed);
    for c in chan::all() {
        if c.listener.load(Ordering::Relaxed) == listener && usable(c) && !core::ptr::eq(c, full) {
            if let Some(mut cl) = c.client() {
                if let Ok(taken) = c.take_slot(&mut cl) {
                    c.give_back(&mut cl, taken.slot);
                    return Ok(c);
                }
            }
            last = c.id.load(Ordering::Relaxed);
        }
    }
    let _asking = ASKING.lock().map_err(|_| Reason::Reentry)?;
    // `find` has decided already that this socket may use shared memory.
    ask(dst, fd, last, identity_of(fd)).map(|granted| granted.chan)
}

/// May new connections begin in this channel?
pub fn usable(c: &Chan) -> bool {
    c.id.load(Ordering::Acquire) != 0
        && c.my_side() == CLIENT
        && !c.retired.load(Ordering::Relaxed)
        && !c.is_half()
        && c.header().listener_closed.load(Ordering::Acquire) == 0
}

/// An answer of the monitor: a channel, and the state for which the answer is valid (see
/// [`Basis`]).
struct Granted {
    chan: &'static Chan,
    closings: u32,
    proved: bool,
}

/// Called under the lock `ASKING`. `identity` comes from [`For::identity`].
fn ask(dst: &Addr, fd: i32, full: u32, identity: Option<u64>) -> Result<Granted, Reason> {
    let full = Some(full).filter(|channel| *channel != 0);
    let connect = request::Connect { to: *dst, full, identity: identity.unwrap_or(ODD) };
    // The monitor needs a socket that is unused or connected. A socket that the program has bound
    // is neither.
    let bound = crate::inspect::bound_address(fd).is_some_and(|a| a.port != 0 || !name::is_any(&a.ip));
    let other = match bound && !crate::inspect::is_connected(fd) {
        true => Some(sys::socket(dst.family.into(), libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0)),
        false => None,
    };
    let shown = match other {
        Some(Err(_)) => return Err(Reason::Resource),
        Some(Ok(other)) => other,
        None => fd,
    };
    let answer = ctl::request(connect, Some(shown));
    if shown != fd {
        let _ = sys::close(shown);
    }
    let (a, memfd) = match answer {
        Ok(v) => v,
        Err(e @ (sys::Errno::EPERM | sys::Errno::EACCES | sys::Errno::ENOKEY)) => {
            // The arena lets the administrator see refusals, even if the process never gets a
            // connection.
            let _ = socks::arena();
            if e != sys::Errno::ENOKEY {
                return Err(if e == sys::Errno::EPERM { Reason::OtherUser } else { Reason::Policy });
            }
            met_policy();
            if let Some(identity) = identity {
                let first = &FIRST[fd as usize % FIRST.len()];
                first.identity.store(identity, Ordering::Relaxed);
                first.fd.store(fd + 1, Ordering::Relaxed);
            }
            return Err(Reason::KernelFirst);
        }
        Err(sys::Errno::ENOENT) => return Err(Reason::NoListener),
        Err(sys::Errno::EIO) => return Err(ctl::why_none()),
        Err(_) => return Err(Reason::Resource),
    };
    if a.proved {
        met_policy();
    }
    match channel_of(a.channel, a.listener, a.first_port, memfd) {
        Some(c) if usable(c) => Ok(Granted { chan: c, closings: a.closings, proved: a.proved }),
        Some(_) => Err(Reason::NoListener),
        None => Err(Reason::Resource),
    }
}

/// Records that a policy may apply: from now on each new socket gets an identity.
fn met_policy() {
    if identity::meet_policy() {
        pool::drain();
    }
}

/// The channel that an answer of the monitor names. The first answer brings the memory.
fn channel_of(id: u32, listener: u64, first_port: u16, memfd: Option<i32>) -> Option<&'static Chan> {
    let c = match (chan::by_id(id, CLIENT), memfd) {
        (Some(c), _) => Some(c),
        (None, Some(fd)) => chan::map(id, listener, CLIENT, fd).inspect(|c| c.first_ports(first_port)),
        (None, None) => None,
    };
    if let Some(fd) = memfd {
        let _ = sys::close(fd);
    }
    c
}

/// The address of a listener with this number.
pub fn address_of(listener: u64) -> Option<Addr> {
    let reg = ctl::registry()?;
    let there = reg.entry.iter().find(|e| listener != 0 && volatile(&e.listener) == listener)?;
    Some(volatile(&there.addr))
}

/// Does a listener with the library have this address?
pub fn has_listener(addr: &Addr, fd: i32) -> bool {
    ctl::registry().is_some_and(|reg| matching(reg, addr, fd).is_ok())
}

/// The channel to the process that has accepted the connection `fd` to `dst`, perhaps in another
/// network namespace. `here`: the connection is now in another process of this namespace.
///
/// # Errors
/// Those of [`request::Meet`].
pub fn meet(fd: i32, dst: &Addr, here: bool) -> sys::Result<&'static Chan> {
    let _asking = ASKING.lock().map_err(|_| sys::Errno::EAGAIN)?;
    let (a, memfd) = ctl::request(request::Meet { here }, Some(fd))?;
    let c = channel_of(a.channel, a.listener, a.first_port, memfd).filter(|c| usable(c)).ok_or(sys::Errno::ENOENT)?;
    if !here {
        met::note(dst, c);
    }
    Ok(c)
}

/// The channel to which the last connection to `dst` in another network namespace has moved. This
/// is only a hint.
pub fn met(dst: &Addr) -> Option<&'static Chan> {
    met::known(dst).filter(|c| usable(c))
}

/// SO_NETNS_COOKIE of this process, read once from one of its sockets.
pub fn netns(fd: i32) -> sys::Result<u64> {
    match NETNS.load(Ordering::Relaxed) {
        0 => {
            let mut b = [0u8; 8];
            const SO_NETNS_COOKIE: i32 = 71;
            sys::getsockopt(fd, libc::SOL_SOCKET, SO_NETNS_COOKIE, &mut b)?;
            let v = u64::from_ne_bytes(b);
            NETNS.store(v, Ordering::Relaxed);
            Ok(v)
        }
        v => Ok(v),
    }
}

/// The listeners of the library that match best, and the state of the registry in which they do.
struct Matching {
    count: usize,
    basis: Basis,
}

/// Finds the best listeners for `dst`. An error gives the reason why there are none.
fn matching(reg: &Registry, dst: &Addr, fd: i32) -> Result<Matching, Reason> {
    let netns = netns(fd).map_err(|_| Reason::Resource)?;
    for _ in 0..100 {
        let generation = reg.generation.load(Ordering::Acquire);
        if generation & 1 == 0 {
            let r = scan(reg, dst, netns);
            let touched = volatile(&reg.touched);
            core::sync::atomic::fence(Ordering::Acquire);
            if reg.generation.load(Ordering::Relaxed) == generation {
                let Best { count, listeners } = r?;
                let basis = Basis { generation, touched, listeners, ..Basis::default() };
                return Ok(Matching { count, basis });
            }
        }
        sys::sched_yield();
    }
    Err(Reason::NoListener)
}
