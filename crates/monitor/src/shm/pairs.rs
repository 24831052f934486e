//! Kernel connections between network namespaces: which ends were offered, and which have gone over.

use crate::shm::offers::Offers;
use crate::{ChannelId, ConnId, ListenerId};
use fsocket_bpf::pairs::Pairs as Record;
use std::collections::HashMap;
use std::time::Instant;

/// A slot of a channel.
pub type Place = (ChannelId, usize);

/// A connection that has gone over: the slot's generation, cookies of the two kernel sockets.
struct Over {
    generation: u32,
    sockets: [u64; 2],
}

#[derive(Default)]
pub struct Pairs {
    /// Which two sockets are connected, by the kernel. `None`: not needed so far, or this kernel has no such record.
    pub record: Option<Record>,
    pub asked: bool,
    /// When to ask for it again: it is being loaded.
    pub ask_at: Option<Instant>,
    /// By the socket's cookie: what its process calls it, and the listener that has accepted it.
    pub offers: Offers<u64, (u64, ListenerId)>,
    over: HashMap<Place, Over>,
    place_of: HashMap<u64, Place>,
}

impl Pairs {
    /// A connection goes over into a slot. Of its end the kernel tells: both sockets are watched.
    pub fn goes_over(&mut self, place: Place, generation: u32, sockets: [u64; 2]) {
        self.forget(place);
        for cookie in sockets {
            self.place_of.insert(cookie, place);
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

    /// A process is gone.
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
}
