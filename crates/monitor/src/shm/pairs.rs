//! The state for kernel connections between network namespaces: which ends are offered, and which
//! connections have moved to shared memory.

use crate::shm::offers::Offers;
use crate::{ChannelId, ConnId, ListenerId};
use fsocket_bpf::pairs::Pairs as Record;
use std::collections::HashMap;
use std::time::Instant;

/// A slot of a channel.
pub type Place = (ChannelId, usize);

/// A connection that has moved to shared memory: the slot's generation, and the cookies of its two
/// kernel sockets.
struct Over {
    generation: u32,
    sockets: [u64; 2],
}

#[derive(Default)]
pub struct Pairs {
    /// The kernel's record of connected sockets. `None`: not needed so far, or impossible on this
    /// kernel.
    pub record: Option<Record>,
    pub asked: bool,
    /// When to ask again for the record, while it is being loaded.
    pub ask_at: Option<Instant>,
    /// Offers by socket cookie: the process's name for the socket, and the listener that has
    /// accepted it.
    pub offers: Offers<u64, (u64, ListenerId)>,
    over: HashMap<Place, Over>,
    place_of: HashMap<u64, Place>,
}

impl Pairs {
    /// Notes that a connection moves to this slot. Both its sockets are watched, so the kernel
    /// will report its end.
    pub fn goes_over(&mut self, place: Place, generation: u32, sockets: [u64; 2]) {
        self.forget(place);
        for cookie in sockets {
            // (A move that has failed before had another slot.)
            if let Some(before) = self.place_of.insert(cookie, place) {
                self.over.remove(&before);
            }
        }
        self.over.insert(place, Over { generation, sockets });
    }

    /// Slots of connections that the kernel has ended, with their generations.
    pub fn ended(&mut self) -> Vec<(Place, u32)> {
        let cookies = self.record.as_ref().map(Record::ended).unwrap_or_default();
        let ended = cookies.iter().filter_map(|cookie| self.forget(*self.place_of.get(cookie)?));
        ended.collect()
    }

    fn forget(&mut self, place: Place) -> Option<(Place, u32)> {
        let over = self.over.remove(&place)?;
        for cookie in over.sockets {
            self.place_of.remove(&cookie);
        }
        Some((place, over.generation))
    }

    /// Forgets the offers of a process that has ended.
    pub fn leave(&mut self, id: ConnId) {
        self.offers.leave(id);
    }

    pub fn channel_gone(&mut self, channel: ChannelId) {
        let gone: Vec<Place> = self.over.keys().filter(|(ch, _)| *ch == channel).copied().collect();
        for place in gone {
            self.forget(place);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_has_one_connection_and_a_socket_one_slot() {
        let mut pairs = Pairs::default();
        pairs.goes_over((1, 7), 3, [100, 101]);
        pairs.goes_over((1, 7), 4, [102, 103]);
        pairs.goes_over((2, 0), 1, [104, 105]);
        assert_eq!(pairs.place_of.len(), 4, "what was in the slot before is forgotten");
        assert_eq!(pairs.forget((1, 7)), Some(((1, 7), 4)));
        assert_eq!(pairs.forget((1, 7)), None);
        pairs.channel_gone(2);
        assert!(pairs.over.is_empty() && pairs.place_of.is_empty());
    }

    #[test]
    fn a_connection_that_has_tried_another_slot_is_in_its_last_one() {
        let mut pairs = Pairs::default();
        pairs.goes_over((1, 0), 3, [100, 101]);
        pairs.goes_over((1, 1), 8, [100, 101]);
        pairs.goes_over((1, 0), 4, [102, 103]);
        let found = |pairs: &Pairs, cookie| pairs.place_of.get(&cookie).copied();
        assert_eq!(
            [100, 101, 102, 103].map(|cookie| found(&pairs, cookie)),
            [(1, 1), (1, 1), (1, 0), (1, 0)].map(Some)
        );
        pairs.channel_gone(1);
        assert!(pairs.over.is_empty() && pairs.place_of.is_empty());
    }
}
