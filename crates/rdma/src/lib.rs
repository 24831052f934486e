//! Between agents of two hosts: messages, and one-sided writes into memory that one agent has given the other.
//!
//! An *agent* is one process of a host. It has one reliable connection ([`Link`]) to each peer host, with a
//! protection domain of its own: no peer's key opens what another was given. A message is 56 bytes. It goes by
//! RDMA write into the peer's inbox, its number as the immediate, behind the write that it announces. All links
//! of an agent share a completion queue, and everything that can happen to them makes one descriptor
//! readable ([`Agent`] is to be polled then; nobody has to poll without).
//!
//! rdma-core is loaded when an agent starts. Without it, or without a device, there is an [`Error`], and nothing else
//! changes. ADR 57 says what this crate does not do yet.

pub mod agree;
pub mod flow;

#[cfg(feature = "verbs")]
mod agent;
#[cfg(feature = "verbs")]
mod device;
#[cfg(feature = "verbs")]
mod link;
#[cfg(feature = "verbs")]
mod memory;

#[cfg(feature = "verbs")]
pub use agent::{Agent, Event};
#[cfg(feature = "verbs")]
pub use link::{Down, Link, Refused, Transfer};
#[cfg(feature = "verbs")]
pub use memory::{Access, Mapping, Region, Window};

/// What an agent says with each message.
pub type Body = [u64; 7];

/// Why there is no agent, or no link.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("not supported: rdma-core is not there")]
    NotSupported,
    #[error("no RDMA device has the address {0}")]
    NoDevice(std::net::IpAddr),
    #[error("as many links as an agent may have")]
    TooManyLinks,
    #[error("memory that can shrink, or is smaller than that")]
    Memory,
    #[error(transparent)]
    Agree(#[from] agree::Error),
    #[error("{0}: {1}")]
    Verbs(&'static str, #[source] std::io::Error),
}
