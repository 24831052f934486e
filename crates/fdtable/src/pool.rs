//! A *placeholder* is a kernel socket behind the descriptor of a connection over shared memory.
//! It is *pristine* if it is like a new socket. When a connection is closed, its placeholder is
//! kept for the next connection if nothing has changed it. The library asks the kernel about its
//! state only when that matters ([`pristine`]).

use crate::bits::Bits;
use crate::identity;
use crate::lock::Lock;
use crate::pristine;
use crate::table::Desc;
use crate::{process, stats};
use core::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use fsocket_abi::arena::Counter;
use fsocket_sys::{self as sys, Result};

/// Maximum number of placeholders that are kept.
pub const MAX: usize = 16;

#[derive(Clone, Copy)]
struct Entry {
    fd: i32,
    family: u32,
    nonblock: bool,
    cloexec: bool,
    /// The identity of the thread that has made the socket ([`identity`]).
    identity: u64,
}
struct Pool {
    e: [Entry; MAX],
    n: usize,
}
const NONE: Entry = Entry { fd: -1, family: 0, nonblock: false, cloexec: false, identity: identity::UNKNOWN };
static POOL: Lock<Pool> = Lock::new(Pool { e: [NONE; MAX], n: 0 });

/// As far as the library knows, the kernel has no free descriptor below this one. The pool hands
/// out a descriptor only if the kernel would have chosen the same number.
#[link_section = ".data.fsocket_start"]
static FLOOR: AtomicI32 = AtomicI32::new(0);

/// The kernel has just returned `fd` as a new descriptor, so all lower numbers are in use.
pub fn kernel_allocated(fd: i32) {
    FLOOR.store(fd + 1, Ordering::Relaxed);
}
/// `fd` is free again in the kernel.
pub fn kernel_freed(fd: i32) {
    if fd < FLOOR.load(Ordering::Relaxed) {
        FLOOR.store(fd, Ordering::Relaxed);
    }
}

fn take(family: u32) -> Option<Entry> {
    let mut p = POOL.lock().ok()?;
    let floor = FLOOR.load(Ordering::Relaxed);
    let n = p.n;
    let (i, lowest) = p.e[..n].iter().enumerate().min_by_key(|(_, e)| e.fd)?;
    if lowest.fd > floor || family != lowest.family {
        return None;
    }
    let e = *lowest;
    p.e[i] = p.e[n - 1];
    p.n -= 1;
    HELD.set(e.fd, false);
    stats::count(Counter::PoolHits);
    Some(e)
}

fn set_cloexec(fd: i32, on: bool) {
    let _ = sys::fcntl(fd, libc::F_SETFD, if on { libc::FD_CLOEXEC as usize } else { 0 });
}

/// A placeholder for an accepted connection, with the listener's family. It keeps options that
/// the library does not know. Also returns whether the placeholder was used by another connection
/// before.
pub fn placeholder(family: u32, cloexec: bool) -> Result<(i32, bool)> {
    if let Some(e) = take(family) {
        if e.cloexec != cloexec {
            set_cloexec(e.fd, cloexec);
        }
        return Ok((e.fd, true));
    }
    let open = || sys::socket(family as i32, libc::SOCK_STREAM | if cloexec { libc::SOCK_CLOEXEC } else { 0 }, 0);
    let fd = open().or_else(|e| if drain() { open() } else { Err(e) })?;
    kernel_allocated(fd);
    Ok((fd, false))
}

/// Returns a pooled socket for the program's `socket()`, in the state of a new socket.
/// `identity`: the identity of the calling thread, if a policy may tell sockets apart by it.
pub fn socket(family: u32, nonblock: bool, cloexec: bool, identity: u64) -> Option<i32> {
    let e = take(family)?;
    if identity != identity::UNKNOWN && e.identity != identity {
        // The pooled socket is closed, so that the kernel gives its number to the new socket.
        let _ = sys::close(e.fd);
        kernel_freed(e.fd);
        return None;
    }
    if e.cloexec != cloexec {
        set_cloexec(e.fd, cloexec);
    }
    if e.nonblock != nonblock {
        let _ = sys::fcntl(e.fd, libc::F_SETFL, if nonblock { libc::O_NONBLOCK as usize } else { 0 });
    }
    Some(e.fd)
}

