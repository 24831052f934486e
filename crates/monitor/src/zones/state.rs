//! The state of all listener groups.

use super::group::{Group, GroupId};
use super::own::Own;
use crate::broker::Broker;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// After a socket was closed, all processes of the group are told to look for connections: at
/// once, and again when the kernel has surely finished moving the closed socket's queue.
const LOOKS: [Duration; 3] = [Duration::ZERO, Duration::from_millis(20), Duration::from_millis(200)];

/// All groups.
#[derive(Default)]
pub struct Zones {
    pub(super) all: BTreeMap<GroupId, Group>,
    pub(super) last_id: GroupId,
    /// Keeps groups for the next monitor; set by [`Zones::take_over`].
    pub(super) keep: Option<Rc<Broker>>,
    /// The state has changed and must be saved.
    pub(super) changed: bool,
    /// When to check workers that have not announced themselves to this monitor yet.
    pub(super) orphans: Option<Instant>,
    /// Groups whose workers must look, and when.
    pub(super) due: Vec<(Instant, GroupId)>,
    /// Why the BPF program cannot be loaded. It is not tried again.
    pub(super) without: Option<String>,
    /// When queues are measured next.
    pub(super) balance_next: Option<Instant>,
}

impl Zones {
    pub(super) fn call(&mut self, group: GroupId) {
        let now = Instant::now();
        // Looks that are due later than the new ones are superfluous.
        self.due.retain(|(at, g)| *g != group || *at <= now);
        self.due.extend(LOOKS.iter().map(|after| (now + *after, group)));
    }

    /// When `Monitor::zones_look` has something to do.
    pub fn next(&self) -> Option<Instant> {
        let looks = |o: &&Own, g: &Group| !g.members.is_empty() || o.is_mixed();
        let strangers = self.all.values().filter_map(|g| g.own.as_ref().filter(|o| looks(o, g)));
        self.due
            .iter()
            .map(|(at, _)| *at)
            .chain(strangers.map(Own::next))
            .chain(self.orphans)
            .chain(self.balance_next)
            .min()
    }

    /// Why the BPF program cannot be used, if it cannot.
    pub fn without(&self) -> Option<&str> {
        self.without.as_deref()
    }

    /// Makes sure that the next measurement of queues is not later than this.
    pub fn balance_at(&mut self, at: Instant) {
        self.balance_next = Some(self.balance_next.map_or(at, |next| next.min(at)));
    }
}
