//! Numbers of the event loop's epoll events. Larger numbers are those of processes.

use crate::ConnId;

pub const ENDPOINT: u64 = 1;
pub const ADDRESSES: u64 = 2;
pub const STOP: u64 = 3;
pub const POLICY: u64 = 4;
pub const PAIRS: u64 = 5;
pub const ASLEEP: u64 = 6;
pub const FIRST_CLIENT: ConnId = 15;
/// Listener groups whose BPF program signals. The lower bits are the number of the group.
pub const FIRST_WAKER: u64 = 1 << 63;
