//! `fastsocketd`: the monitor of the shared-memory path.
//!
//! Knows which processes listen, makes the channels between them and their
//! clients, and cleans up after processes that die. It is not on the data
//! path: when it goes, established connections go on.
//!
//! | layer | modules |
//! | --- | --- |
//! | loop | [`monitor`]: receives, asks the part that is concerned, sends; [`turns`], `fair`, `pace`, [`watchdog`], [`endpoint`], [`report`] |
//! | parts | [`shm`]: connections over shared memory; [`zones`]: local listen sockets; [`steer`]: devices; [`policy`] |
//! | what the parts use | `context`, `off`, [`hosts`]: [`clients`], [`arenas`], configuration, the way to the broker |
//! | privileges | [`broker`] |
//! | mechanism | [`wire`], [`memory`], [`descriptor`], [`foreign`], [`closer`], [`maker`], [`address`], [`membarrier`], [`sockdiag`], [`settings`], [`metrics`], [`logs`], `rates` |
//!
//! A part has its own state; what it needs of others it gets as arguments. Imports point
//! downwards in this table; `crates/hooktable/tests/circles.rs` fails where files import each other.
//!
//! Clients are not trusted: neither their messages, nor their descriptors, nor
//! what lies in memory that they share with us.

pub mod address;
pub mod ancillary;
mod answer;
pub mod arenas;
mod arrivals;
mod asleep;
pub mod broker;
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

/// A process, by the number of its control socket; never reused.
pub type ConnId = u64;
/// The number of no process.
pub const NOBODY: ConnId = 0;
/// A process and those it forked, as told by ADOPT; never 0, never reused.
pub type FamilyId = u64;
/// A listening socket, by its SO_COOKIE: a monitor after this one gives it the same number.
pub type ListenerId = u64;
/// A channel; never 0.
pub type ChannelId = u32;

/// User and rights of a process. They protect processes of one user that have rights left from what one that has
/// given them up kept in memory. User and `kernel` come from the kernel. The process itself says its class, which
/// also has what the kernel does not show (Landlock).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rights {
    pub uid: u32,
    pub class: u64,
    /// A number for users, groups and capabilities as in /proc; 0: they cannot be read.
    pub kernel: u64,
}
