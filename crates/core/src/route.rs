//! Where a destination leads: which channel, or the kernel.

use crate::chan::{self, Chan};
use crate::lock::Lock;
use crate::{ctl, name, process, registry, socks};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use fsocket_abi::arena::Counter;
use fsocket_abi::channel::CLIENT;
use fsocket_proto::registry::{Registry, ENTRIES, LOCALS};
use fsocket_proto::{kind, Addr, Msg, ROUTE_SECS};
use fsocket_sys as sys;

/// Listeners that share one address (SO_REUSEPORT).
const FAN: usize = 16;
const ROUTES: usize = 64;

#[derive(Clone, Copy)]
struct Route {
    ip: [u8; 16],
    port: u16,
    chans: [u16; FAN],
    n: u8,
    next: u8,
    generation: u64,
    /// [`registry::closings`] of the port, by the monitor, before it looked at the listeners.
    closings: u32,
    /// When the monitor said so, in ticks.
    asked: u64,
    /// It said no.
    refused: Option<Counter>,
    used: bool,
}
const EMPTY: Route = Route {
    ip: [0; 16],
    port: 0,
    chans: [0; FAN],
    n: 0,
    next: 0,
    generation: 0,
    closings: 0,
    asked: 0,
    refused: None,
    used: false,
};

struct Cache {
    routes: [Route; ROUTES],
    evict: usize,
}
/// Of several threads that ask for one destination the monitor sends the memory to one; the others
/// find it mapped when they have their turn.
static ASKING: Lock<()> = Lock::new(());
static CACHE: Lock<Cache> = Lock::new(Cache { routes: [EMPTY; ROUTES], evict: 0 });
/// SO_NETNS_COOKIE of this process; 0: not asked yet.
static NETNS: AtomicU64 = AtomicU64::new(0);
#[link_section = ".data.fsocket_start"]
static STALE: AtomicBool = AtomicBool::new(false);

/// Descriptors (plus one) that the kernel connects first, because the monitor wants to see that it
/// does; by number. One that is overwritten has its next connection looked at.
static FIRST: [AtomicI32; 16] = [const { AtomicI32::new(0) }; 16];

/// Forget all routes (a channel went away, or we are a forked child).
pub fn clear() {
    STALE.store(true, Ordering::Release);
}
pub fn reset_after_fork() {
    CACHE.reset_after_fork();
    ASKING.reset_after_fork();
    clear();
}
pub fn lock_for_fork() -> bool {
    CACHE.lock().map(core::mem::forget).is_ok()
}
pub fn unlock_after_fork() {
    CACHE.reset_after_fork();
}

/// The channel for a new connection to `dst`, or why the kernel must do it.
pub fn find(dst: &Addr, fd: i32) -> Result<&'static Chan, Counter> {
    if crate::sealed::restricted() {
        // What it had was taken from it, its counters too; the administrator sees why.
        let _ = socks::arena();
        return Err(Counter::FbDisabled);
    }
    if !process::enabled() {
        return Err(Counter::FbDisabled);
    }
    ctl::wanted();
    let reg = ctl::registry().ok_or(Counter::FbNoMonitor)?;
    if ctl::dead() {
        return Err(Counter::FbNoMonitor);
    }
    let generation = reg.generation.load(Ordering::Acquire);
    if let Some(known) = CACHE.lock().map_err(|_| Counter::FbReentry)?.get(dst, generation) {
        return known;
    }
    // Without the lock: threads that ask for other destinations do not wait for this answer.
    let r = discover(reg, dst, fd, generation)?;
    let first = match r.refused {
        Some(why) => Err(why),
        None => Ok(chan::CHANS.get(r.chans[0] as u32).filter(|_| r.n > 0).ok_or(Counter::FbNoListener)?),
    };
    CACHE.lock().map_err(|_| Counter::FbReentry)?.put(r);
    first
}

impl Cache {
    fn position(&self, dst: &Addr) -> Option<usize> {
        self.routes.iter().position(|r| r.used && r.port == dst.port && r.ip == dst.ip)
    }

    /// A channel to `dst`, or why there is none, if the monitor has said so lately and as of this
    /// `generation` of the registry.
    fn get(&mut self, dst: &Addr, generation: u64) -> Option<Result<&'static Chan, Counter>> {
        if STALE.swap(false, Ordering::AcqRel) {
            self.routes = [EMPTY; ROUTES];
        }
        let i = self.position(dst)?;
        let r = &mut self.routes[i];
        let age = sys::cpu::ticks().wrapping_sub(r.asked);
        let holds = r.refused.is_some() || r.closings == registry::closings(dst.port);
        if holds && r.generation == generation && age < ROUTE_SECS * 1_000_000 * sys::cpu::ticks_per_us() {
            if let Some(why) = r.refused {
                return Some(Err(why));
            }
            for _ in 0..r.n {
                r.next = (r.next + 1) % r.n;
                let c = chan::CHANS.get(r.chans[r.next as usize] as u32);
                if let Some(c) = c.filter(|c| usable(c)) {
                    return Some(Ok(c));
                }
            }
        }
        r.used = false;
        None
    }

    fn put(&mut self, r: Route) {
        let dst = Addr { ip: r.ip, port: r.port, ..Addr::default() };
        let at = self.position(&dst).unwrap_or(self.evict);
        self.evict = (self.evict + 1) % ROUTES;
        self.routes[at] = r;
    }
}

