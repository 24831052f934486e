//! What becomes of a descriptor that goes to another process: `arg0` of [`crate::kind::PASSED`].

/// This process sends it, and keeps its own.
pub const SENT: u64 = 0;
/// It was not sent after all.
pub const NOT_SENT: u64 = 1;
/// This process has received it.
pub const ARRIVED: u64 = 2;
/// This process has closed its last one.
pub const RELEASED: u64 = 3;
/// Processes have it that do not report it: forked children, and readers that only peek at a message.
pub const SHARED: u64 = 4;
