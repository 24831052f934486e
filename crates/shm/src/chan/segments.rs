//! A segment is mapped when this process first uses a slot whose rings are in it.

use super::Chan;
use crate::segment::{length, Rings, OVERLAP};
use crate::space;
use fsocket_abi::channel::{segment, segment_of, SLOTS};
use fsocket_sync::segments::Missing;

impl Chan {
    /// The rings of a slot.
    ///
    /// # Errors
    /// `Closed`: this process does not use the channel any more. `Failed`: there is no address space for them.
    pub fn rings(&self, slot: usize) -> Result<Rings, Missing> {
        let slot = slot & (SLOTS - 1);
        let n = segment_of(slot);
        let at = match self.segments.get(n) {
            Some(at) => at,
            None => self.map_up_to(n)?,
        };
        Ok(Rings::of_slot(slot, at))
    }

    /// Maps segment `n`, and those before that are not mapped yet: of a process that uses its slot the peer, which counts
    /// upwards, has used theirs.
    #[cold]
    fn map_up_to(&self, n: usize) -> Result<usize, Missing> {
        let mut last = Err(Missing::Closed);
        for n in 0..=n {
            let map = || {
                let (from, to) = segment(n.checked_sub(1)?);
                let end = self.segments.get(n - 1)? + (to - from);
                space::map_again((end - OVERLAP) as *mut u8, length(n)).map(|p| p as usize + OVERLAP)
            };
            // SAFETY: just mapped so, and not seen.
            let unmap = |at: usize| unsafe { space::unmap((at - OVERLAP) as *mut u8, length(n)) };
            last = Ok(self.segments.get_or_map(n, map, unmap)?);
        }
        last
    }

    /// All memory of the channel goes.
    ///
    /// # Safety
    /// But for threads that come late, nobody uses it any more.
    pub(super) unsafe fn unmap_all(&self) {
        self.segments.close(|n, at| {
            let overlap = if n == 0 { 0 } else { OVERLAP };
            // SAFETY: the mapping of this segment, with the page that it shares with the one before; nobody uses the channel any more.
            unsafe { space::retire((at - overlap) as *mut u8, length(n)) };
        });
    }
}
