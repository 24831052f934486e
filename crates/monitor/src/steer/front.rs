//! The front's side of steering: it asks the broker, and remembers the answers.

use super::groups::Spare;
use super::{Also, Done, State};
use crate::broker::Broker;
use std::time::Instant;

/// The front's knowledge of steering.
#[derive(Default)]
pub struct Front {
    state: State,
    spare: Spare,
}

impl Front {
    pub fn is_empty(&self) -> bool {
        !self.state.any
    }

    /// Whether a device or Fastsocket's BPF program steers flow groups in this network namespace.
    pub fn has_groups(&self, netns: u64) -> bool {
        self.state.groups.contains(&netns)
    }

    /// Which CPUs have time to spare.
    pub fn spare(&mut self, now: Instant) -> &Spare {
        self.spare.look(now)
    }

    /// Asks the broker for an operation of steering ([`Also`]).
    pub fn also(&mut self, what: &Also, broker: &Broker) -> Done {
        // If no device is steered, there is nothing to do.
        if self.is_empty() && !matches!(what, Also::Begin) {
            return Done::default();
        }
        broker.steer_also(what)
    }

    /// Remembers the state after an operation. If it has changed, returns the slices of source
    /// ports: network namespace, first port, ports in a slice, CPU of each slice.
    pub fn heard(&mut self, done: &Done) -> Option<impl Iterator<Item = (u64, u16, u32, &[u32])>> {
        self.state = done.state.clone()?;
        let slices = self.state.slices.iter();
        Some(slices.map(|(netns, first, ports, cpus)| (*netns, *first, *ports, cpus.as_slice())))
    }
}
