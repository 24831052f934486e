//! Changes in the life of the process: start, fork, exec, inheritance, credentials, filters,
//! io_uring. Also handles the monitor's messages.
//!
//! The code runs inside programs of others: before constructors, in signal handlers, between fork
//! and exec, inside allocators. So it uses no standard library and no allocator (memory comes from
//! anonymous mappings), does not panic, and takes no lock on the data path.
#![no_std]

pub mod again;
pub mod by_number;
pub mod channels;
pub mod credentials;
pub mod dispatch;
pub mod exec;
pub mod fork;
pub mod inherit;
pub mod leave;
pub mod lend;
pub mod lifecycle;
pub mod limit;
pub mod locked;
pub mod operator;
pub mod passing;
pub mod pidfd_transfer;
pub mod sandbox;
pub mod start;
pub mod unshared;
pub mod uring;

use fsocket_compat::{rings, unhooked};
use fsocket_fdtable::{arena, ctl, pool, pristine, socks, space, table, upcalls};
use fsocket_listeners::{listen, route, short_lived};
use fsocket_migrate::{path, upgrade};
use fsocket_ops::{close, opts};
use fsocket_readiness::epoll;
use fsocket_runtime::identity;
use fsocket_runtime::{
    cow, faults, inspect, lent, lock, mailbox, making, memory_fd, musl, probe, process, registry, rights, room, sealed,
    signals, stats, successor, user, Outcome,
};
use fsocket_shm::{asleep, cancel, chan, conn, peers, values, waker};

use fsocket_zones as zone;
