//! The monitor's registry, and its counts of listeners that have ended, as mapped in this process.

use crate::room;
use core::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use fsocket_proto::registry::{lessee, Registry, SIZE};
use fsocket_sys as sys;

static REGISTRY: AtomicPtr<Registry> = AtomicPtr::new(core::ptr::null_mut());

/// Counts of listeners that have ended, by port; see [`fsocket_proto::notice::Closings`].
static CLOSINGS: AtomicPtr<AtomicU32> = AtomicPtr::new(core::ptr::null_mut());

/// A count for this port that changes when any socket with the port begins or stops to listen.
/// Always 0 if the monitor cannot count.
pub fn closings(port: u16) -> u32 {
    let p = CLOSINGS.load(Ordering::Acquire);
    if p.is_null() {
        return 0;
    }
    // SAFETY: `map_closings` has mapped a word for each port. The range stays mapped when another
    // monitor comes: its memory is then replaced by zeros.
    unsafe { (*p.add(port as usize)).load(Ordering::Acquire) }
}

/// The registry, if it is mapped, that is if a call has needed it.
pub fn mapped() -> Option<&'static Registry> {
    let p = REGISTRY.load(Ordering::Acquire);
    // SAFETY: `map` has mapped SIZE bytes. The range stays mapped when another monitor comes: its
    // memory is then replaced by zeros.
    (!p.is_null()).then(|| unsafe { &*p })
}

/// Is the port leased to the process that has made this channel? The monitor answers in memory
/// that no client can write. (A channel without an owner has no port, because 0 marks a free
/// port.) If the registry is not mapped, the function only checks that the port is not privileged.
pub fn is_leased(port: u16, channel: u32) -> bool {
    match mapped() {
        Some(r) => lessee(channel) != 0 && r.owner[port as usize].load(Ordering::Acquire) == lessee(channel),
        None => port >= 1024,
    }
}

/// Maps the registry. Returns the address of the former one, or null.
pub fn map(fd: i32) -> *mut u8 {
    match sys::mmap(SIZE, libc::PROT_READ, libc::MAP_SHARED, fd, 0) {
        Ok(p) => {
            let before = REGISTRY.swap(p as *mut Registry, Ordering::AcqRel).cast();
            if room::is_locked() {
                munlock();
            }
            before
        }
        Err(_) => core::ptr::null_mut(),
    }
}

/// Unlocks the registry and the counts, because the program has locked its memory.
pub fn munlock() {
    sys::munlock(REGISTRY.load(Ordering::Acquire).cast(), SIZE);
    sys::munlock(CLOSINGS.load(Ordering::Acquire).cast(), fsocket_proto::CLOSINGS_SIZE);
}

/// Unmaps the registry and the counts. No other thread exists, and shared memory is not in use.
pub fn forget() {
    let registry = REGISTRY.swap(core::ptr::null_mut(), Ordering::AcqRel);
    let closings = CLOSINGS.swap(core::ptr::null_mut(), Ordering::AcqRel);
    for (at, len) in [(registry.cast::<u8>(), SIZE), (closings.cast(), fsocket_proto::CLOSINGS_SIZE)] {
        if !at.is_null() {
            // SAFETY: `map` or `map_closings` has mapped the range, and no other thread exists
            // that could read it.
            let _ = unsafe { sys::munmap(at, len) };
        }
    }
}

/// Drops the counts of a monitor that has died. Returns their address, or null.
pub fn forget_closings() -> *mut u8 {
    CLOSINGS.swap(core::ptr::null_mut(), Ordering::AcqRel).cast()
}

/// Maps the counts of listeners that have ended ([`fsocket_proto::notice::Closings`]).
pub fn map_closings(fd: i32) {
    if let Ok(p) = sys::mmap(fsocket_proto::CLOSINGS_SIZE, libc::PROT_READ, libc::MAP_SHARED, fd, 0) {
        CLOSINGS.store(p.cast(), Ordering::Release);
        if room::is_locked() {
            munlock();
        }
    }
}
