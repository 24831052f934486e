//! Blocks of client ports that one process has leased.

use crate::ChannelId;
use std::collections::BTreeMap;

/// Blocks of one process by their first port, and the channels that use each block. (Channel 0:
/// the block is for a channel that another process has made.)
#[derive(Default)]
pub struct Leases(BTreeMap<u16, Vec<ChannelId>>);

impl Leases {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn add(&mut self, channel: ChannelId, first: u16) {
        self.0.entry(first).or_default().push(channel);
    }

    /// Number of blocks.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn each(&self) -> impl Iterator<Item = (u16, &[ChannelId])> {
        self.0.iter().map(|(first, channels)| (*first, channels.as_slice()))
    }

    pub fn of(&self, first: u16) -> &[ChannelId] {
        self.0.get(&first).map_or(&[], Vec::as_slice)
    }

    /// Removes a channel that has ended. Returns the blocks that it used.
    pub fn leave(&mut self, channel: ChannelId) -> Vec<u16> {
        let mut had = Vec::new();
        self.0.retain(|first, channels| {
            let before = channels.len();
            channels.retain(|c| *c != channel);
            had.extend((channels.len() < before).then_some(*first));
            !channels.is_empty()
        });
        had
    }

    pub fn into_all(self) -> impl Iterator<Item = (ChannelId, u16)> {
        self.0.into_iter().flat_map(|(first, channels)| channels.into_iter().map(move |c| (c, first)))
    }
}

#[cfg(test)]
mod tests {
    use super::Leases;

    #[test]
    fn a_block_stays_while_a_channel_has_it() {
        let mut leases = Leases::default();
        for (channel, first) in [(7, 64), (8, 64), (7, 128)] {
            leases.add(channel, first);
        }
        assert_eq!(leases.leave(7), [64, 128]);
        assert_eq!((leases.of(64), leases.of(128)), (&[8][..], &[][..]));
        assert!(leases.leave(7).is_empty());
        assert_eq!(leases.into_all().collect::<Vec<_>>(), [(8, 64)]);
    }
}
