//! What everything in the library stands on: this process (identity, its own descriptors, signals),
//! locks, slabs, counters, copies from the program's memory, the CPU's time.
//!
//! This code runs inside other people's programs: before constructors, in
//! signal handlers, between fork and exec, inside allocators. So: no standard
//! library, no allocation (memory comes from anonymous mappings), no panic by
//! design, no lock on the data path.
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
