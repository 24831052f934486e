//! A look which channels have lost a side for good: how far it has come.

use crate::arenas::ArenaMem;
use crate::{ChannelId, FamilyId};
use fsocket_abi::channel::CLIENT;
use fsocket_abi::sock::Place;
use std::collections::{BTreeMap, HashSet, VecDeque};
use std::rc::Rc;
use std::time::Duration;

/// Sockets of an arena that are looked at in one piece.
const SOCKETS: usize = 64;

/// A look at all channels that have lost a side.
#[derive(Default)]
pub struct Sweep {
    /// Channels that may be done with, and the families of their clients.
    pub candidates: BTreeMap<ChannelId, FamilyId>,
    /// Arenas of those families that are still to be looked at, and where the first one goes on.
    pub arenas: VecDeque<(FamilyId, Rc<ArenaMem>)>,
    pub at: usize,
    /// Candidates in which the client's family has sockets.
    pub used: HashSet<ChannelId>,
    /// Candidates that are still to be judged, of users in turn.
    pub left: VecDeque<ChannelId>,
    pub crowded: bool,
    pub spent: Duration,
    /// Asked for meanwhile.
    pub again: bool,
}

impl Sweep {
    /// Some sockets of the first arena.
    pub fn read(&mut self, family: FamilyId, mem: &ArenaMem) {
        let Some(run) = mem.run(self.at) else {
            self.arenas.pop_front();
            self.at = 0;
            return;
        };
        let end = run.end.min(run.start + SOCKETS);
        for sock in (run.start..end).map(|i| mem.sock(i)).filter(|s| ArenaMem::is_open(s)) {
            let Place { channel, side, .. } = sock.place();
            if side == CLIENT && self.candidates.get(&channel) == Some(&family) {
                self.used.insert(channel);
            }
        }
        self.at = end;
    }
}
