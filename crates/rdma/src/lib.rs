//! Communication between agents of two hosts: messages, and one-sided writes into memory that one
//! agent has given to the other.
//!
//! An *agent* is one process of a host. It has one reliable connection ([`Link`]) to each peer
//! host. Each link has a protection domain of its own, so a key of one peer does not open memory
//! that was given to another.
//!
//! A message is 56 bytes. An RDMA write puts it into the peer's inbox, with its number as the
//! immediate value. The write that a message announces is posted before the message. All links of
//! an agent share a completion queue. One descriptor becomes readable for every event; then call
//! [`Agent::poll`], and at no other time.
//!
//! rdma-core is loaded when an agent starts. If it is missing, or if there is no device, the
//! result is an [`Error`], and nothing else changes. ADR 60 says what this crate does not do yet.

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

/// The contents of an agent's message.
pub type Body = [u64; 7];

/// The reason why an agent or a link could not be made.
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
