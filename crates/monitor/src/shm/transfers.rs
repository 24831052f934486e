//! Descriptors that clients take from each other: who takes what from whom ([`crate::shm::taken`]).

use crate::ConnId;
use std::collections::BTreeMap;

/// Of one taker.
const ASKED: usize = 16;

/// Who takes something from whom.
#[derive(Default)]
pub struct Transfers {
    last: u64,
    all: BTreeMap<u64, Transfer>,
}

pub struct Transfer {
    pub taker: ConnId,
    /// Processes that may be the one that is meant, and have not answered yet.
    pub holders: Vec<ConnId>,
    /// The number of the descriptor there.
    pub descriptor: u32,
    /// They have been asked.
    pub is_shown: bool,
}

impl Transfers {
    /// Its number. Of those of one taker the oldest is forgotten.
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

    /// One of this taker.
    pub fn of(&mut self, number: u64, taker: ConnId) -> Option<&mut Transfer> {
        self.all.get_mut(&number).filter(|t| t.taker == taker)
    }

    /// The taker, if this process is the last one that was to answer.
    pub fn answered(&mut self, number: u64, by: ConnId) -> Option<ConnId> {
        let t = self.all.get_mut(&number).filter(|t| t.is_shown && t.holders.contains(&by))?;
        t.holders.retain(|holder| *holder != by);
        if !t.holders.is_empty() {
            return None;
        }
        self.all.remove(&number).map(|t| t.taker)
    }

    /// A process is gone.
    pub fn leave(&mut self, id: ConnId) {
        self.all.retain(|_, t| {
            t.holders.retain(|holder| *holder != id);
            t.taker != id && !t.holders.is_empty()
        });
    }
}
