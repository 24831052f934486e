//! Bytes of a connection: sending, receiving, and what both do when there is no room or nothing there.
#![no_std]

pub mod msg;
pub mod sendfile;
pub mod stream;

use fsocket_compat::unhooked;
use fsocket_fdtable::{ctl, pool, table, upcalls};
use fsocket_migrate::path;
use fsocket_readiness::ready;
use fsocket_runtime::{lengths, options, spin, stats, token, user};
use fsocket_shm::{asleep, conn, idle, peers, stage, stuck, values};
use fsocket_wait as wait;
