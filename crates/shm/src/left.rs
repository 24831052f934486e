//! Notes about memory that closed connections have left in rings ([`crate::trim`]).

use core::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use fsocket_abi::channel::SLOTS;

/// Bytes that stay allocated in rings of free slots, for the next connection there.
pub static KEPT: AtomicU64 = AtomicU64::new(0);
/// Bytes that the other sides had not read when this process closed.
pub static LEFT: AtomicU64 = AtomicU64::new(0);

/// A closed connection whose peer has unread bytes.
#[derive(Clone, Copy)]
pub struct Left {
    pub slot: u16,
    pub generation: u32,
    /// The position of the end of its stream.
    pub end: u64,
    pub bytes: u32,
}

/// The closed connections of one channel. All bytes zero is a valid value.
#[derive(Clone, Copy)]
pub struct Lefts {
    all: [Left; LEFTS],
    n: usize,
}
const LEFTS: usize = 256;

impl Lefts {
    pub fn add(&mut self, left: Left) {
        // If there is no room, the memory stays allocated until the slot is used again.
        if self.n < LEFTS {
            LEFT.fetch_add(left.bytes.into(), Ordering::Relaxed);
            self.all[self.n] = left;
            self.n += 1;
        }
    }
    pub fn retain(&mut self, stays: impl Fn(&Left) -> bool) {
        let mut i = 0;
        while i < self.n.min(LEFTS) {
            if stays(&self.all[i]) {
                i += 1;
                continue;
            }
            LEFT.fetch_sub(self.all[i].bytes.into(), Ordering::Relaxed);
            self.n -= 1;
            self.all[i] = self.all[self.n];
        }
    }
    pub fn is_empty(&self) -> bool {
        self.n == 0
    }
}

/// For each slot of a channel: KiB kept for the next connection. All bytes zero is a valid value.
#[repr(transparent)]
pub struct Kept([AtomicU16; SLOTS]);

impl Kept {
    pub fn keep(&self, slot: usize, bytes: u64) {
        self.reuse(slot);
        KEPT.fetch_add(bytes & !1023, Ordering::Relaxed);
        self.0[slot & (SLOTS - 1)].store((bytes >> 10) as u16, Ordering::Relaxed);
    }
    #[inline]
    pub fn reuse(&self, slot: usize) {
        let kept = &self.0[slot & (SLOTS - 1)];
        if kept.load(Ordering::Relaxed) != 0 {
            KEPT.fetch_sub(u64::from(kept.swap(0, Ordering::Relaxed)) << 10, Ordering::Relaxed);
        }
    }
    /// The channel has ended.
    pub fn forget(&self) {
        (0..SLOTS).for_each(|slot| self.reuse(slot));
    }
}