/// The descriptor `fd` of a connection has left the table. If nothing has changed the
/// placeholder, the pool keeps it; else it is closed. Returns what `close` returns.
pub fn recycle(fd: i32, d: &Desc) -> Result<()> {
    // (A child that borrows this process's memory (vfork) has a copy of each placeholder, so none
    // is kept.)
    let may_keep = fd > 2 && fd < TOP && !process::is_lent();
    let cloexec = if may_keep { pristine::close_on_exec_if_unchanged(fd, d) } else { None };
    if let Some(cloexec) = cloexec {
        if let Ok(mut p) = POOL.lock() {
            if p.n < most() {
                let n = p.n;
                p.e[n] = Entry {
                    fd,
                    family: d.placeholder().family(),
                    nonblock: d.placeholder().nonblock(),
                    cloexec,
                    identity: d.placeholder().identity(),
                };
                p.n += 1;
                HELD.set(fd, true);
                crate::keeping::keeping();
                return Ok(());
            }
        }
    }
    let r = sys::close(fd);
    kernel_freed(fd);
    r
}

/// Number of placeholders to keep: a small share of the descriptors that the process may have.
fn most() -> usize {
    /// One placeholder for this many descriptors.
    const SHARE: usize = 32;
    match MOST.load(Ordering::Relaxed) {
        0 => {
            let most = (crate::table::descriptor_limit() / SHARE).min(MAX);
            MOST.store(most + 1, Ordering::Relaxed);
            most
        }
        known => known - 1,
    }
}

/// The value of [`most`], plus one; 0: not computed yet.
#[link_section = ".data.fsocket_start"]
static MOST: AtomicUsize = AtomicUsize::new(0);

/// The program may have changed its limit of descriptors.
pub fn limited() {
    MOST.store(0, Ordering::Relaxed);
    drain();
}

/// Only descriptors below this one are kept.
const TOP: i32 = 800;
/// The descriptors in the pool.
static HELD: Bits<{ TOP as usize / 64 + 1 }> = Bits::new();

/// Is `fd` a descriptor in the pool, which the application believes closed?
#[inline(always)]
pub fn holds(fd: i32) -> bool {
    HELD.has(fd)
}

/// The application uses `fd` in a call that is about to reach the kernel. If the pool holds `fd`,
/// it is really closed now, so that the kernel returns EBADF.
#[inline(always)]
pub fn let_go(fd: i32) {
    if holds(fd) {
        drain();
    }
}

/// The application closes or overwrites a descriptor itself, so it leaves the pool.
pub fn forget(fd: i32) {
    // Most descriptors were never in the pool, and need no lock.
    if !holds(fd) {
        return;
    }
    if let Ok(mut p) = POOL.lock() {
        let n = p.n;
        if let Some(i) = p.e[..n].iter().position(|e| e.fd == fd) {
            p.e[i] = p.e[n - 1];
            p.n -= 1;
            HELD.set(fd, false);
        }
    }
}

/// Closes all pooled sockets. True: there were some.
pub fn drain() -> bool {
    if HELD.next(0, TOP as u32).is_none() {
        return false;
    }
    let Ok(mut p) = POOL.lock() else { return false };
    let n = p.n;
    for e in &p.e[..n] {
        HELD.set(e.fd, false);
        let _ = sys::close(e.fd);
        kernel_freed(e.fd);
    }
    p.n = 0;
    n > 0
}

/// [`drain`], and keeps the pool locked until [`unlock_after_fork`], so that it stays empty.
/// False: the calling thread has the lock already.
pub fn drain_for_loan() -> bool {
    let Ok(mut p) = POOL.lock() else { return false };
    for e in &p.e[..p.n] {
        HELD.set(e.fd, false);
        let _ = sys::close(e.fd);
        kernel_freed(e.fd);
    }
    p.n = 0;
    core::mem::forget(p);
    true
}

pub fn lock_for_fork() -> bool {
    POOL.lock().map(core::mem::forget).is_ok()
}
pub fn unlock_after_fork() {
    POOL.reset_after_fork();
}
