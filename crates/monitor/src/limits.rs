//! How much one client may have. Beyond these limits a connection uses the kernel. The limits
//! protect the monitor's descriptors and memory. The per-user limits do not apply to root.

/// Channels whose client has ended while the server still has connections in them. Beyond this
/// number the monitor drops them early.
pub const LINGERING_CHANNELS: usize = 1024;
pub const LISTENERS_PER_UID: usize = 1024;
/// Leases of one process, each for [`crate::shm::ports::BLOCK`] client ports. Its channels may
/// share a lease.
pub const LEASES_PER_PROCESS: usize = 256;
/// From this number of leases on, the channels of a process share them if possible.
pub const LEASES_UNSHARED: usize = 64;
/// Leases of one user. There are about 420 in all.
pub const LEASES_PER_UID: usize = 320;
/// Ports that the client of a channel has bound itself.
pub const BOUND_PER_CHANNEL: usize = 1024;
/// For this long the monitor makes no other channel for a client that broke the protocol of a
/// listener's channel.
pub const DISTRUST: std::time::Duration = std::time::Duration::from_secs(60);
/// Bytes of a request about steering, or of a request of an operator.
pub const REQUEST: usize = 1 << 16;
