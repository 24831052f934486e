//! Descriptor number to what we know of it.
//!
//! A number that is not in the table is the kernel's alone, and costs one load
//! per call. Entries are private to the process (a forked child has a copy).

mod desc;

pub use desc::{kind, Desc, DESCS};

use crate::pieces::Pieces;
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering};

/// Numbers up to here are the kernel's, also as connections: stdio has streams on
/// them that read and write below our hooks.
pub const STDIO: i32 = 2;
/// Descriptors from here on are left to the kernel.
pub use crate::process::MAX_FD;

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
        d.dirty.store(true, Ordering::Relaxed);
    }
}

/// The place of a number; None: nothing was ever entered there.
#[inline]
fn entry(fd: i32) -> Option<&'static AtomicPtr<Desc>> {
    FDS.get(fd as usize).or_else(|| HIGH.get((fd as usize).wrapping_sub(LOW)))
}

/// A new description with one reference, all fields at their start values.
pub fn alloc(kind: u32) -> Option<&'static Desc> {
    let (_, d) = DESCS.alloc()?;
    d.refs.store(1, Ordering::Relaxed);
    d.generation.fetch_add(1, Ordering::Relaxed);
    for f in [&d.chan, &d.slot_index, &d.items, &d.family, &d.object, &d.zone, &d.kernel_family] {
        f.store(0, Ordering::Relaxed);
    }
    d.migrated_to.store(0, Ordering::Relaxed);
    d.detached.store(0, Ordering::Relaxed);
    d.midway.store(0, Ordering::Relaxed);
    d.forget_owners();
    d.options.store(0, Ordering::Relaxed);
    d.ticket.store(0, Ordering::Relaxed);
    d.settling.store(false, Ordering::Relaxed);
    d.comes_back.store(false, Ordering::Relaxed);
    d.dirty.store(false, Ordering::Relaxed);
    d.recycled.store(false, Ordering::Relaxed);
    d.set_close_on_exec(None);
    d.watched.store(false, Ordering::Relaxed);
    d.any_port.store(false, Ordering::Relaxed);
    d.grown.store(false, Ordering::Relaxed);
    d.nonblock.store(false, Ordering::Relaxed);
    d.kernel_nonblock.store(false, Ordering::Relaxed);
    d.one_way.store(0, Ordering::Relaxed);
    d.sent_before.store(0, Ordering::Relaxed);
    d.spin_rx.reset();
    d.spin_tx.reset();
    for (o, v) in d.opt.iter().zip(crate::options::DEFAULTS) {
        o.store(v, Ordering::Relaxed);
    }
    for e in &d.extra {
        e.store(0, Ordering::Relaxed);
    }
    d.kernel_only.store(false, Ordering::Relaxed);
    d.identity.store(crate::identity::UNKNOWN, Ordering::Relaxed);
    d.forked.store(false, Ordering::Relaxed);
    d.exec_prepared.store(false, Ordering::Relaxed);
    d.held_elsewhere.store(false, Ordering::Relaxed);
    d.passed_as.store(0, Ordering::Relaxed);
    d.tried.store(0, Ordering::Relaxed);
    d.accepts.store(false, Ordering::Relaxed);
    d.rcvtimeo.store(0, Ordering::Relaxed);
    d.sndtimeo.store(0, Ordering::Relaxed);
    d.kind.store(kind, Ordering::Release);
    Some(d)
}

/// Descriptions with a `kernel_end`.
static ENDS: AtomicU32 = AtomicU32::new(0);

/// The ring has something left, and `fd` of ours is what comes behind it. False: another thread
/// was faster.
pub fn set_end(d: &Desc, fd: i32) -> bool {
    let set = d.kernel_end.compare_exchange(0, fd + 1, Ordering::AcqRel, Ordering::Acquire).is_ok();
    ENDS.fetch_add(set.into(), Ordering::AcqRel);
    set
}

/// Its kernel end, which is the caller's to close.
pub fn take_end(d: &Desc) -> Option<i32> {
    let end = d.kernel_end.swap(0, Ordering::AcqRel);
    (end != 0).then(|| {
        ENDS.fetch_sub(1, Ordering::AcqRel);
        end - 1
    })
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
            let fd = d.migrated_to.load(Ordering::Relaxed) - 1;
            // (Nobody is in an operation on it.)
            if fds.contains(&fd) && d.refs.load(Ordering::Acquire) == 1 {
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
        at = d.retired_next.load(Ordering::Relaxed);
    }
}

/// Give a description back; nobody refers to it any more.
pub fn release(d: &Desc) {
    close_end(d);
    d.kind.store(kind::FREE, Ordering::Release);
    DESCS.free(d.index());
}

/// The last reference is gone and has been seen to: give the description back,
/// unless its end has made it wait for others ([`retire`]).
pub fn done_with(d: &Desc) {
    if d.refs.load(Ordering::Acquire) == 0 {
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
    d.refs.fetch_add(1, Ordering::AcqRel);
    d.retired_next.store(0, Ordering::Relaxed);
    d.retired_at.store(now, Ordering::Relaxed);
    let me = d.index() + 1;
    match DESCS.get(q.last.wrapping_sub(1)) {
        Some(last) if q.first != 0 => last.retired_next.store(me, Ordering::Relaxed),
        _ => q.first = me,
    }
    q.last = me;
    while let Some(old) = DESCS.get(q.first.wrapping_sub(1)) {
        if now.saturating_sub(old.retired_at.load(Ordering::Relaxed)) < LONG_NS {
            break;
        }
        q.first = old.retired_next.load(Ordering::Relaxed);
        if old.refs.fetch_sub(1, Ordering::AcqRel) == 1 {
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
    let entry = fd + 1;
    // Release: that; pairs with the acquire in `detached`.
    d.detached.store(if replaced { -entry } else { entry }, Ordering::Release);
}

/// The number by which an operation on `d` was called, if the program has given it up since, and
/// no other refers to `d`.
#[inline]
pub fn detached(d: &Desc) -> Option<Detached> {
    // Acquire: pairs with the release in `detach`; the number has left the table.
    match d.detached.load(Ordering::Acquire) {
        0 => None,
        n => sole(d, n),
    }
}

#[cold]
fn sole(d: &Desc, entry: i32) -> Option<Detached> {
    let mut left = false;
    each_fd(d, |_| left = true);
    if left {
        // Until another one is: this is asked before each sleep.
        let _ = d.detached.compare_exchange(entry, 0, Ordering::Relaxed, Ordering::Relaxed);
    }
    (!left).then_some(Detached { fd: entry.abs() - 1, replaced: entry < 0 })
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
    (0..DESCS.len()).filter_map(|i| DESCS.get(i)).filter(|d| d.refs.load(Ordering::Relaxed) > 0)
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
    let entry = entry(fd).filter(|_| d.refs.load(Ordering::Acquire) == 1);
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
