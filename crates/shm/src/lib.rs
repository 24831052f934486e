//! Connections over shared memory, without sending and receiving: channels, wakers, sleeping
//! threads, and the two sides of a connection.
#![no_std]

pub mod asleep;
pub mod cancel;
pub mod cancel_in_musl;
pub mod chan;
pub mod conn;
pub mod idle;
mod index;
pub mod kept;
mod left;
pub mod peers;
pub mod pipes;
mod segment;
pub mod stuck;
pub mod trim;
mod unarmed;
pub mod values;
pub mod waker;

use fsocket_fdtable::{arena, ctl, pool, space, table, upcalls};
use fsocket_runtime::identity;
use fsocket_runtime::{
    cow, faults, keeping, lock, making, memory_fd, number, options, pieces, process, slab, stats, token,
};
