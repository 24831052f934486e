//! This process's listeners and their SYN queues, the routes to destinations, and how a connection
//! is made in a channel.
#![no_std]

pub mod claim;
pub mod establish;
pub mod in_use;
pub mod listen;
pub mod route;
pub mod short_lived;

use fsocket_compat::unhooked;
use fsocket_fdtable::{arena, ctl, pool, socks, table, upcalls};
use fsocket_runtime::{
    bits, cow, identity, inspect, lock, name, options, pieces, process, registry, sealed, stats, successor, token,
};
use fsocket_shm::{chan, kept, peers, values, waker};
use fsocket_wait::unjoined;
use fsocket_zones as zone;
