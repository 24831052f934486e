//! What is known of processes, and what they have shown.

use super::cgroups::Cgroups;
use super::kernel::HostPolicy;
use super::process::{labels, Restraint};
use super::rules::Party;
use crate::ancillary::Sender;
use crate::ConnId;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

/// How long a handshake of the kernel's counts. Libraries ask again as often
/// ([`fsocket_proto::ROUTE_SECS`]), so this is how long a policy that changes without an event
/// goes unnoticed.
const WINDOW: Duration = Duration::from_secs(fsocket_proto::ROUTE_SECS);
/// Of each kind, for one process.
const PROOFS: usize = 64;

pub type Place = ([u8; 16], u16);

/// A destination, and what the kernel's policy may tell the client's socket by, as a number.
pub type Path = (Place, u64);

/// What one process has shown.
#[derive(Default)]
pub struct Proofs {
    /// Sockets that were unused when they were shown: where to, the socket's cookie.
    pub unused: VecDeque<(Instant, Path, u64)>,
    /// Destinations that the kernel has let it reach.
    pub reached: VecDeque<(Instant, Path)>,
}

impl Proofs {
    pub fn forget_old(&mut self, now: Instant) {
        let old = |t: &Instant| now.saturating_duration_since(*t) >= WINDOW;
        while self.unused.len() >= PROOFS || self.unused.front().is_some_and(|(t, ..)| old(t)) {
            self.unused.pop_front();
        }
        while self.reached.len() >= PROOFS || self.reached.front().is_some_and(|(t, _)| old(t)) {
            self.reached.pop_front();
        }
    }
}

pub struct Policy {
    pub host: HostPolicy,
    pub own: Restraint,
    /// Do processes have labels here?
    pub labels: bool,
    pub cgroups: Cgroups,
    /// Of the message that is being handled.
    pub sender: Option<Sender>,
    pub parties: HashMap<ConnId, Party>,
    pub proofs: HashMap<ConnId, Proofs>,
    /// Sockets that tell of changes, in the event loop.
    pub watched: BTreeSet<RawFd>,
}

impl Policy {
    pub fn new() -> Policy {
        Policy {
            host: HostPolicy::default(),
            own: Restraint::own(),
            labels: labels(),
            cgroups: Cgroups::default(),
            sender: None,
            parties: HashMap::new(),
            proofs: HashMap::new(),
            watched: BTreeSet::new(),
        }
    }

    /// A process is gone.
    pub fn leave(&mut self, id: ConnId) {
        self.parties.remove(&id);
        self.proofs.remove(&id);
    }
}

impl Default for Policy {
    fn default() -> Self {
        Policy::new()
    }
}
