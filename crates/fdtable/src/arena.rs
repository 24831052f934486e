//! The *arena*: memory that this process shares with its fork group and the monitor.
//! [`crate::socks`] makes it and hands out its sockets.

use crate::lock::Lock;
use crate::memory_fd::Kept;
use core::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use fsocket_abi::arena::{Header, Zone, ZONES, ZONE_OFF};

#[link_section = ".data.fsocket_start"]
pub static ARENA: AtomicPtr<u8> = AtomicPtr::new(core::ptr::null_mut());

/// All arenas that are mapped in this process: its own and inherited ones.
pub static MAPPED: [AtomicPtr<u8>; MAPPED_MAX] = [const { AtomicPtr::new(core::ptr::null_mut()) }; MAPPED_MAX];

/// The descriptors of these arenas, which are kept to show the arenas to the next monitor.
pub(crate) static KEPT: [Kept; MAPPED_MAX] = [const { Kept::new() }; MAPPED_MAX];

const MAPPED_MAX: usize = 128;

/// When no arena could be made: the time for the next try; u64::MAX: never; 0: no try has failed.
#[link_section = ".data.fsocket_start"]
pub static FAILED: AtomicU64 = AtomicU64::new(0);

pub static LOCK: Lock<Free> = Lock::new(Free { of: 0, list: [0; FREE], n: 0, scan: 0 });

pub const FREE: usize = 256;

pub struct Free {
    /// The arena to which these free sockets belong. (A forked child makes another arena.)
    pub of: usize,
    pub list: [u32; FREE],
    pub n: usize,
    pub scan: u32,
}

/// Has this process made an arena, or failed to make one?
pub fn is_wanted() -> bool {
    !ARENA.load(Ordering::Acquire).is_null() || FAILED.load(Ordering::Relaxed) != 0
}

/// The header of this process's own arena, if there is one.
pub fn header() -> Option<&'static Header> {
    let p = ARENA.load(Ordering::Acquire);
    // SAFETY: a non-null ARENA is a mapping of ARENA_SIZE that is never unmapped.
    (!p.is_null()).then(|| unsafe { &*(p as *const Header) })
}

/// Has the kernel marked the death of the monitor in the arena, and was no other monitor found
/// since?
pub fn monitor_has_died() -> bool {
    header().is_some_and(|h| h.monitor.load(Ordering::Acquire) & fsocket_abi::arena::FUTEX_OWNER_DIED != 0)
}

/// The counters of a zone, if there is an arena.
pub fn zone(cpu: u32) -> Option<&'static Zone> {
    let p = ARENA.load(Ordering::Acquire);
    // SAFETY: a non-null ARENA is a mapping of ARENA_SIZE that is never unmapped; the index is below ZONES.
    (!p.is_null()).then(|| unsafe { &*(p.add(ZONE_OFF) as *const Zone).add(cpu as usize % ZONES) })
}

/// Notes a mapped arena; `keep` keeps its descriptor. False: too many arenas are mapped.
pub fn note(base: *mut u8, keep: impl FnOnce(&Kept)) -> bool {
    let null = core::ptr::null_mut();
    let free = |m: &AtomicPtr<u8>| m.compare_exchange(null, base, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    let place = MAPPED.iter().position(free);
    if let Some(i) = place {
        keep(&KEPT[i]);
    }
    place.is_some()
}

/// For each mapped arena, oldest first: its descriptor, and whether this process has made the
/// arena. None: the descriptor was not kept.
pub fn shown() -> impl Iterator<Item = (Option<i32>, bool)> {
    let own = ARENA.load(Ordering::Acquire);
    let all = MAPPED.iter().map(|m| m.load(Ordering::Acquire)).zip(&KEPT);
    all.filter(|(base, _)| !base.is_null()).map(move |(base, kept)| (kept.fd(), base == own))
}

/// An arena's descriptor got another number.
pub fn renumbered(old: i32, new: i32) -> bool {
    KEPT.iter().any(|kept| kept.renumbered(old, new))
}

/// Counts a connection that a worker of zone `cpu` accepted; `from`: an index of `zone_accept`.
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

/// In a forked child: it has no arena of its own yet.
#[link_section = ".text.fsocket_start"]
pub fn become_child() {
    ARENA.store(core::ptr::null_mut(), Ordering::Release);
    FAILED.store(0, Ordering::Relaxed);
    LOCK.reset_after_fork();
}
