//! What of the balance can be configured.

use std::time::Duration;

/// What can be chosen; the paper's values by default.
#[derive(Clone, Debug, PartialEq)]
pub struct Knobs {
    /// No stealing, no migration at all.
    pub off: bool,
    /// A queue is busy above this share of its limit, percent.
    pub busy: u32,
    /// And not busy any more when its average is below this, percent.
    pub idle: u32,
    /// Local connections for one stolen from a busy zone.
    pub ratio: u32,
    /// How long a connection is left to a worker that is not busy.
    pub patience: Duration,
    /// How often queues are measured and flow groups moved.
    pub interval: Duration,
    /// Whether flow groups are moved at all.
    pub migrate: bool,
    /// Flow groups that one zone takes at a time; 0: as many as move a CPU's share in the
    /// paper's time.
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
