//! Where a destination leads: which channel, or the kernel.

use crate::chan::{self, Chan};
use crate::lock::Lock;
use crate::{ctl, name, process};
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use fsocket_abi::arena::Counter;
use fsocket_abi::channel::CLIENT;
use fsocket_proto::registry::{Registry, ENTRIES, LOCALS};
use fsocket_proto::{kind, Addr, Msg};
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
    used: bool,
}
const EMPTY: Route = Route { ip: [0; 16], port: 0, chans: [0; FAN], n: 0, next: 0, generation: 0, used: false };

struct Cache {
    routes: [Route; ROUTES],
    evict: usize,
}
static CACHE: Lock<Cache> = Lock::new(Cache { routes: [EMPTY; ROUTES], evict: 0 });
/// SO_NETNS_COOKIE of this process; 0: not asked yet.
static NETNS: AtomicU64 = AtomicU64::new(0);
static STALE: AtomicBool = AtomicBool::new(false);

/// Forget all routes (a channel went away, or we are a forked child).
pub fn clear() {
    STALE.store(true, Ordering::Release);
}
pub fn reset_after_fork() {
    CACHE.reset_after_fork();
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
    if !process::enabled() {
        return Err(Counter::FbDisabled);
    }
    ctl::wanted();
    let reg = ctl::registry().ok_or(Counter::FbNoMonitor)?;
    if ctl::dead() {
        return Err(Counter::FbNoMonitor);
    }
    let mut cache = CACHE.lock().map_err(|_| Counter::FbReentry)?;
    if STALE.swap(false, Ordering::AcqRel) {
        cache.routes = [EMPTY; ROUTES];
    }
    let generation = reg.generation.load(Ordering::Acquire);
    let hit = cache.routes.iter().position(|r| r.used && r.port == dst.port && r.ip == dst.ip);
    if let Some(i) = hit {
        let r = &mut cache.routes[i];
        if r.generation == generation {
            for _ in 0..r.n {
                r.next = (r.next + 1) % r.n;
                if let Some(c) = chan::CHANS.get(r.chans[r.next as usize] as u32) {
                    if usable(c) {
                        return Ok(c);
                    }
                }
            }
        }
        r.used = false;
    }
    let matches = count_matches(reg, dst, fd)?;
    let mut r = EMPTY;
    // SO_REUSEPORT siblings: the monitor hands them out in turn.
    for _ in 0..matches.min(FAN) * 2 {
        let c = ask(dst, fd, 0)?;
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
    let first = chan::CHANS.get(r.chans[0] as u32).filter(|_| r.n > 0).ok_or(Counter::FbNoListener)?;
    (r.ip, r.port, r.generation, r.used) = (dst.ip, dst.port, generation, generation & 1 == 0);
    let at = hit.unwrap_or(cache.evict);
    cache.evict = (cache.evict + 1) % ROUTES;
    cache.routes[at] = r;
    Ok(first)
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
    ask(dst, fd, last)
}

fn usable(c: &Chan) -> bool {
    c.id.load(Ordering::Acquire) != 0
        && c.my_side() == CLIENT
        && !c.retired.load(Ordering::Relaxed)
        && c.header().listener_closed.load(Ordering::Acquire) == 0
}

fn ask(dst: &Addr, fd: i32, full: u32) -> Result<&'static Chan, Counter> {
    let mut m = Msg::new(kind::CONNECT);
    m.addr = *dst;
    m.arg0 = full as u64;
    let (a, memfd) = match ctl::request(m, Some(fd)) {
        Ok(v) => v,
        Err(sys::Errno::ENOENT) => return Err(Counter::FbNoListener),
        Err(sys::Errno::EIO) => return Err(Counter::FbNoMonitor),
        Err(_) => return Err(Counter::FbResource),
    };
    let c = match (chan::by_id(a.id as u32, CLIENT), memfd) {
        (Some(c), _) => Some(c),
        (None, Some(fd)) => chan::map(a.id as u32, a.arg0, CLIENT, fd).inspect(|c| c.first_ports(a.addr.port)),
        (None, None) => None,
    };
    if let Some(fd) = memfd {
        let _ = sys::close(fd);
    }
    match c {
        Some(c) if usable(c) => Ok(c),
        Some(_) => Err(Counter::FbNoListener),
        None => Err(Counter::FbResource),
    }
}

/// How many listeners of ours match best; an error says why none does.
fn count_matches(reg: &Registry, dst: &Addr, fd: i32) -> Result<usize, Counter> {
    let netns = match NETNS.load(Ordering::Relaxed) {
        0 => {
            let mut b = [0u8; 8];
            const SO_NETNS_COOKIE: i32 = 71;
            sys::getsockopt(fd, libc::SOL_SOCKET, SO_NETNS_COOKIE, &mut b).map_err(|_| Counter::FbResource)?;
            let v = u64::from_ne_bytes(b);
            NETNS.store(v, Ordering::Relaxed);
            v
        }
        v => v,
    };
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

fn scan(reg: &Registry, dst: &Addr, netns: u64) -> Result<usize, Counter> {
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
fn volatile<T: Copy>(p: &T) -> T {
    // SAFETY: a reference is valid for reads.
    unsafe { core::ptr::read_volatile(p) }
}
