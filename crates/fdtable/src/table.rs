//! Descriptor number to what we know of it.
//!
//! A number that is not in the table is the kernel's alone, and costs one load
//! per call. Entries are private to the process (a forked child has a copy).

mod desc;

pub use desc::{Desc, Kept, KeptOption, Kind, DESCS};

use crate::pieces::Pieces;
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering};

/// Numbers up to here are the kernel's, also as connections: stdio has streams on
/// them that read and write below our hooks.
pub const STDIO: i32 = 2;
/// Descriptors from here on are left to the kernel.
use crate::process::MAX_FD;

// (The first lie beside what a fork writes; the zeros behind need no memory. layout.ld.)
#[link_section = ".bss.fsocket_numbers"]
static FDS: [AtomicPtr<Desc>; LOW] = [const { AtomicPtr::new(core::ptr::null_mut()) }; LOW];
const LOW: usize = 2048;
/// From number `LOW` on.
static HIGH: Pieces<AtomicPtr<Desc>, 4096, { (MAX_FD - LOW).div_ceil(4096) }> = Pieces::new();

/// One more than the highest number ever entered.
#[link_section = ".data.fsocket_start"]
static TOP: AtomicUsize = AtomicUsize::new(0);

#[inline(always)]
pub fn lookup(fd: i32) -> Option<&'static Desc> {
    // (No call in here: hooks of small sends use no stack.)
    let p = match FDS.get(fd as usize) {
        Some(e) => e.load(Ordering::Acquire),
        None => HIGH.get((fd as usize).wrapping_sub(LOW))?.load(Ordering::Acquire),
    };
    // SAFETY: the table holds only pointers into the slab, which stays mapped.
    unsafe { p.as_ref() }
}

/// The program has asked the kernel for what tells the placeholder behind `fd` from others, or may have changed it by
/// something that the library does not follow: it is not recycled.
#[inline]
pub fn reached_kernel(fd: i32) {
    if let Some(d) = lookup(fd) {
        d.placeholder().mark_changed();
    }
}

/// The place of a number; None: nothing was ever entered there.
#[inline]
fn entry(fd: i32) -> Option<&'static AtomicPtr<Desc>> {
    FDS.get(fd as usize).or_else(|| HIGH.get((fd as usize).wrapping_sub(LOW)))
}

/// A new description with one reference, all fields at their start values.
pub fn alloc(kind: Kind) -> Option<&'static Desc> {
    let (_, d) = DESCS.alloc()?;
    d.reset();
    d.set_kind(kind);
    Some(d)
}

/// Descriptions with a `kernel_end`.
static ENDS: AtomicU32 = AtomicU32::new(0);

/// The ring has something left, and `fd` of ours is what comes behind it. False: another thread
/// was faster.
pub fn set_end(d: &Desc, fd: i32) -> bool {
    let set = d.path().set_kernel_end(fd);
    ENDS.fetch_add(set.into(), Ordering::AcqRel);
    set
}

/// Its kernel end, which is the caller's to close.
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

/// The program gives these numbers up, and this process forgets them. A connection that has become the kernel's
/// leaves descriptors behind, which would keep it alive: they are closed with its number.
#[inline]
pub fn fds_gone(fds: core::ops::RangeInclusive<i32>) {
    if ENDS.load(Ordering::Relaxed) != 0 {
        each_retired(|d| {
            // (One reference: nobody is in an operation on it.)
            if d.path().went_to().is_some_and(|fd| fds.contains(&fd)) && d.refs() == 1 {
                close_end(d);
            }
        });
    }
}

/// Has [`fds_gone`] anything to look for?
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

/// Give a description back; nobody refers to it any more.
pub fn release(d: &Desc) {
    close_end(d);
    d.set_kind(Kind::Free);
    DESCS.free(d.index());
}

/// The last reference is gone and has been seen to: give the description back,
/// unless its end has made it wait for others ([`retire`]).
pub fn done_with(d: &Desc) {
    if !d.is_used() {
        release(d);
    }
}

