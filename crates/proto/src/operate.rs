//! Requests of `fastsocket off` and `on` to the monitor ([`crate::request::Operate`]).

use serde::{Deserialize, Serialize};

/// The request may be repeated; the monitor then carries it out again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    pub target: Target,
    pub off: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Target {
    Process(u32),
    /// The unit's full name. Processes that the unit starts later are included.
    Unit(String),
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    pub processes: Vec<Process>,
}

/// A process that got the request.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    pub pid: u32,
    pub comm: String,
    /// Number of its connections over shared memory now.
    pub connections: u32,
}
