//! The base of the library: process identity, own descriptors, signals, locks, slabs, counters,
//! copies of program memory, and the time to spin. All higher layers use this crate; it knows
//! nothing of connections.
//!
//! The code runs inside programs of others: before constructors, in signal handlers, between fork
//! and exec, inside allocators. So it uses no standard library and no allocator (memory comes from
//! anonymous mappings), does not panic, and takes no lock on the data path.
#![no_std]

pub mod bits;
pub mod cow;
pub mod faults;
mod fnv;
pub mod heartbeat;
pub mod identity;
pub mod inspect;
pub mod keeping;
pub mod lately;
pub mod lengths;
pub mod lent;
pub mod lock;
pub mod mailbox;
pub mod making;
pub mod memory_fd;
pub mod musl;
pub mod name;
pub mod number;
pub mod options;
mod outcome;
pub mod pieces;
pub mod probe;
pub mod process;
pub mod registry;
pub mod rights;
pub mod room;
pub mod sealed;
pub mod signals;
pub mod slab;
pub mod spin;
pub mod stats;
pub mod successor;
pub mod token;
pub mod uid_map;
pub mod user;

pub use outcome::{Cause, Outcome};
