//! Functions that all commands share: finding the library and the monitor, and the client's side of the monitor's
//! socket.

#![deny(unsafe_code)]

pub mod control;
pub mod locate;
pub mod preload_list;

/// Exit status for failures of the command itself, as in `env`, `nice` and other exec wrappers.
pub const EXIT_OWN: i32 = 125;
