//! What `fastsocket steer` asks the monitor, and what it is told, as JSON.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub enum Request {
    /// Steer a device, in the place of what steered it before.
    Attach(Attach),
    /// Leave a device as it was found.
    Detach { device: String },
    /// What is steered in this network namespace?
    Status,
}

/// Policies by name.
pub const POLICIES: [&str; 4] = ["rfd", "flow-groups", "connect-cpu", "recv-cpu"];

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Attach {
    pub device: String,
    /// One of [`POLICIES`], or the absolute path of a BPF object.
    pub policy: String,
    /// Classify by the socket table alone.
    pub precise: bool,
    /// CPUs that take part; none: all that the monitor may run on.
    pub cpus: Option<Vec<u32>>,
    /// `ntuple`, `native`, `generic` or `rps`; none: the first of these that works.
    pub mode: Option<String>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Answer {
    /// Why it was not done.
    pub error: Option<String>,
    pub devices: Vec<Device>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Device {
    pub device: String,
    pub policy: String,
    pub precise: bool,
    /// How: rules in the card, `XDP native`, `XDP generic`, RPS.
    pub by: String,
    /// Why not in a better way.
    pub because: Option<String>,
    /// False: the device is gone.
    pub alive: bool,
    pub cpus: Vec<u32>,
    pub slices: Vec<Slice>,
    /// Verdict to packets, by CPU that gave it.
    pub packets: BTreeMap<String, Vec<u64>>,
}

/// Source ports of one CPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slice {
    pub cpu: u32,
    pub first: u16,
    pub last: u16,
    /// Ports of it that connections have now, listeners' not counted.
    pub in_use: u32,
}
