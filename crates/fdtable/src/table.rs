//! The table from descriptors to what the library knows of them.
//!
//! A descriptor that is not in the table belongs to the kernel alone, and costs one load per
//! call. Entries are private to the process; a forked child has a copy.

mod desc;

pub use desc::{Desc, Kept, KeptOption, Kind, DESCS};

use crate::pieces::Pieces;
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering};

/// Descriptors up to this one stay with the kernel even if they are connections, because the
/// streams of stdio read and write without the hooks.
pub const STDIO: i32 = 2;

/// Is `fd` one of these, in a program that may use the streams (ADR 81)?
pub fn is_stdio(fd: i32) -> bool {
    (0..=STDIO).contains(&fd) && !crate::process::is_told(fsocket_proto::program::NO_STDIO)
}

/// Descriptors from here on are left to the kernel.
use crate::process::MAX_FD;

// (The first entries are in memory that a fork copies anyway. Entries that are still zero take no
// memory. See layout.ld.)
#[link_section = ".bss.fsocket_numbers"]
static FDS: [AtomicPtr<Desc>; LOW] = [const { AtomicPtr::new(core::ptr::null_mut()) }; LOW];
const LOW: usize = 2048;
/// Entries for descriptors from `LOW` on.
static HIGH: Pieces<AtomicPtr<Desc>, 4096, { (MAX_FD - LOW).div_ceil(4096) }> = Pieces::new();

/// One more than the highest descriptor that was ever entered.
#[link_section = ".data.fsocket_start"]
static TOP: AtomicUsize = AtomicUsize::new(0);

#[inline(always)]
pub fn lookup(fd: i32) -> Option<&'static Desc> {
    // (This must not call a function, because hooks of small sends use no stack.)
    let p = match FDS.get(fd as usize) {
        Some(e) => e.load(Ordering::Acquire),
        None => HIGH.get((fd as usize).wrapping_sub(LOW))?.load(Ordering::Acquire),
    };
    // SAFETY: the table has only pointers into the slab, which stays mapped.
    unsafe { p.as_ref() }
}

/// The program has asked the kernel for something that identifies the placeholder behind `fd`, or
/// that may have changed it in a way the library does not follow. So the placeholder will not be
/// reused.
#[inline]
pub fn reached_kernel(fd: i32) {
    if let Some(d) = lookup(fd) {
        d.placeholder().mark_changed();
    }
}

/// The table's entry for a descriptor. None: no descriptor of that range was ever entered.
#[inline]
fn entry(fd: i32) -> Option<&'static AtomicPtr<Desc>> {
    FDS.get(fd as usize).or_else(|| HIGH.get((fd as usize).wrapping_sub(LOW)))
}

/// A new description with one reference and initial values.
pub fn alloc(kind: Kind) -> Option<&'static Desc> {
    let (_, d) = DESCS.alloc()?;
    d.reset();
    d.set_kind(kind);
    Some(d)
}

/// Number of descriptions with a `kernel_end`.
static ENDS: AtomicU32 = AtomicU32::new(0);

/// Records that the stream continues in the kernel socket `fd`, after the bytes that are left in
/// the ring. False: another thread was faster.
pub fn set_end(d: &Desc, fd: i32) -> bool {
    let set = d.path().set_kernel_end(fd);
    ENDS.fetch_add(set.into(), Ordering::AcqRel);
    set
}

/// The connection's kernel end, which epoll instances may watch even after the connection has
/// moved to the kernel.
pub fn end_of(d: &Desc) -> Option<i32> {
    d.path().kernel_end()
}

/// Takes the connection's kernel end out; the caller must close it.
pub fn take_end(d: &Desc) -> Option<i32> {
    let end = d.path().take_kernel_end();
    if end.is_some() {
        ENDS.fetch_sub(1, Ordering::AcqRel);
    }
    end
}

fn close_end(d: &Desc) {
    if let Some(end) = take_end(d) {
        crate::process::close_own(end);
    }
}

