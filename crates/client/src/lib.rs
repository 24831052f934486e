//! What commands share: where library and monitor are, and the monitor's socket from a client's side.

#![deny(unsafe_code)]

pub mod control;
pub mod locate;
pub mod preload_list;

/// Exit status for everything that is our own failure, as `env`, `nice` and other exec wrappers have it.
pub const EXIT_OWN: i32 = 125;