/// A description that became the kernel's while other threads may be on their
/// way into an operation on it: it stays what it is for so long that none of
/// them can still be, and is given back then. Nothing is lost by a number of
/// them waiting.
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

/// In a forked child.
#[link_section = ".text.fsocket_start"]
pub fn become_child() {
    RETIRED.reset_after_fork();
    // The parent's threads may be on their way; we are alone.
    each_retired(close_end);
}

/// Enter a number. False: the number is too high for the table, or there is no memory for it.
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

/// Take a number out and say what it was.
pub fn remove(fd: i32) -> Option<&'static Desc> {
    let e = entry(fd)?;
    // Most are the kernel's, and a swap would have the line for itself.
    if e.load(Ordering::Relaxed).is_null() {
        return None;
    }
    let p = e.swap(core::ptr::null_mut(), Ordering::AcqRel);
    // SAFETY: as in `lookup`.
    unsafe { p.as_ref() }
}

/// A number that refers to `d`.
pub fn fd_of(d: &Desc) -> Option<i32> {
    let mut found = None;
    each_entry(d, &mut |fd, _| {
        found.get_or_insert(fd);
    });
    found
}

/// A number that the program has taken from a description.
pub struct Detached {
    pub fd: i32,
    /// By putting something else in its place, not by `close`.
    pub replaced: bool,
}

/// `fd` has left the table, where it referred to `d`.
pub fn detach(d: &Desc, fd: i32, replaced: bool) {
    d.path().set_detached(fd, replaced);
}

/// The number by which an operation on `d` was called, if the program has given it up since, and
/// no other refers to `d`.
#[inline]
pub fn detached(d: &Desc) -> Option<Detached> {
    d.path().detached().and_then(|last| sole(d, last))
}

#[cold]
fn sole(d: &Desc, last: (i32, bool)) -> Option<Detached> {
    let mut left = false;
    each_fd(d, |_| left = true);
    if left {
        // Until another one is: this is asked before each sleep.
        d.path().forget_detached(last);
    }
    (!left).then_some(Detached { fd: last.0, replaced: last.1 })
}

/// Highest number that a scan must look at.
pub fn scan_limit() -> usize {
    descriptor_limit().clamp(1024, MAX_FD)
}

/// How many descriptors the process may have.
pub fn descriptor_limit() -> usize {
    usize::try_from(fsocket_sys::limit(libc::RLIMIT_NOFILE)).unwrap_or(usize::MAX)
}

/// All descriptions in use.
pub fn all() -> impl Iterator<Item = &'static Desc> {
    (0..DESCS.len()).filter_map(|i| DESCS.get(i)).filter(|d| d.is_used())
}

/// Forget a description that turned out to be the kernel's business: every
/// number that refers to it leaves the table.
pub fn forget(d: &Desc) {
    remove_fds(d);
    release(d);
}

/// [`forget`], where `fd` is one of its numbers, and mostly the only one.
pub fn forget_fd(fd: i32, d: &Desc) {
    let me = d as *const Desc as *mut Desc;
    let entry = entry(fd).filter(|_| d.refs() == 1);
    // A table of many connections is long to look through.
    let only = entry
        .is_some_and(|e| e.compare_exchange(me, core::ptr::null_mut(), Ordering::AcqRel, Ordering::Relaxed).is_ok());
    match only {
        true => release(d),
        false => forget(d),
    }
}

/// Every number that refers to `d` leaves the table.
pub fn remove_fds(d: &Desc) {
    let me = d as *const Desc as *mut Desc;
    each_entry(d, &mut |_, e| {
        let _ = e.compare_exchange(me, core::ptr::null_mut(), Ordering::AcqRel, Ordering::Relaxed);
    });
}

/// Do `f` for every number that refers to `d`.
pub fn each_fd(d: &Desc, mut f: impl FnMut(i32)) {
    each_entry(d, &mut |fd, _| f(fd));
}

/// Do `f` for every number in the table.
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
