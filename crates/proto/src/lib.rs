//! Messages between the library and the monitor, and where they meet.
//!
//! Transport: one `SOCK_SEQPACKET` Unix socket for each process (the *control socket*). Each packet is one message
//! ([`Msg`]) with at most one descriptor (`SCM_RIGHTS`).
//!
//! Messages are two enums: [`Request`] to the monitor, and [`Message`] from it. Their variants, and what travels in a
//! packet, come from one table (`messages.rs`). A request in [`answer`] is answered by a message with the same kind and
//! number. The monitor may send a [`notice`] at any time, also before a pending answer. After each notice it bumps
//! `pending` in the process's arena, if there is one.
//!
//! The end of the control socket is the end of the process (or its `exec`):
//! the monitor then takes back everything it held. A forked child that inherits
//! sockets gets its own control socket: the *parent*, before the fork, makes a
//! socket pair and sends one end with [`request::Adopt`] over its own control
//! socket, so that the order of what parent and child do later cannot matter.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

pub mod agent;
mod messages;
#[cfg(feature = "report")]
pub mod operate;
pub mod packet;
pub mod paths;
pub mod raw;
pub mod registry;
pub use agent::Ends;
pub use messages::{answer, notice, request, Message, Request};
pub use packet::{Asks, Malformed, Msg, Payload, MSG_SIZE};
pub use registry::CLOSINGS_SIZE;
#[cfg(feature = "report")]
pub mod report;
#[cfg(feature = "report")]
pub mod steer;
pub mod switch;
pub mod values;

pub const VERSION: u16 = 1;

/// [`answer::Hello::understands`]. From this number on the monitor takes over what processes have from a monitor before it
/// ([`request::Attach`]).
pub const REATTACH: u64 = 1;

/// How long an answer to [`request::Connect`] may be used, seconds.
pub const ROUTE_SECS: u64 = 2;

/// [`request::Connect::identity`]: the socket differs from others in what a policy may tell it by.
pub const ODD: u64 = u64::MAX;

/// Channels of one listener, at most: a worker's table has room for so many.
pub const CHANNELS_OF_LISTENER: usize = 1024;

/// What the configuration of the monitor says of a program.
pub mod program {
    pub const NO_ZONES: u64 = 1;
    pub const NO_SPIN: u64 = 2;
}

/// Address of a listener or destination; IPv4 in v4-mapped form.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Addr {
    pub ip: [u8; 16],
    /// Host byte order.
    pub port: u16,
    /// AF_INET or AF_INET6.
    pub family: u16,
    /// IPV6_V6ONLY of a listener; else 0.
    pub v6only: u32,
}
