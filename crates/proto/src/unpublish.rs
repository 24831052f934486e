//! How a listener leaves shared memory: `arg0` of [`crate::kind::UNPUBLISH`].

/// For good, also where other processes hold it.
pub const FOR_GOOD: u64 = 0;
/// Only if no other process holds it; of one that is held elsewhere ([`UNLESS_SERVED`]): only if no other one
/// works for it.
pub const IF_LAST: u64 = 1;
/// Processes may hold it that the monitor does not know: from now on it is in shared memory as long as
/// a process works for it.
pub const UNLESS_SERVED: u64 = 2;
