//! `fastsocketd`: the monitor of the shared-memory path.
//!
//! It knows which processes listen, makes the channels between them and their clients, and cleans
//! up after processes that die. It is not on the data path: if the monitor ends, established
//! connections go on.
//!
//! | layer | modules |
//! | --- | --- |
//! | loop | [`monitor`]: receives, calls the part that is concerned, sends; [`turns`], `fair`, `pace`, [`watchdog`], [`endpoint`], [`report`] |
//! | parts | [`shm`]: connections over shared memory; [`zones`]: local listen sockets; [`steer`]: devices; [`policy`] |
//! | what the parts use | `context`, `off`, [`hosts`]: [`clients`], [`arenas`], configuration, access to the broker |
//! | privileges | [`broker`] |
//! | mechanism | [`wire`], [`memory`], [`descriptor`], [`foreign`], [`closer`], [`maker`], [`address`], [`membarrier`], [`sockdiag`], [`settings`], [`metrics`], [`logs`], `rates`, `by_user` |
//!
//! Each part owns its state. It gets what it needs from other parts as arguments. Imports point
//! downwards in this table; `crates/hooktable/tests/circles.rs` fails if files import each other.
//!
//! The monitor trusts no client: neither its messages, nor its descriptors, nor the content of the
//! memory that it shares.

pub mod address;
pub mod ancillary;
mod answer;
pub mod arenas;
mod arrivals;
mod asleep;
pub mod broker;
mod by_user;
pub mod clients;
pub mod closer;
mod context;
mod cpus;
pub mod descriptor;
pub mod endpoint;
mod event;
mod fair;
pub mod foreign;
pub mod hosts;
pub mod knobs;
mod leased;
pub mod lifeline;
pub mod limits;
pub mod links;
pub mod logs;
pub mod maker;
pub mod membarrier;
pub mod memory;
pub mod metrics;
pub mod modules;
pub mod monitor;
mod netlink;
mod off;
mod pace;
mod pidfd;
pub mod policy;
mod rates;
pub mod report;
pub mod settings;
pub mod shares;
pub mod shm;
pub mod sockdiag;
pub mod steer;
pub mod turns;
pub mod watchdog;
pub mod wire;
pub mod zones;

pub use endpoint::{Config, Endpoint, StartError};
pub use knobs::Knobs;
pub use monitor::Monitor;

/// A process, by a number that the monitor gives to its control socket. Numbers are never reused.
pub type ConnId = u64;
/// The number that no process has.
pub const NOBODY: ConnId = 0;
/// A process together with the processes that it forked, as told by ADOPT. Never 0, never reused.
pub type FamilyId = u64;
/// A listening socket, by its SO_COOKIE: the next monitor uses the same number.
pub type ListenerId = u64;
/// A channel; never 0.
pub type ChannelId = u32;

/// User and rights of a process. A process that has given up rights must not reach the memory of a
/// process of the same user that still has them. `uid` and `kernel` come from the kernel. The
/// process itself tells its `class`, which includes what the kernel does not show (Landlock).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rights {
    pub uid: u32,
    pub class: u64,
    /// A number computed from users, groups and capabilities in /proc; 0: they cannot be read.
    pub kernel: u64,
}
