//! Messages between the library and the monitor, and memory that both of them read.
//!
//! Transport: one `SOCK_SEQPACKET` Unix socket for each process (the *control socket*). Each packet is one message
//! ([`Msg`]) with at most one descriptor (`SCM_RIGHTS`).
//!
//! Messages are two enums: [`Request`] to the monitor, and [`Message`] from the monitor. One
//! table (`messages.rs`) defines their variants and the layout of their packets. The monitor
//! answers a request of [`answer`] with a message of the same kind and number. The monitor may
//! send a [`notice`] at any time, even before a pending answer. After each notice the monitor
//! increments `pending` in the process's arena, if there is one.
//!
//! When the control socket is closed, the process has ended (or called `exec`), and the monitor
//! frees everything that the process held. A forked child that inherits sockets gets its own
//! control socket: the *parent* makes a socket pair before the fork, and sends one end with
//! [`request::Adopt`] over its own control socket. So the monitor knows the child before parent
//! or child act, in whatever order they do.

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

/// [`answer::Hello::understands`] has this value or more: the monitor takes over from a former
/// monitor the objects that processes hold ([`request::Attach`]).
pub const REATTACH: u64 = 1;

/// How long an answer to [`request::Connect`] may be used, seconds.
pub const ROUTE_SECS: u64 = 2;

/// [`request::Connect::identity`] of a socket with unusual properties, by which a policy may tell
/// it from others.
pub const ODD: u64 = u64::MAX;

/// Maximum number of channels of one listener: a worker's table has room for this many.
pub const CHANNELS_OF_LISTENER: usize = 1024;

/// The settings of a program in the monitor's configuration.
pub mod program {
    pub const NO_ZONES: u64 = 1;
    pub const NO_SPIN: u64 = 2;
    /// The program uses no stdio stream on the descriptors 0 to 2.
    pub const NO_STDIO: u64 = 4;
}

/// Address of a listener or destination; IPv4 in v4-mapped form.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Addr {
    pub ip: [u8; 16],
    /// Port in host byte order.
    pub port: u16,
    /// AF_INET or AF_INET6.
    pub family: u16,
    /// IPV6_V6ONLY of a listener; else 0.
    pub v6only: u32,
}
