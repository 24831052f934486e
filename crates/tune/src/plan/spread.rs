//! Decides which CPU serves which queue.

use crate::cpus::CpuSet;
use crate::machine::Cpus;
use std::cmp::Reverse;

/// Assigns each queue to a CPU. A CPU with a queue also serves some of the CPUs without a queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spread {
    /// CPUs with a queue, in ascending order. Queue i belongs to the i-th CPU; if there are more
    /// queues than CPUs, the count starts again.
    serving: Vec<u32>,
    /// For each serving CPU: the CPU itself, and the other CPUs that it serves.
    groups: Vec<CpuSet>,
}

impl Spread {
    /// Assigns `queues` queues of a device at `node` to the CPUs `usable`. Near CPUs come first:
    /// those of the device's node, then by distance. Within a node, the first thread of each core
    /// comes first. `None`: there is no CPU or no queue.
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
            // Prefer a thread of the same core (shared caches), then a CPU of the same node
            // (shared memory), then the CPU that serves the fewest.
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

    /// The CPUs whose packets go through a queue, including the queue's own CPU.
    pub fn group(&self, queue: usize) -> &CpuSet {
        &self.groups[queue % self.groups.len()]
    }

    /// CPUs that have a queue.
    pub fn serving(&self) -> CpuSet {
        self.serving.iter().copied().collect()
    }

    /// Whether each CPU has a queue of its own.
    pub fn is_complete(&self) -> bool {
        self.groups.iter().all(|group| group.len() == 1)
    }
}