/// Asks the monitor for the channels to `dst`.
fn discover(reg: &Registry, dst: &Addr, fd: i32, generation: u64) -> Result<Route, Counter> {
    let matches = count_matches(reg, dst, fd)?;
    let mut r = EMPTY;
    (r.ip, r.port, r.generation, r.used) = (dst.ip, dst.port, generation, generation & 1 == 0);
    r.asked = sys::cpu::ticks();
    // SO_REUSEPORT siblings: the monitor hands them out in turn.
    for _ in 0..matches.min(FAN) * 2 {
        let (c, closings) = match ask(dst, fd, 0) {
            Ok(answer) => answer,
            // As long as it holds for channels.
            Err(why @ (Counter::FbOtherUser | Counter::FbPolicy)) => {
                r.refused = Some(why);
                break;
            }
            Err(why) => return Err(why),
        };
        if r.n == 0 {
            r.closings = closings;
        }
        let i = c.index() as u16;
        if r.chans[..r.n as usize].contains(&i) {
            continue;
        }
        r.chans[r.n as usize] = i;
        r.n += 1;
        if r.n as usize >= matches.min(FAN) {
            break;
        }
    }
    Ok(r)
}

/// The kernel has been asked to connect `fd` to `dst`. If it has done so already (on this host it
/// has, as a rule, also where the caller does not wait), the monitor is shown that, and the next
/// connections are over shared memory.
#[cold]
fn show(fd: i32, dst: &Addr) {
    const TCP_ESTABLISHED: u8 = 1;
    let mut state = [0u8; 1];
    let known = sys::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, &mut state).is_ok();
    if known && state[0] == TCP_ESTABLISHED {
        let _ = find(dst, fd);
    }
}

/// After the kernel's `connect` of `fd`, which has succeeded or goes on.
///
/// # Safety
/// `addr` is readable for `len` bytes.
#[inline]
pub unsafe fn connected(fd: i32, addr: *const libc::sockaddr, len: u32) {
    if fd >= 0 && FIRST[fd as usize % FIRST.len()].load(Ordering::Relaxed) == fd + 1 {
        FIRST[fd as usize % FIRST.len()].store(0, Ordering::Relaxed);
        // SAFETY: the caller's.
        if let Some(dst) = unsafe { name::parse(addr, len) } {
            show(fd, &Addr { ip: name::destination(dst.ip), ..dst });
        }
    }
}

/// Another channel to the same place: all slots of `full` are taken.
pub fn another(dst: &Addr, fd: i32, full: &Chan) -> Result<&'static Chan, Counter> {
    // One that was made before may have room again.
    let listener = full.listener.load(Ordering::Relaxed);
    let mut last = full.id.load(Ordering::Relaxed);
    for c in chan::all() {
        if c.listener.load(Ordering::Relaxed) == listener && usable(c) && !core::ptr::eq(c, full) {
            if let Some(mut cl) = c.client() {
                if let Some((s, _)) = c.take_slot(&mut cl) {
                    c.give_back(&mut cl, s);
                    return Ok(c);
                }
            }
            last = c.id.load(Ordering::Relaxed);
        }
    }
    ask(dst, fd, last).map(|(c, _)| c)
}

fn usable(c: &Chan) -> bool {
    c.id.load(Ordering::Acquire) != 0
        && c.my_side() == CLIENT
        && !c.retired.load(Ordering::Relaxed)
        && c.header().listener_closed.load(Ordering::Acquire) == 0
}

