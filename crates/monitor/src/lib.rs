//! `fastsocketd`: the monitor of the shared-memory path.
//!
//! Knows which processes listen, makes the channels between them and their
//! clients, and cleans up after processes that die. It is not on the data
//! path: when it goes, established connections go on.
//!
//! | layer | modules |
//! | --- | --- |
//! | loop | [`endpoint`], [`monitor`], [`turns`], [`watchdog`] |
//! | decisions | [`requests`], [`policy`], [`reaper`], [`switch`], [`steer`], [`report`] |
//! | state | [`clients`], [`listeners`], [`channels`], [`arenas`], [`ports`], [`registry`], [`zones`] |
//! | privileges | [`broker`] |
//! | mechanism | [`wake`], [`wire`], [`shm`], [`descriptor`], [`maker`], [`address`], [`membarrier`], [`sockdiag`], [`closings`], [`settings`], [`metrics`] |
//!
//! Clients are not trusted: neither their messages, nor their descriptors, nor
//! what lies in memory that they share with us.

pub mod address;
pub mod arenas;
pub mod broker;
pub mod channels;
pub mod clients;
mod closings;
mod cpus;
pub mod descriptor;
pub mod dispatch;
pub mod distrust;
pub mod endpoint;

pub mod knobs;
pub mod lifeline;
pub mod limits;
pub mod listeners;
pub mod maker;
pub mod membarrier;
pub mod metrics;
pub mod monitor;
mod netlink;
mod pidfd;
pub mod pipes;
pub mod policy;
pub mod ports;
pub mod reaper;
pub mod registry;
pub mod renew;
pub mod report;
mod requests;
pub mod settings;
pub mod shares;
pub mod shm;
pub mod sockdiag;
pub mod steer;
pub mod successor;
pub mod switch;
pub mod switched;
pub mod taken;
pub mod turns;
pub mod upgrade;
pub mod wake;
pub mod wakers;
pub mod watchdog;
pub mod wire;
pub mod zones;

pub use endpoint::{Config, Endpoint, StartError};
pub use knobs::Knobs;
pub use monitor::Monitor;

/// A process, by the number of its control socket; never reused.
pub type ConnId = u64;
/// A process and those it forked, as told by ADOPT; never reused.
pub type FamilyId = u64;
/// A listening socket; never reused.
pub type ListenerId = u64;
/// A channel; never 0.
pub type ChannelId = u32;
