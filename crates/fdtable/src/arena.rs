//! The memory that this process shares with its fork group and the monitor, as it is mapped here.
//! [`crate::socks`] makes it, and hands out what lies in it.

use crate::lock::Lock;
use crate::memory_fd::Kept;
use core::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use fsocket_abi::arena::{Header, Zone, ZONES, ZONE_OFF};

#[link_section = ".data.fsocket_start"]
pub static ARENA: AtomicPtr<u8> = AtomicPtr::new(core::ptr::null_mut());

/// All arenas that are mapped here: this process's and those it has inherited.
pub static MAPPED: [AtomicPtr<u8>; MAPPED_MAX] = [const { AtomicPtr::new(core::ptr::null_mut()) }; MAPPED_MAX];

/// Their memory, for another monitor.
pub(crate) static KEPT: [Kept; MAPPED_MAX] = [const { Kept::new() }; MAPPED_MAX];

const MAPPED_MAX: usize = 128;

/// When an arena that could not be made may be tried again; u64::MAX: never. 0: none has failed.
#[link_section = ".data.fsocket_start"]
pub static FAILED: AtomicU64 = AtomicU64::new(0);

pub static LOCK: Lock<Free> = Lock::new(Free { of: 0, list: [0; FREE], n: 0, scan: 0 });

pub const FREE: usize = 256;

pub struct Free {
    /// The arena whose sockets these are; a forked child makes another one.
    pub of: usize,
    pub list: [u32; FREE],
    pub n: usize,
    pub scan: u32,
}

/// Has this process made an arena, or tried to?
pub fn is_wanted() -> bool {
    !ARENA.load(Ordering::Acquire).is_null() || FAILED.load(Ordering::Relaxed) != 0
}

/// The arena this process made for itself, if it has one.
pub fn header() -> Option<&'static Header> {
    let p = ARENA.load(Ordering::Acquire);
    // SAFETY: a non-null ARENA is a mapping of ARENA_SIZE that is never unmapped.
    (!p.is_null()).then(|| unsafe { &*(p as *const Header) })
}

/// Does the kernel say that the monitor of this memory has died, and has no other one been found since?
pub fn monitor_has_died() -> bool {
    header().is_some_and(|h| h.monitor.load(Ordering::Acquire) & fsocket_abi::arena::FUTEX_OWNER_DIED != 0)
}

/// The counters of a zone, if there is an arena.
pub fn zone(cpu: u32) -> Option<&'static Zone> {
    let p = ARENA.load(Ordering::Acquire);
    // SAFETY: as in `header`; the index stays below ZONES.
    (!p.is_null()).then(|| unsafe { &*(p.add(ZONE_OFF) as *const Zone).add(cpu as usize % ZONES) })
}

/// An arena has been mapped, whose descriptor `keep` keeps. False: there are too many.
pub fn note(base: *mut u8, keep: impl FnOnce(&Kept)) -> bool {
    let null = core::ptr::null_mut();
    let free = |m: &AtomicPtr<u8>| m.compare_exchange(null, base, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    let place = MAPPED.iter().position(free);
    if let Some(i) = place {
        keep(&KEPT[i]);
    }
    place.is_some()
}

/// Descriptors of the arenas that are mapped here, oldest first, each with whether this process has made it.
/// None: it was not kept.
pub fn shown() -> impl Iterator<Item = (Option<i32>, bool)> {
    let own = ARENA.load(Ordering::Acquire);
    let all = MAPPED.iter().map(|m| m.load(Ordering::Acquire)).zip(&KEPT);
    all.filter(|(base, _)| !base.is_null()).map(move |(base, kept)| (kept.fd(), base == own))
}

/// A descriptor of an arena got another number.
pub fn renumbered(old: i32, new: i32) -> bool {
    KEPT.iter().any(|kept| kept.renumbered(old, new))
}

/// One connection accepted by a worker of zone `cpu`; `from`: an index of `zone_accept`.
pub fn count_accept(cpu: u32, from: usize) {
    if let Some(z) = zone(cpu) {
        z.accepted[from].fetch_add(1, Ordering::Relaxed);
    }
}

pub fn lock_for_fork() -> bool {
    LOCK.lock().map(core::mem::forget).is_ok()
}
pub fn unlock_after_fork() {
    LOCK.reset_after_fork();
}

/// In a forked child: no arena of its own yet.
#[link_section = ".text.fsocket_start"]
pub fn become_child() {
    ARENA.store(core::ptr::null_mut(), Ordering::Release);
    FAILED.store(0, Ordering::Relaxed);
    LOCK.reset_after_fork();
}
