//! Facts about the machine that the settings of a network device depend on, read once.

mod balance;
mod kernel;
mod topology;

pub use balance::Balance;
pub use kernel::{Conntrack, Limits};
pub use topology::{Cpus, Node};

use crate::root::Root;
use crate::sysctl;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The machine as the planner sees it, without any network device.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    pub cpus: Cpus,
    /// Kernel settings, by their names in `sysctl`. Settings that this kernel lacks are missing.
    pub sysctls: BTreeMap<String, String>,
    /// irqbalance, if it runs.
    pub irqbalance: Option<Balance>,
    /// Connection tracking, if the kernel has it.
    pub conntrack: Option<Conntrack>,
    pub limits: Limits,
    /// Memory of the machine in MiB.
    pub memory_mib: u64,
    /// TCP ports with a listener in this network namespace.
    pub listening: Vec<u16>,
}

impl Machine {
    /// Reads the machine. Facts that cannot be read stay empty.
    pub fn inspect(root: &Root) -> Machine {
        let sysctls = sysctl::ALL
            .iter()
            .filter_map(|s| Some((s.name.to_owned(), root.get(sysctl::path(s.name))?)))
            .map(|(name, value)| (name, value.split_whitespace().collect::<Vec<_>>().join(" ")))
            .collect();
        Machine {
            cpus: Cpus::inspect(root),
            sysctls,
            irqbalance: Balance::inspect(root),
            conntrack: Conntrack::inspect(root),
            limits: Limits::inspect(root),
            memory_mib: kernel::memory_mib(root),
            listening: kernel::listening(root),
        }
    }

    /// The value of a kernel setting that is a single number.
    pub fn sysctl_number(&self, name: &str) -> Option<u64> {
        self.sysctls.get(name)?.parse().ok()
    }
}
