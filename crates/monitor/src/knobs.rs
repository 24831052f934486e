//! The settings of load balancing between workers.

use std::time::Duration;

/// The settings. The defaults are the values of the Fastsocket paper.
#[derive(Clone, Debug, PartialEq)]
pub struct Knobs {
    /// Neither stealing nor migration.
    pub off: bool,
    /// A queue is busy if it is filled above this percentage of its limit.
    pub busy: u32,
    /// A zone stops being busy when the average of its queue falls below this share (percent).
    pub idle: u32,
    /// A worker takes this many local connections for each one that it steals from a busy zone.
    pub ratio: u32,
    /// How long a connection is left to its own worker while that worker is not busy.
    pub patience: Duration,
    /// How often queues are measured and flow groups moved.
    pub interval: Duration,
    /// Whether flow groups are moved at all.
    pub migrate: bool,
    /// Flow groups that one zone takes at a time. 0: as many as move the load of one CPU within
    /// the paper's time.
    pub groups: u32,
}

impl Default for Knobs {
    fn default() -> Knobs {
        Knobs {
            off: false,
            busy: 75,
            idle: 10,
            ratio: 5,
            patience: Duration::from_millis(1),
            interval: Duration::from_millis(100),
            migrate: true,
            groups: 0,
        }
    }
}