/// The program gives up these descriptors, and the table forgets them. A connection that has
/// moved to the kernel has descriptors of the library that would keep it alive; they are closed
/// together with the program's.
#[inline]
pub fn fds_gone(fds: core::ops::RangeInclusive<i32>) {
    if ENDS.load(Ordering::Relaxed) != 0 {
        each_retired(|d| {
            // (If there is only one reference, no thread is in an operation on it.)
            if d.path().went_to().is_some_and(|fd| fds.contains(&fd)) && d.refs() == 1 {
                close_end(d);
            }
        });
    }
}

/// Is there anything that [`fds_gone`] would close?
#[inline]
pub fn has_ends() -> bool {
    ENDS.load(Ordering::Relaxed) != 0
}

#[cold]
fn each_retired(f: impl Fn(&Desc)) {
    let Ok(q) = RETIRED.lock() else { return };
    let mut at = q.first;
    for _ in 0..DESCS.len() {
        let Some(d) = DESCS.get(at.wrapping_sub(1)) else { return };
        f(d);
        at = d.path().retired().0;
    }
}

/// Frees a description to which nothing refers any more.
pub fn release(d: &Desc) {
    close_end(d);
    d.set_kind(Kind::Free);
    DESCS.free(d.index());
}

/// Called after the last reference was dropped and handled: frees the description, unless it has
/// to wait for other threads ([`retire`]).
pub fn done_with(d: &Desc) {
    if !d.is_used() {
        release(d);
    }
}

/// Frees, after a while, a description whose connection has moved to the kernel. Other threads
/// may be about to begin an operation on it, so it keeps its kind until no such thread can be
/// left. It does no harm if such descriptions wait.
pub fn retire(d: &Desc) {
    const LONG_NS: u64 = 2_000_000_000;
    let Ok(mut q) = RETIRED.lock() else { return };
    let now = fsocket_sys::now_ns();
    d.add_ref();
    d.path().retire(now);
    let me = d.index() + 1;
    match DESCS.get(q.last.wrapping_sub(1)) {
        Some(last) if q.first != 0 => last.path().set_retired_next(me),
        _ => q.first = me,
    }
    q.last = me;
    while let Some(old) = DESCS.get(q.first.wrapping_sub(1)) {
        let (next, since) = old.path().retired();
        if now.saturating_sub(since) < LONG_NS {
            break;
        }
        q.first = next;
        if old.drop_ref() {
            release(old);
        }
    }
}

struct Retired {
    first: u32,
    last: u32,
}
#[link_section = ".data.fsocket_start"]
static RETIRED: crate::lock::Lock<Retired> = crate::lock::Lock::new(Retired { first: 0, last: 0 });

/// In a forked child: frees descriptions that were waiting.
#[link_section = ".text.fsocket_start"]
pub fn become_child() {
    RETIRED.reset_after_fork();
    // Only threads of the parent could still use them, and the child has one thread only.
    each_retired(close_end);
}

/// Enters a descriptor. False: its number is too high for the table, or there is no memory.
pub fn install(fd: i32, d: &'static Desc) -> bool {
    match FDS.get(fd as usize).or_else(|| HIGH.make((fd as usize).wrapping_sub(LOW))) {
        Some(e) => {
            if fd as usize >= TOP.load(Ordering::Relaxed) {
                TOP.fetch_max(fd as usize + 1, Ordering::Relaxed);
            }
            e.store(d as *const Desc as *mut Desc, Ordering::Release);
            true
        }
        None => false,
    }
}

/// Removes a descriptor from the table, and returns its description.
pub fn remove(fd: i32) -> Option<&'static Desc> {
    let e = entry(fd)?;
    // Most entries are empty (kernel descriptors), and a swap would take the cache line
    // exclusively.
    if e.load(Ordering::Relaxed).is_null() {
        return None;
    }
    let p = e.swap(core::ptr::null_mut(), Ordering::AcqRel);
    // SAFETY: the table has only pointers into the slab, which stays mapped.
    unsafe { p.as_ref() }
}

