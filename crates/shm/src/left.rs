//! What is noted of rings in which closed connections have left memory ([`crate::trim`]).

use core::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use fsocket_abi::channel::SLOTS;

/// Bytes in rings whose slots wait for their next connection.
pub static KEPT: AtomicU64 = AtomicU64::new(0);
/// Bytes that the other sides had not read at the close.
pub static LEFT: AtomicU64 = AtomicU64::new(0);

/// A connection of which bytes were unread.
#[derive(Clone, Copy)]
pub struct Left {
    pub slot: u16,
    pub generation: u32,
    /// Where its stream ends.
    pub end: u64,
    pub bytes: u32,
}

/// Those of one channel. Zero is valid.
#[derive(Clone, Copy)]
pub struct Lefts {
    all: [Left; LEFTS],
    n: usize,
}
const LEFTS: usize = 256;

impl Lefts {
    pub fn add(&mut self, left: Left) {
        // (Beyond that they stay until the slots are used again.)
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

/// KiB that are kept for the next connection in each slot of a channel. Zero is valid.
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
    /// The channel is gone.
    pub fn forget(&self) {
        (0..SLOTS).for_each(|slot| self.reuse(slot));
    }
}
