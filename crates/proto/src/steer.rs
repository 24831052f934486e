//! Requests of `fastsocket steer` to the monitor, and the answers, as JSON.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub enum Request {
    /// Steers a device, in place of the previous steering.
    Attach(Attach),
    /// Restores the settings that the device had before.
    Detach { device: String },
    /// Asks what is steered in this network namespace.
    Status,
}

/// Policies by name.
pub const POLICIES: [&str; 4] = ["rfd", "flow-groups", "connect-cpu", "recv-cpu"];

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Attach {
    pub device: String,
    /// One of [`POLICIES`], or the absolute path of a BPF object.
    pub policy: String,
    /// Classify packets only by the socket table.
    pub precise: bool,
    /// CPUs that take part; none: all on which the monitor may run.
    pub cpus: Option<Vec<u32>>,
    /// `ntuple`, `native`, `generic` or `rps`; none: the first of these that works.
    pub mode: Option<String>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Answer {
    /// Why the request was not carried out.
    pub error: Option<String>,
    pub devices: Vec<Device>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Device {
    pub device: String,
    pub policy: String,
    pub precise: bool,
    /// The mechanism that steers the device: rules in the card, `XDP native`, `XDP generic`, RPS.
    pub by: String,
    /// Why a better way is not possible.
    pub because: Option<String>,
    /// False: the device is gone.
    pub alive: bool,
    pub cpus: Vec<u32>,
    pub slices: Vec<Slice>,
    /// Number of packets for each verdict, by the CPU that gave it.
    pub packets: BTreeMap<String, Vec<u64>>,
}

/// Source ports of one CPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slice {
    pub cpu: u32,
    pub first: u16,
    pub last: u16,
    /// Number of ports that connections use now; ports of listeners are not counted.
    pub in_use: u32,
}
