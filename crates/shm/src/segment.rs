//! Mappings for the segments of a channel, and the rings in them (ADR 64).

use crate::space;
use core::sync::atomic::{AtomicPtr, Ordering};
use fsocket_abi::channel::{ring_off, segment, segment_of, RING_CAP, RING_SLACK};
use fsocket_sys as sys;

/// Each segment except the first begins in the last page of the one before. A segment is mapped by
/// remapping that page, so no descriptor of the memory is needed.
pub const OVERLAP: usize = 4096;

/// Bytes of the mapping for segment `n`.
pub fn length(n: usize) -> usize {
    let (from, to) = segment(n);
    to - from + if n == 0 { 0 } else { OVERLAP }
}

/// The two rings of a slot.
#[derive(Clone, Copy)]
pub struct Rings([*mut u8; 2]);

impl Rings {
    /// The rings of `slot`. `at`: the address of the segment that has the slot.
    pub fn of_slot(slot: usize, at: usize) -> Rings {
        let (from, _) = segment(segment_of(slot));
        Rings([0, 1].map(|dir| (at + ring_off(slot, dir) - from) as *mut u8))
    }
    pub fn get(&self, dir: usize) -> *mut u8 {
        self.0[dir & 1]
    }

    /// Read-only rings that stay empty, for this end of a connection that only moves to the
    /// kernel.
    pub fn none() -> Option<Rings> {
        static NONE: AtomicPtr<u8> = AtomicPtr::new(core::ptr::null_mut());
        const LEN: usize = RING_CAP + RING_SLACK;
        if NONE.load(Ordering::Acquire).is_null() {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            let new = sys::mmap(LEN, libc::PROT_READ, flags, -1, 0).ok()?;
            if NONE.compare_exchange(core::ptr::null_mut(), new, Ordering::AcqRel, Ordering::Relaxed).is_err() {
                // SAFETY: the memory was just mapped with this length, and no other code knows the
                // address.
                let _ = unsafe { sys::munmap(new, LEN) };
            }
        }
        Some(Rings([NONE.load(Ordering::Acquire); 2]))
    }
}

/// Maps the first segment of a channel.
pub fn map_first(fd: i32) -> Option<*mut u8> {
    space::map(fd, length(0))
}

/// # Safety
/// `base` comes from [`map_first`], and no other code uses it.
pub unsafe fn unmap_first(base: *mut u8) {
    // SAFETY: `map_first` has mapped that many bytes there, and no other code uses them yet.
    unsafe { space::unmap(base, length(0)) };
}

/// Is there address space for another channel?
pub fn mappable() -> bool {
    space::has_room(length(0))
}
