//! Addresses of the segments of a shared memory. A thread maps a segment when it first needs it;
//! all segments are unmapped together.
//!
//! There is no lock: several threads may map the same segment, and the first to publish its
//! mapping wins. A thread that loses unmaps its own mapping. This is correct even if the memory
//! was closed meanwhile and another memory has taken this place.

use crate::atomic::{AtomicUsize, Ordering};

/// Why there is no address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// The memory is closed.
    Closed,
    /// The segment cannot be mapped.
    Failed,
}

/// The memory is closed. The value is 0, so memory of zeros starts as closed.
const CLOSED: usize = 0;

/// Addresses, which are even and not 0. All bytes zero is a valid value: closed.
pub struct Segments<const N: usize> {
    /// Counts the memories that have used this place, so that a thread does not confuse one with
    /// the next.
    uses: AtomicUsize,
    /// An address, or [`CLOSED`], or an odd number (the segment is not mapped yet), made of the
    /// count of uses.
    at: [AtomicUsize; N],
}

impl<const N: usize> Segments<N> {
    #[cfg(not(loom))]
    #[allow(clippy::new_without_default)] // only ever in statics
    pub const fn new() -> Self {
        Segments { uses: AtomicUsize::new(0), at: [const { AtomicUsize::new(CLOSED) }; N] }
    }
    #[cfg(loom)]
    #[allow(clippy::new_without_default)]
    pub fn new() -> Self {
        Segments { uses: AtomicUsize::new(0), at: core::array::from_fn(|_| AtomicUsize::new(CLOSED)) }
    }

    /// Opens a new memory, whose first segment is mapped at `first`. Called by one thread, while
    /// this place is closed.
    pub fn open(&self, first: usize) {
        let n = self.uses.load(Ordering::Relaxed).wrapping_add(1);
        self.uses.store(n, Ordering::Relaxed);
        // Release, in this order: a thread that finds a later segment unmapped finds the first one
        // mapped.
        self.at[0].store(first, Ordering::Release);
        for at in &self.at[1..] {
            at.store(n << 1 | 1, Ordering::Release);
        }
    }

    /// Segment `n`, if it is mapped.
    #[inline]
    pub fn get(&self, n: usize) -> Option<usize> {
        // Acquire: pairs with the release of the thread that has mapped it.
        Some(self.at.get(n)?.load(Ordering::Acquire)).filter(|at| *at != CLOSED && at & 1 == 0)
    }

    /// The address of segment `n`. If necessary, `map` maps it and returns its address; `map` may
    /// use earlier segments. `unmap` removes a mapping that lost the race.
    ///
    /// # Errors
    /// See [`Missing`].
    pub fn get_or_map(
        &self,
        n: usize,
        map: impl FnOnce() -> Option<usize>,
        unmap: impl FnOnce(usize),
    ) -> Result<usize, Missing> {
        let Some(word) = self.at.get(n) else { return Err(Missing::Failed) };
        // Acquire: as in `get`. `map` sees earlier segments of the same memory, or of a later one.
        let unmapped = match word.load(Ordering::Acquire) {
            CLOSED => return Err(Missing::Closed),
            at if at & 1 == 0 => return Ok(at),
            unmapped => unmapped,
        };
        let new = map();
        let now = match new {
            Some(new) => match word.compare_exchange(unmapped, new, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Ok(new),
                Err(now) => {
                    unmap(new);
                    now
                }
            },
            // Another thread may have mapped the segment, and used up the address space.
            None => word.load(Ordering::Acquire),
        };
        match now {
            at if at != CLOSED && at & 1 == 0 => Ok(at),
            same if same == unmapped => Err(Missing::Failed),
            _ => Err(Missing::Closed),
        }
    }

    /// Closes the memory. `unmap` gets the number and the address of each mapped segment.
    pub fn close(&self, mut unmap: impl FnMut(usize, usize)) {
        for (n, word) in self.at.iter().enumerate() {
            // Acquire: another thread may have mapped the segment.
            let at = word.swap(CLOSED, Ordering::AcqRel);
            if at != CLOSED && at & 1 == 0 {
                unmap(n, at);
            }
        }
    }
}
