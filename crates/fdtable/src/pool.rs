//! Placeholders: pristine kernel sockets that stand behind the descriptor
//! numbers of our connections. Closing a connection keeps its placeholder for
//! the next one if nothing has changed it; the kernel is asked when the answer matters ([`pristine`]).

use crate::bits::Bits;
use crate::identity;
use crate::lock::Lock;
use crate::pristine;
use crate::table::Desc;
use crate::{process, stats};
use core::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use fsocket_abi::arena::Counter;
use fsocket_sys::{self as sys, Result};

/// Placeholders kept at most.
pub const MAX: usize = 16;

#[derive(Clone, Copy)]
struct Entry {
    fd: i32,
    family: u32,
    nonblock: bool,
    cloexec: bool,
    /// The identity of the thread that has made it ([`identity`]).
    identity: u64,
}
struct Pool {
    e: [Entry; MAX],
    n: usize,
}
const NONE: Entry = Entry { fd: -1, family: 0, nonblock: false, cloexec: false, identity: identity::UNKNOWN };
static POOL: Lock<Pool> = Lock::new(Pool { e: [NONE; MAX], n: 0 });

/// No descriptor number below this is free in the kernel, as far as we saw.
/// The pool hands out a number only if the kernel would have chosen it too.
#[link_section = ".data.fsocket_start"]
static FLOOR: AtomicI32 = AtomicI32::new(0);

/// The kernel has just given out `fd`: all below are taken.
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

/// A placeholder for an accepted connection, of the listener's family: it
/// answers for options that we do not know. And whether it is recycled.
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

/// A kernel socket as `socket()` would return it.
/// `identity`: of this thread, if there is a policy that may tell sockets by it.
pub fn socket(family: u32, nonblock: bool, cloexec: bool, identity: u64) -> Option<i32> {
    let e = take(family)?;
    if identity != identity::UNKNOWN && e.identity != identity {
        // The kernel gives its number to the next one.
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

/// The number `fd` of a connection is not in the table any more: keep its placeholder, if nothing has changed it, or
/// close it. Returns what `close` returns.
pub fn recycle(fd: i32, d: &Desc) -> Result<()> {
    // (A child in this process's memory has a copy of each.)
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

/// Placeholders that may be kept: few of all numbers that the process can have.
fn most() -> usize {
    /// One of so many numbers.
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

/// What [`most`] says, plus one; 0: not asked yet.
#[link_section = ".data.fsocket_start"]
static MOST: AtomicUsize = AtomicUsize::new(0);

/// The process may have another number of descriptors from now on.
pub fn limited() {
    MOST.store(0, Ordering::Relaxed);
    drain();
}

/// Only numbers below are kept.
const TOP: i32 = 800;
/// Numbers in the pool.
static HELD: Bits<{ TOP as usize / 64 + 1 }> = Bits::new();

/// Is `fd` a number that the application believes closed?
#[inline(always)]
pub fn holds(fd: i32) -> bool {
    HELD.has(fd)
}

/// The application uses `fd` in a call that is about to reach the kernel: if it believes that
/// number closed, the kernel must, too.
#[inline(always)]
pub fn let_go(fd: i32) {
    if holds(fd) {
        drain();
    }
}

/// The application closes or overwrites a number itself: not ours any more.
pub fn forget(fd: i32) {
    // Most never were; no lock for them.
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

/// Close all; true if there were any.
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

/// [`drain`], and nothing is kept before [`unlock_after_fork`]. False: the calling thread is in the middle of something
/// here.
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
