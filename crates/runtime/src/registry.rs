//! The monitor's registry and its counts of listeners that ended, as this process has them mapped.

use crate::room;
use core::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use fsocket_proto::registry::{lessee, Registry, SIZE};
use fsocket_sys as sys;

static REGISTRY: AtomicPtr<Registry> = AtomicPtr::new(core::ptr::null_mut());

/// Counts of listeners that have ended, by port; see [`fsocket_proto::notice::Closings`].
static CLOSINGS: AtomicPtr<AtomicU32> = AtomicPtr::new(core::ptr::null_mut());

/// Changes when a socket with that port begins to listen, or stops, however it was closed; always 0 where
/// nobody can tell.
pub fn closings(port: u16) -> u32 {
    let p = CLOSINGS.load(Ordering::Acquire);
    if p.is_null() {
        return 0;
    }
    // SAFETY: `map_closings` has mapped a word for each port. The range stays when another monitor comes (its
    // memory is then replaced by zeros).
    unsafe { (*p.add(port as usize)).load(Ordering::Acquire) }
}

/// The registry, if it has been needed already.
pub fn mapped() -> Option<&'static Registry> {
    let p = REGISTRY.load(Ordering::Acquire);
    // SAFETY: `map` has mapped SIZE bytes. The range stays when another monitor comes (its memory is then
    // replaced by zeros).
    (!p.is_null()).then(|| unsafe { &*p })
}

/// Is a client's port one of the process that has made that channel? The monitor says so, in memory that no client can
/// write. (A number of nobody's has no port: 0 in the page is a free one.) A process that had no room to map it can only
/// tell that the port is not privileged.
pub fn is_leased(port: u16, channel: u32) -> bool {
    match mapped() {
        Some(r) => lessee(channel) != 0 && r.owner[port as usize].load(Ordering::Acquire) == lessee(channel),
        None => port >= 1024,
    }
}

/// Returns the memory of the one before, or null.
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

/// The program has locked its memory: the monitor's is none of it.
pub fn munlock() {
    sys::munlock(REGISTRY.load(Ordering::Acquire).cast(), SIZE);
    sys::munlock(CLOSINGS.load(Ordering::Acquire).cast(), fsocket_proto::CLOSINGS_SIZE);
}

/// Neither is mapped any more. There is no other thread, and no use of shared memory.
pub fn forget() {
    let registry = REGISTRY.swap(core::ptr::null_mut(), Ordering::AcqRel);
    let closings = CLOSINGS.swap(core::ptr::null_mut(), Ordering::AcqRel);
    for (at, len) in [(registry.cast::<u8>(), SIZE), (closings.cast(), fsocket_proto::CLOSINGS_SIZE)] {
        if !at.is_null() {
            // SAFETY: mapped by `map` or `map_closings`; nobody can be looking at it.
            let _ = unsafe { sys::munmap(at, len) };
        }
    }
}

/// The counts of another monitor are not these: their memory, or null.
pub fn forget_closings() -> *mut u8 {
    CLOSINGS.swap(core::ptr::null_mut(), Ordering::AcqRel).cast()
}

/// Maps the counts of listeners that ended ([`fsocket_proto::notice::Closings`]).
pub fn map_closings(fd: i32) {
    if let Ok(p) = sys::mmap(fsocket_proto::CLOSINGS_SIZE, libc::PROT_READ, libc::MAP_SHARED, fd, 0) {
        CLOSINGS.store(p.cast(), Ordering::Release);
        if room::is_locked() {
            munlock();
        }
    }
}
