//! Operations on kernel sockets by which each CPU gets a listen socket of its own. They are plain functions on
//! descriptors. The preloaded library calls them; where it lacks the right, the monitor does.
//!
//! Terms: the *global* listen socket is the application's own. A *local* listen socket is its copy for one worker.
//! Together they are one SO_REUSEPORT group in the kernel.
#![cfg_attr(not(test), no_std)]

pub mod classic;
pub mod copy;
pub mod listener;
pub mod reservation;
