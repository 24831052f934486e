//! What a process does that works for a listener: `arg1` of [`crate::kind::WORKER`].

/// It waits for connections, and may accept them.
pub const LOOKS: u64 = 0;
/// It wants the channels only, to empty their queues.
pub const LEAVES: u64 = 1;
/// It has accepted all that waited in the kernel's queue, and goes on in shared memory.
pub const ACCEPTS: u64 = 2;
