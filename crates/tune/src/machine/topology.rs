//! The CPUs: which of them may be used, and their distance from a device.

use crate::cpus::CpuSet;
use crate::root::Root;
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Cpus {
    pub online: CpuSet,
    /// CPUs that the scheduler or the timer tick leaves alone (`isolcpus`, `nohz_full`, isolated
    /// cpuset partitions).
    pub isolated: CpuSet,
    /// CPUs that the cpuset of this process allows.
    pub allowed: CpuSet,
    /// CPUs to which interrupts go by default (`irqaffinity=`).
    pub irq_default: CpuSet,
    /// NUMA nodes, sorted by number. A machine without NUMA has one node.
    pub nodes: Vec<Node>,
    /// For each core, the CPUs (hardware threads) that share it.
    pub cores: Vec<CpuSet>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Node {
    pub id: u32,
    pub cpus: CpuSet,
    /// Distance to each node, in the order of `Cpus::nodes`. 10 is the distance to itself.
    pub distances: Vec<u32>,
}

impl Cpus {
    pub fn inspect(root: &Root) -> Cpus {
        const CPU: &str = "sys/devices/system/cpu";
        let online = list(root, &format!("{CPU}/online"));
        let isolated = [
            format!("{CPU}/isolated"),
            format!("{CPU}/nohz_full"),
            "sys/fs/cgroup/cpuset.cpus.isolated".to_owned(),
            "sys/fs/cgroup/unified/cpuset.cpus.isolated".to_owned(),
        ]
        .iter()
        .fold(CpuSet::new(), |set, path| set.or(&list(root, path)));
        let allowed = root.get("proc/self/status").and_then(|s| allowed(&s)).unwrap_or_else(|| online.clone());
        let irq_default = root
            .get("proc/irq/default_smp_affinity")
            .and_then(|t| CpuSet::parse_mask(&t).ok())
            .unwrap_or_else(|| online.clone());
        let mut cores: Vec<CpuSet> = Vec::new();
        for cpu in online.iter() {
            if !cores.iter().any(|c| c.contains(cpu)) {
                let siblings = list(root, &format!("{CPU}/cpu{cpu}/topology/thread_siblings_list")).and(&online);
                cores.push(if siblings.contains(cpu) { siblings } else { CpuSet::one(cpu) });
            }
        }
        Cpus { isolated, allowed, irq_default, nodes: nodes(root, &online), cores, online }
    }

    /// CPUs that may handle packets.
    pub fn usable(&self) -> CpuSet {
        let usable = self.online.minus(&self.isolated).and(&self.allowed);
        match usable.and(&self.irq_default) {
            // A default mask that excludes every CPU cannot be meant for packets, so ignore it.
            none if none.is_empty() => usable,
            some => some,
        }
    }

    /// Distance of a CPU from a node. 0: one of the two is unknown.
    pub fn distance(&self, cpu: u32, node: Option<u32>) -> u32 {
        let from = node.and_then(|id| self.nodes.iter().find(|n| n.id == id));
        let to = self.nodes.iter().position(|n| n.cpus.contains(cpu));
        from.zip(to).and_then(|(from, to)| from.distances.get(to).copied()).unwrap_or(0)
    }

    pub fn same_core(&self, a: u32, b: u32) -> bool {
        self.cores.iter().any(|core| core.contains(a) && core.contains(b))
    }

    pub fn node_of(&self, cpu: u32) -> Option<u32> {
        self.nodes.iter().find(|n| n.cpus.contains(cpu)).map(|n| n.id)
    }

    /// The rank of this CPU among the hardware threads of its core.
    pub fn thread(&self, cpu: u32) -> usize {
        let core = self.cores.iter().find(|core| core.contains(cpu));
        core.map_or(0, |core| core.iter().take_while(|c| *c < cpu).count())
    }
}

/// The value of `Cpus_allowed_list` in /proc/PID/status.
fn allowed(status: &str) -> Option<CpuSet> {
    let line = status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:"))?;
    CpuSet::parse_list(line).ok()
}

/// Reads a file with a list such as `0-3,8`. Empty if the file is missing.
fn list(root: &Root, path: &str) -> CpuSet {
    root.get(path).and_then(|t| CpuSet::parse_list(&t).ok()).unwrap_or_default()
}

fn nodes(root: &Root, online: &CpuSet) -> Vec<Node> {
    const NODE: &str = "sys/devices/system/node";
    let nodes: Vec<Node> = root
        .numbered(NODE, "node")
        .into_iter()
        .map(|id| {
            let distances = root.get(format!("{NODE}/node{id}/distance")).unwrap_or_default();
            Node {
                id,
                cpus: list(root, &format!("{NODE}/node{id}/cpulist")),
                distances: distances.split_whitespace().filter_map(|d| d.parse().ok()).collect(),
            }
        })
        .collect();
    match nodes.is_empty() {
        true => vec![Node { id: 0, cpus: online.clone(), distances: vec![10] }],
        false => nodes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_in_a_status_file() {
        let status = "Name:\tx\nCpus_allowed:\tff,ffffffff\nCpus_allowed_list:\t0-39\nMems_allowed_list:\t0\n";
        assert_eq!(allowed(status).unwrap().len(), 40);
        assert_eq!(allowed("Name:\tx\n"), None);
    }
}
