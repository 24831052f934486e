//! The descriptors that clients take from each other: taker, holder and socket
//! ([`crate::shm::taken`]).

use crate::ConnId;
use std::collections::BTreeMap;

/// Unfinished transfers of one taker, at most.
const ASKED: usize = 16;

/// The unfinished transfers.
#[derive(Default)]
pub struct Transfers {
    last: u64,
    all: BTreeMap<u64, Transfer>,
}

pub struct Transfer {
    pub taker: ConnId,
    /// Possible holders that have not answered yet.
    pub holders: Vec<ConnId>,
    /// The number of the descriptor in the holder.
    pub descriptor: u32,
    /// The taker has shown the socket, and the holders were asked.
    pub is_shown: bool,
}

impl Transfers {
    /// Adds a transfer and returns its number. If a taker has too many, its oldest one is dropped.
    pub fn begin(&mut self, transfer: Transfer) -> u64 {
        let own: Vec<u64> = self.all.iter().filter(|(_, t)| t.taker == transfer.taker).map(|(n, _)| *n).collect();
        if let [oldest, ..] = own[..] {
            if own.len() >= ASKED {
                self.all.remove(&oldest);
            }
        }
        self.last += 1;
        self.all.insert(self.last, transfer);
        self.last
    }

    /// The transfer with this number, if this process is the taker.
    pub fn of(&mut self, number: u64, taker: ConnId) -> Option<&mut Transfer> {
        self.all.get_mut(&number).filter(|t| t.taker == taker)
    }

    /// Notes an answer. Returns the taker if this was the last process that had to answer.
    pub fn answered(&mut self, number: u64, by: ConnId) -> Option<ConnId> {
        let t = self.all.get_mut(&number).filter(|t| t.is_shown && t.holders.contains(&by))?;
        t.holders.retain(|holder| *holder != by);
        if !t.holders.is_empty() {
            return None;
        }
        self.all.remove(&number).map(|t| t.taker)
    }

    /// Removes a process that has ended.
    pub fn leave(&mut self, id: ConnId) {
        self.all.retain(|_, t| {
            t.holders.retain(|holder| *holder != id);
            t.taker != id && !t.holders.is_empty()
        });
    }
}
