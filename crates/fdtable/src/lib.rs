//! Open file descriptions of this process, their descriptors, and what they share: the control
//! socket to the monitor, the arena of the fork group, and the functions of higher layers
//! ([`upcalls`]).
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
