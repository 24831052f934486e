//! The registry: which listeners exist, so that a `connect` to anywhere else
//! costs no message. One read-only memfd per monitor (F_SEAL_FUTURE_WRITE,
//! written through the monitor's own earlier mapping).
//!
//! A reader takes `generation` (odd: being changed), reads, and checks it
//! again. The registry only decides whether asking the monitor is worth it.

use super::Addr;
use core::sync::atomic::{AtomicU32, AtomicU64};

pub const MAGIC: u64 = u64::from_le_bytes(*b"fsockRG1");
pub const ENTRIES: usize = 4096;
pub const LOCALS: usize = 256;
pub const SIZE: usize = core::mem::size_of::<Registry>().next_multiple_of(4096);

#[repr(C)]
pub struct Entry {
    /// 0: empty.
    pub listener: u64,
    /// SO_NETNS_COOKIE of the listening socket.
    pub netns: u64,
    pub addr: Addr,
}

/// Network namespaces with source-port slices.
pub const SLICED: usize = 8;
/// Ports there are.
pub const PORTS: usize = 1 << 16;
/// Bytes of what comes with [`crate::kind::CLOSINGS`].
pub const CLOSINGS_SIZE: usize = PORTS * 4;
/// CPUs that can have a slice.
pub const SLICE_CPUS: usize = 1024;

/// The source-port slices of a network namespace: a process that connects from
/// there over the kernel takes its port from the slice of its CPU, so that the
/// steering program finds it.
#[repr(C)]
pub struct Slices {
    /// SO_NETNS_COOKIE; 0: unused.
    pub netns: u64,
    /// First port of the first slice.
    pub first: u32,
    /// Ports a slice.
    pub ports: u32,
    /// 1 + number of the slice, by CPU; 0: none.
    pub by_cpu: [u16; SLICE_CPUS],
}

#[repr(C)]
pub struct Registry {
    pub magic: u64,
    pub generation: AtomicU64,
    /// CLOCK_MONOTONIC milliseconds, written at start only.
    pub started: u64,
    /// Entries in use are below this.
    pub entries: u64,
    pub locals: u64,
    /// CPUs of the machine, as the monitor found them at its start.
    pub cpus: u64,
    /// Grows with `generation` where something else has changed than the listeners below: all answers are
    /// asked for again.
    pub touched: u64,
    /// This host's own addresses in the monitor's network namespace, beyond
    /// loopback; v4-mapped.
    pub local: [[u8; 16]; LOCALS],
    pub entry: [Entry; ENTRIES],
    /// Entries of `slices` in use are below this; 0 is the usual case.
    pub sliced: u64,
    pub slices: [Slices; SLICED],
    /// 1: the monitor knows the two ends of a connection between network namespaces ([`kind::MEET`]).
    ///
    /// [`kind::MEET`]: super::kind::MEET
    pub pairs: u64,
    /// To whose channels a client's port is leased ([`lessee`]); 0: nobody's. An accepting process checks
    /// here what a client says of itself: the page is the monitor's, and the channel is not.
    pub owner: [AtomicU32; PORTS],
    /// How many channels there are to listeners on a port, also to one that has ended: connections over
    /// shared memory may have that address ([`super::kind::IN_USE`]).
    pub served: [AtomicU32; PORTS],
}

/// Channels of one [`lessee`], at most.
pub const CHANNELS_OF_ONE: u32 = 1 << 12;

/// Of a channel's number: who has made it. Channels of one client process may share ports, as its sockets do in
/// the kernel: to other listeners.
pub const fn lessee(channel: u32) -> u32 {
    channel / CHANNELS_OF_ONE
}

impl Registry {
    /// Is that an address of this host, beyond loopback?
    pub fn has_local(&self, ip: &[u8; 16]) -> bool {
        self.local.iter().take(self.locals as usize).any(|l| l == ip)
    }
}
