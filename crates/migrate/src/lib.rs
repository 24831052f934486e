//! A live connection changes its path: from shared memory to the kernel ([`path`]), and from the kernel to shared
//! memory ([`upgrade`]).
#![no_std]

pub mod path;
pub mod upgrade;

use fsocket_fdtable::{ctl, socks, table, upcalls};
use fsocket_listeners::{claim, establish, listen, route, short_lived};
use fsocket_runtime::{
    bits, heartbeat, inspect, lately, mailbox, name, process, registry, signals, stats, successor, token,
};
use fsocket_shm::{chan, conn, values, waker};
use fsocket_wait as wait;
use fsocket_zones as zone;
