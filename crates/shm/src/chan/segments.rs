//! Maps a segment of a channel when this process first uses a slot in it.

use super::Chan;
use crate::segment::{length, Rings, OVERLAP};
use crate::space;
use fsocket_abi::channel::{segment, segment_of, SLOTS};
use fsocket_sync::segments::Missing;

impl Chan {
    /// The rings of a slot.
    ///
    /// # Errors
    /// `Closed`: this process does not use the channel any more. `Failed`: there is no address
    /// space for the rings.
    pub fn rings(&self, slot: usize) -> Result<Rings, Missing> {
        let slot = slot & (SLOTS - 1);
        let n = segment_of(slot);
        let at = match self.segments.get(n) {
            Some(at) => at,
            None => self.map_up_to(n)?,
        };
        Ok(Rings::of_slot(slot, at))
    }

    /// Maps segment `n`, and earlier segments that are not mapped yet. Those exist: the client
    /// takes slots in ascending order, so a slot in segment `n` means that all earlier segments
    /// were used.
    #[cold]
    fn map_up_to(&self, n: usize) -> Result<usize, Missing> {
        let mut last = Err(Missing::Closed);
        for n in 0..=n {
            let map = || {
                let (from, to) = segment(n.checked_sub(1)?);
                let end = self.segments.get(n - 1)? + (to - from);
                space::map_again((end - OVERLAP) as *mut u8, length(n)).map(|p| p as usize + OVERLAP)
            };
            // SAFETY: `map` has just mapped the memory with this offset and length, and no other
            // thread has its address.
            let unmap = |at: usize| unsafe { space::unmap((at - OVERLAP) as *mut u8, length(n)) };
            last = Ok(self.segments.get_or_map(n, map, unmap)?);
        }
        last
    }

    /// Releases all memory of the channel.
    ///
    /// # Safety
    /// Only threads that are late may still use the memory.
    pub(super) unsafe fn unmap_all(&self) {
        self.segments.close(|n, at| {
            let overlap = if n == 0 { 0 } else { OVERLAP };
            // SAFETY: this is the mapping of the segment, including the page that it shares with
            // the one before. Only late threads may still use it, and the address range stays
            // reserved for them.
            unsafe { space::retire((at - overlap) as *mut u8, length(n)) };
        });
    }
}