/// Also what the answer is valid for: see [`Route::closings`].
fn ask(dst: &Addr, fd: i32, full: u32) -> Result<(&'static Chan, u32), Counter> {
    // Until the channel is mapped.
    let _asking = ASKING.lock().map_err(|_| Counter::FbReentry)?;
    let mut m = Msg::new(kind::CONNECT);
    m.addr = *dst;
    m.arg0 = full as u64;
    // The monitor wants an unused socket, or one that is connected; one that the program has bound
    // is neither.
    let bound = crate::inspect::bound_address(fd).is_some_and(|a| a.port != 0 || !name::is_any(&a.ip));
    let other = match bound && !crate::inspect::is_connected(fd) {
        true => Some(sys::socket(dst.family.into(), libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0)),
        false => None,
    };
    let shown = match other {
        Some(Err(_)) => return Err(Counter::FbResource),
        Some(Ok(other)) => other,
        None => fd,
    };
    let answer = ctl::request(m, Some(shown));
    if shown != fd {
        let _ = sys::close(shown);
    }
    let (a, memfd) = match answer {
        Ok(v) => v,
        Err(e @ (sys::Errno::EPERM | sys::Errno::EACCES | sys::Errno::ENOKEY)) => {
            // The administrator sees what is refused, also to a process that never has more.
            let _ = socks::arena();
            if e != sys::Errno::ENOKEY {
                return Err(if e == sys::Errno::EPERM { Counter::FbOtherUser } else { Counter::FbPolicy });
            }
            FIRST[fd as usize % FIRST.len()].store(fd + 1, Ordering::Relaxed);
            return Err(Counter::FbKernelFirst);
        }
        Err(sys::Errno::ENOENT) => return Err(Counter::FbNoListener),
        Err(sys::Errno::EIO) => return Err(Counter::FbNoMonitor),
        Err(_) => return Err(Counter::FbResource),
    };
    match channel_of(&a, memfd) {
        Some(c) if usable(c) => Ok((c, a.addr.v6only)),
        Some(_) => Err(Counter::FbNoListener),
        None => Err(Counter::FbResource),
    }
}

/// The channel that an answer of the monitor's names; its memory comes with the first.
fn channel_of(a: &Msg, memfd: Option<i32>) -> Option<&'static Chan> {
    let c = match (chan::by_id(a.id as u32, CLIENT), memfd) {
        (Some(c), _) => Some(c),
        (None, Some(fd)) => chan::map(a.id as u32, a.arg0, CLIENT, fd).inspect(|c| c.first_ports(a.addr.port)),
        (None, None) => None,
    };
    if let Some(fd) = memfd {
        let _ = sys::close(fd);
    }
    c
}

/// The channel to whoever has accepted the connection `fd`, perhaps in another network namespace.
///
/// # Errors
/// As of [`kind::MEET`].
pub fn meet(fd: i32, full: u32) -> sys::Result<&'static Chan> {
    let _asking = ASKING.lock().map_err(|_| sys::Errno::EAGAIN)?;
    let mut m = Msg::new(kind::MEET);
    m.arg0 = full as u64;
    let (a, memfd) = ctl::request(m, Some(fd))?;
    channel_of(&a, memfd).filter(|c| usable(c)).ok_or(sys::Errno::ENOENT)
}

/// SO_NETNS_COOKIE of this process, asked once from a socket of its.
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

/// How many listeners of ours match best; an error says why none does.
fn count_matches(reg: &Registry, dst: &Addr, fd: i32) -> Result<usize, Counter> {
    let netns = netns(fd).map_err(|_| Counter::FbResource)?;
    for _ in 0..100 {
        let g = reg.generation.load(Ordering::Acquire);
        if g & 1 == 0 {
            let r = scan(reg, dst, netns);
            core::sync::atomic::fence(Ordering::Acquire);
            if reg.generation.load(Ordering::Relaxed) == g {
                return r;
            }
        }
        sys::sched_yield();
    }
    Err(Counter::FbNoListener)
}

/// How many listeners of the registry a connection to `dst` could go to, or why there are none.
pub fn scan(reg: &Registry, dst: &Addr, netns: u64) -> Result<usize, Counter> {
    let v4 = name::is_v4(&dst.ip);
    let local = name::is_loopback(&dst.ip) || {
        let n = (volatile(&reg.locals) as usize).min(LOCALS);
        reg.local.iter().take(n).any(|l| volatile(l) == dst.ip)
    };
    let (mut exact, mut any4, mut any6) = (0, 0, 0);
    let n = (volatile(&reg.entries) as usize).min(ENTRIES);
    for e in reg.entry.iter().take(n) {
        let (listener, ns, a) = (volatile(&e.listener), volatile(&e.netns), volatile(&e.addr));
        if listener == 0 || ns != netns || a.port != dst.port {
            continue;
        }
        if a.ip == dst.ip {
            exact += 1;
        } else if v4 && name::is_v4(&a.ip) && name::is_any(&a.ip) {
            any4 += 1;
        } else if !name::is_v4(&a.ip) && name::is_any(&a.ip) && (!v4 || a.v6only == 0) {
            any6 += 1;
        }
    }
    if exact > 0 {
        return Ok(exact);
    }
    match (local, any4 + any6) {
        (false, _) => Err(Counter::FbRemote),
        (true, 0) => Err(Counter::FbNoListener),
        (true, _) => Ok(if any4 > 0 { any4 } else { any6 }),
    }
}

/// The monitor may change the registry while we read; the generation tells.
pub fn volatile<T: Copy>(p: &T) -> T {
    // SAFETY: a reference is valid for reads.
    unsafe { core::ptr::read_volatile(p) }
}
