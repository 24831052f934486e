//! Open file descriptions as this process sees them, the numbers that refer to them, and what they share:
//! the control socket to the monitor, the arena of the fork group, and the calls upwards ([`upcalls`]).
#![no_std]

pub mod arena;
pub mod ctl;
pub mod pool;
pub mod pristine;
pub mod socks;
pub mod space;
pub mod table;
pub mod upcalls;

use fsocket_runtime::{
    bits, cow, identity, keeping, lock, memory_fd, pieces, process, registry, rights, sealed, slab, spin, stats,
};
