//! Effects of libc calls on descriptors, on all paths: accept, connect, close, options, names.
#![no_std]

pub mod accept;
pub mod close;
pub mod connect;
pub mod names;
pub mod opts;
pub mod slice;

use fsocket_compat::{rings, unhooked};
use fsocket_fdtable::{ctl, pool, socks, table};
use fsocket_listeners::{claim, establish, in_use, listen, route, short_lived};
use fsocket_migrate::{path, upgrade};
use fsocket_readiness::{epoll, ready};
use fsocket_runtime::{inspect, lock, name, options, process, registry, signals, stats, token, user, Cause, Outcome};
use fsocket_shm::{asleep, chan, conn, kept, peers, stuck, trim, values, waker};
use fsocket_streams::stream;
use fsocket_wait as wait;
use fsocket_zones as zone;
