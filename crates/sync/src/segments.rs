//! Where the segments of a shared memory are mapped: each is mapped when a thread first needs it, and all go at once.
//!
//! Without a lock: a thread maps a segment by itself, and the first that shows its mapping wins. One that is late, also
//! because the memory has gone meanwhile and another one has taken its place here, unmaps what it has mapped.

use crate::atomic::{AtomicUsize, Ordering};

/// Why there is no address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// The memory has gone.
    Closed,
    /// It cannot be mapped.
    Failed,
}

/// The memory is closed; of all bytes zero this is also the value at first.
const CLOSED: usize = 0;

/// Addresses, which are even and not 0. All bytes zero is a valid value: closed.
pub struct Segments<const N: usize> {
    /// Counts the memories that were here, so that a thread does not take one for another.
    uses: AtomicUsize,
    /// An address; [`CLOSED`]; or odd: not mapped yet, and which use it is.
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

    /// A new memory, whose first segment is mapped at `first`. Only while it is closed, by one thread.
    pub fn open(&self, first: usize) {
        let n = self.uses.load(Ordering::Relaxed).wrapping_add(1);
        self.uses.store(n, Ordering::Relaxed);
        // Release, in this order: who finds a later one unmapped finds the first one mapped.
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

    /// Segment `n`. If need be it is mapped by `map`, which returns its address, and may look at earlier ones.
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
        // Acquire: as in `get`; and `map` sees the earlier ones of the same memory, or of a later one.
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
            // Another thread may have taken the last of what there is.
            None => word.load(Ordering::Acquire),
        };
        match now {
            at if at != CLOSED && at & 1 == 0 => Ok(at),
            same if same == unmapped => Err(Missing::Failed),
            _ => Err(Missing::Closed),
        }
    }

    /// The memory goes. `unmap`: number and address of each segment that is mapped.
    pub fn close(&self, mut unmap: impl FnMut(usize, usize)) {
        for (n, word) in self.at.iter().enumerate() {
            // Acquire: another thread has mapped it.
            let at = word.swap(CLOSED, Ordering::AcqRel);
            if at != CLOSED && at & 1 == 0 {
                unmap(n, at);
            }
        }
    }
}
