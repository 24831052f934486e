//! The registry lists the listeners of programs with the library, so that a `connect` to another
//! address needs no message. Each monitor has one read-only memfd for it (F_SEAL_FUTURE_WRITE;
//! the monitor writes through a mapping that it made before it set the seal).
//!
//! A reader reads `generation` (odd: the monitor is changing the registry), then the entries, and
//! then checks `generation` again. The registry only decides whether it is worth asking the
//! monitor.

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
/// Number of ports.
pub const PORTS: usize = 1 << 16;
/// Size in bytes of the memory that comes with [`crate::notice::Closings`].
pub const CLOSINGS_SIZE: usize = PORTS * 4;
/// CPUs that can have a slice.
pub const SLICE_CPUS: usize = 1024;

/// The source-port slices of a network namespace. A process there that connects over the kernel
/// takes its source port from the slice of its CPU. The steering program finds the CPU by that
/// port.
#[repr(C)]
pub struct Slices {
    /// SO_NETNS_COOKIE; 0: unused.
    pub netns: u64,
    /// First port of the first slice.
    pub first: u32,
    /// Number of ports of a slice.
    pub ports: u32,
    /// Number of the slice of each CPU, plus 1; 0: none.
    pub by_cpu: [u16; SLICE_CPUS],
}

#[repr(C)]
pub struct Registry {
    pub magic: u64,
    pub generation: AtomicU64,
    /// CLOCK_MONOTONIC milliseconds, written only at the start.
    pub started: u64,
    /// Number of entries that may be in use: they come first.
    pub entries: u64,
    pub locals: u64,
    /// Number of CPUs of the machine at the monitor's start.
    pub cpus: u64,
    /// Changes together with `generation` if something other than the listeners below has
    /// changed. Every process then discards the monitor's answers and asks again.
    pub touched: u64,
    /// This host's own addresses in the monitor's network namespace, beyond
    /// loopback; v4-mapped.
    pub local: [[u8; 16]; LOCALS],
    pub entry: [Entry; ENTRIES],
    /// Number of entries of `slices` that may be in use; usually 0.
    pub sliced: u64,
    pub slices: [Slices; SLICED],
    /// 1: the monitor can find the two ends of a connection between network namespaces
    /// ([`crate::request::Meet`]).
    pub pairs: u64,
    /// The client process to which each port is leased, by [`lessee`]; 0: none. A process that
    /// accepts checks a client's claims here, because only the monitor can write this page, while
    /// the client can write the channel.
    pub owner: [AtomicU32; PORTS],
    /// Number of channels to listeners on each port, including listeners that have ended. If it
    /// is not 0, connections over shared memory may use the port ([`crate::request::InUse`]).
    pub served: [AtomicU32; PORTS],
}

/// Maximum number of channels of one [`lessee`].
pub const CHANNELS_OF_ONE: u32 = 1 << 12;

/// The part of a channel's number that identifies the client process. Its channels may share
/// ports if they lead to different listeners, as sockets may in the kernel.
pub const fn lessee(channel: u32) -> u32 {
    channel / CHANNELS_OF_ONE
}

impl Registry {
    /// Is this an address of this host, other than loopback?
    pub fn has_local(&self, ip: &[u8; 16]) -> bool {
        self.local.iter().take(self.locals as usize).any(|l| l == ip)
    }
}
