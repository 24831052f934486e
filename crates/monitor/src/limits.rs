//! How much one client may have. Beyond these a connection uses the kernel,
//! so they protect the monitor's descriptors and memory, not the client's
//! wishes. The per-user limits do not apply to root.

/// Channels whose client is gone while a server keeps connections in them
/// open; beyond it they are dropped earlier.
pub const LINGERING_CHANNELS: usize = 1024;
pub const LISTENERS_PER_UID: usize = 1024;
/// Leases of [`crate::shm::ports::BLOCK`] client ports. Channels of one process may share one.
pub const LEASES_PER_PROCESS: usize = 256;
/// With so many of its own a process shares them among its channels.
pub const LEASES_UNSHARED: usize = 64;
/// Of about 420 that exist.
pub const LEASES_PER_UID: usize = 320;
/// Ports that a client has bound itself.
pub const BOUND_PER_CHANNEL: usize = 1024;
/// How long a client that broke the protocol of a listener's channel gets no other one.
pub const DISTRUST: std::time::Duration = std::time::Duration::from_secs(60);
/// Bytes of a request about steering, or of an operator.
pub const REQUEST: usize = 1 << 16;
