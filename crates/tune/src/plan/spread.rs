//! Which CPU serves which queue.

use crate::cpus::CpuSet;
use crate::machine::Cpus;
use std::cmp::Reverse;

/// One CPU per queue, and CPUs without a queue given to those near them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spread {
    /// CPUs that have a queue, ascending: queue i is served by the i-th, and
    /// where there are more queues than CPUs, it starts again.
    serving: Vec<u32>,
    /// For each of them: itself, and the CPUs it serves besides.
    groups: Vec<CpuSet>,
}

impl Spread {
    /// `queues` queues of a device of `node` on the CPUs `usable`. CPUs of the
    /// device's node come first, and of these first threads of cores; so on
    /// by distance. None if there is no CPU or no queue.
    pub fn new(cpus: &Cpus, usable: &CpuSet, node: Option<u32>, queues: usize) -> Option<Spread> {
        let mut order: Vec<u32> = usable.iter().collect();
        order.sort_by_key(|&cpu| (cpus.distance(cpu, node), cpus.thread(cpu), cpu));
        let rest = order.split_off(queues.min(order.len()));
        let mut serving = order;
        if serving.is_empty() {
            return None;
        }
        serving.sort_unstable();
        let mut groups: Vec<CpuSet> = serving.iter().map(|cpu| CpuSet::one(*cpu)).collect();
        for cpu in rest {
            // A thread of the same core shares its caches, a node its memory;
            // among equals the one with the least to do.
            let near = |i: usize| (cpus.same_core(serving[i], cpu), cpus.node_of(serving[i]) == cpus.node_of(cpu));
            let best = (0..serving.len()).max_by_key(|&i| (near(i), Reverse(groups[i].len()), Reverse(i)));
            groups[best.expect("a CPU serves")].insert(cpu);
        }
        Some(Spread { serving, groups })
    }

    /// The CPU that serves a queue.
    pub fn cpu(&self, queue: usize) -> u32 {
        self.serving[queue % self.serving.len()]
    }

    /// The CPUs whose packets go through a queue; its own among them.
    pub fn group(&self, queue: usize) -> &CpuSet {
        &self.groups[queue % self.groups.len()]
    }

    /// CPUs that have a queue.
    pub fn serving(&self) -> CpuSet {
        self.serving.iter().copied().collect()
    }

    /// Has each CPU a queue of its own?
    pub fn is_complete(&self) -> bool {
        self.groups.iter().all(|group| group.len() == 1)
    }
}
