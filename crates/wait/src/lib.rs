//! The only place where the library sleeps on behalf of the program. It handles the limits of a
//! sleep and the effect of signals. Besides the descriptors of a call it watches the waker and
//! the monitor's socket.
//!
//! A call implements [`fsocket_sync::block::Wait`]: arm, look again, sleep, wake. Its `sleep`
//! calls [`sleep()`], with the objects to sleep on ([`Source`]) and the way ([`Sleep`]). No other
//! crate of the library makes a system call that sleeps for the program;
//! `crates/hooktable/tests/sleeps.rs` checks this.

#![no_std]

mod call;
mod deadline;
mod limits;
mod sleep;
mod sleeper;
pub mod teased;
pub mod unjoined;
mod word;

pub use call::{Call, Mask, Restart, Room, Sleep};
pub use deadline::Deadline;
pub use sleep::{heed, in_kernel, sleep, Source, BESIDE};
pub use sleeper::Sleeper;
pub use word::{Word, LONG};
