//! When a connection is ready ([`ready`]), and waiting for many descriptors: [`epoll`], [`poll`] and `select`.
#![no_std]

pub mod epoll;
pub mod poll;
pub mod ready;

use fsocket_fdtable::{ctl, pool, table, upcalls};
use fsocket_listeners::listen;
use fsocket_migrate::{path, upgrade};
use fsocket_runtime::{lengths, lock, making, process, signals, slab, spin, stats, user, Cause, Outcome};
use fsocket_shm::{asleep, cancel, chan, conn, peers, stuck, values, waker};
use fsocket_wait as wait;
use fsocket_wait::unjoined;
use fsocket_zones as zone;
