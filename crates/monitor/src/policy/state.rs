//! Facts about processes, and the connections by which they have proved that the kernel allows
//! them.

use super::cgroups::Cgroups;
use super::kernel::HostPolicy;
use super::process::{labels, Restraint};
use super::rules::Party;
use crate::ancillary::Sender;
use crate::ConnId;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

/// How long a handshake of the kernel counts as proof. Libraries ask again after the same time
/// ([`fsocket_proto::ROUTE_SECS`]). So a change of policy that the kernel does not announce goes
/// unnoticed for this long.
const WINDOW: Duration = Duration::from_secs(fsocket_proto::ROUTE_SECS);
/// Proofs of each kind that are kept for one process.
const PROOFS: usize = 64;

pub type Place = ([u8; 16], u16);

/// A destination, and a hash of all properties by which the kernel's policy may tell this socket
/// from others of the process.
pub type Path = (Place, u64);

/// The proofs of one process.
#[derive(Default)]
pub struct Proofs {
    /// Sockets that were unused when the process showed them: destination and the socket's cookie.
    pub unused: VecDeque<(Instant, Path, u64)>,
    /// Destinations that the kernel has let the process reach.
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
    /// Whether a security module gives labels to processes on this host.
    pub labels: bool,
    pub cgroups: Cgroups,
    /// The sender of the message that is being handled.
    pub sender: Option<Sender>,
    pub parties: HashMap<ConnId, Party>,
    pub proofs: HashMap<ConnId, Proofs>,
    /// Sockets that announce changes and that the event loop watches.
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

    /// Forgets a process that has ended.
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
