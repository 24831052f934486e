//! Kernel path: what is done to sockets so that each CPU has a listen socket of
//! its own. Plain functions over descriptors, used by the preloaded library and,
//! where that lacks the right, by the monitor.
//!
//! Terms: the *global* listen socket is the application's own, a *local* one its
//! copy for one worker; together they are one SO_REUSEPORT group in the kernel.
#![cfg_attr(not(test), no_std)]

pub mod classic;
pub mod copy;
pub mod listener;
pub mod reservation;
