//! One end of a connection, as an arena says it.

use crate::ChannelId;
use fsocket_abi::channel::SLOTS;
use fsocket_abi::sock::{Place, Sock};

/// One end of a connection, read once.
pub(super) struct End {
    pub channel: ChannelId,
    pub slot: usize,
    pub side: usize,
    pub sent: u64,
    pub received: u64,
}

impl End {
    pub fn read(sock: &Sock) -> Option<End> {
        let Place { channel, slot, side } = sock.place();
        let end = End { channel, slot, side, sent: sock.tx.bytes(), received: sock.rx.bytes() };
        (end.slot < SLOTS && end.side < 2).then_some(end)
    }
}
