//! The state of a sweep, which searches for channels that have lost a side for good.

use crate::arenas::ArenaMem;
use crate::{ChannelId, FamilyId};
use fsocket_abi::channel::CLIENT;
use fsocket_abi::sock::Place;
use std::collections::{BTreeMap, HashSet, VecDeque};
use std::rc::Rc;
use std::time::Duration;

/// Sockets of an arena that are read without a pause.
const SOCKETS: usize = 64;

/// A sweep over all channels that may have lost a side for good.
#[derive(Default)]
pub struct Sweep {
    /// Channels that may have to be removed, and the families of their clients.
    pub candidates: BTreeMap<ChannelId, FamilyId>,
    /// Arenas of those families that were not read yet, and where to go on in the first one.
    pub arenas: VecDeque<(FamilyId, Rc<ArenaMem>)>,
    pub at: usize,
    /// Candidates in which the client's family has sockets.
    pub used: HashSet<ChannelId>,
    /// Candidates that were not decided yet, of all users in turn.
    pub left: VecDeque<ChannelId>,
    pub crowded: bool,
    pub spent: Duration,
    /// Another sweep was requested during this one.
    pub again: bool,
}

impl Sweep {
    /// Reads some sockets of the first arena, and notes which candidates they use.
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
