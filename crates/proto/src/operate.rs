//! Requests of `fastsocket off` and `on` to the monitor ([`crate::request::Operate`]).

use serde::{Deserialize, Serialize};

/// Asked again, it counts again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    pub target: Target,
    pub off: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Target {
    Process(u32),
    /// Its full name. Processes that it starts later are meant, too.
    Unit(String),
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    pub processes: Vec<Process>,
}

/// A process that was told.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    pub pid: u32,
    pub comm: String,
    /// Its connections over shared memory, now.
    pub connections: u32,
}
