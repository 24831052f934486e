//! Bytes of a connection: sending, receiving, and what both do if the ring is full or empty.
#![no_std]

pub mod msg;
mod pipe;
pub mod sendfile;
pub mod stream;

use fsocket_compat::unhooked;
use fsocket_fdtable::{ctl, pool, table, upcalls};
use fsocket_migrate::path;
use fsocket_readiness::ready;
use fsocket_runtime::{lengths, options, spin, token, user};
use fsocket_shm::{asleep, conn, idle, peers, stuck, values};
use fsocket_wait as wait;