/// Any descriptor that refers to `d`.
pub fn fd_of(d: &Desc) -> Option<i32> {
    let mut found = None;
    each_entry(d, &mut |fd, _| {
        found.get_or_insert(fd);
    });
    found
}

/// A descriptor that the program has closed or overwritten while an operation used it.
pub struct Detached {
    pub fd: i32,
    /// Another file has taken the descriptor by `dup2`; it was not closed.
    pub replaced: bool,
}

/// Notes that the descriptor `fd` of `d` has left the table.
pub fn detach(d: &Desc, fd: i32, replaced: bool) {
    d.path().set_detached(fd, replaced);
}

/// The descriptor by which an operation on `d` was called, if the program has given up that
/// descriptor since and no other descriptor refers to `d`.
#[inline]
pub fn detached(d: &Desc) -> Option<Detached> {
    d.path().detached().and_then(|last| sole(d, last))
}

#[cold]
fn sole(d: &Desc, last: (i32, bool)) -> Option<Detached> {
    let mut left = false;
    each_fd(d, |_| left = true);
    if left {
        // This stays true until another descriptor is detached, so it is noted: each sleep asks
        // for it.
        d.path().forget_detached(last);
    }
    (!left).then_some(Detached { fd: last.0, replaced: last.1 })
}

/// One more than the highest descriptor that a scan of all descriptors must look at.
pub fn scan_limit() -> usize {
    descriptor_limit().clamp(1024, MAX_FD)
}

/// Number of descriptors that the process may have.
pub fn descriptor_limit() -> usize {
    usize::try_from(fsocket_sys::limit(libc::RLIMIT_NOFILE)).unwrap_or(usize::MAX)
}

/// All descriptions in use.
pub fn all() -> impl Iterator<Item = &'static Desc> {
    (0..DESCS.len()).filter_map(|i| DESCS.get(i)).filter(|d| d.is_used())
}

/// Removes all descriptors of `d` from the table, and frees the description. The kernel serves
/// them from now on.
pub fn forget(d: &Desc) {
    remove_fds(d);
    release(d);
}

/// As [`forget`], if the caller knows a descriptor of the description. Usually it is the only
/// one.
pub fn forget_fd(fd: i32, d: &Desc) {
    let me = d as *const Desc as *mut Desc;
    let entry = entry(fd).filter(|_| d.refs() == 1);
    // A search of the whole table takes long if there are many connections.
    let only = entry
        .is_some_and(|e| e.compare_exchange(me, core::ptr::null_mut(), Ordering::AcqRel, Ordering::Relaxed).is_ok());
    match only {
        true => release(d),
        false => forget(d),
    }
}

/// Removes all descriptors of `d` from the table.
pub fn remove_fds(d: &Desc) {
    let me = d as *const Desc as *mut Desc;
    each_entry(d, &mut |_, e| {
        let _ = e.compare_exchange(me, core::ptr::null_mut(), Ordering::AcqRel, Ordering::Relaxed);
    });
}

/// Calls `f` for every descriptor of `d`.
pub fn each_fd(d: &Desc, mut f: impl FnMut(i32)) {
    each_entry(d, &mut |fd, _| f(fd));
}

/// Calls `f` for every descriptor in the table.
pub fn each(mut f: impl FnMut(i32, &'static Desc)) {
    for fd in 0..TOP.load(Ordering::Relaxed) as i32 {
        if let Some(d) = lookup(fd) {
            f(fd, d);
        }
    }
}

fn each_entry(d: &Desc, f: &mut dyn FnMut(i32, &AtomicPtr<Desc>)) {
    let me = d as *const Desc as *mut Desc;
    let top = TOP.load(Ordering::Relaxed);
    let high = HIGH.first(top.saturating_sub(LOW)).map(|(i, e)| (i + LOW, e));
    for (fd, e) in FDS.iter().take(top).enumerate().chain(high) {
        if e.load(Ordering::Relaxed) == me {
            f(fd as i32, e);
        }
    }
}
