//! The process changes: start, fork, exec, what is inherited, credentials, filters, io_uring; and what the monitor
//! says. The hooks see all layers of the library through this one.
//!
//! This code runs inside other people's programs: before constructors, in
//! signal handlers, between fork and exec, inside allocators. So: no standard
//! library, no allocation (memory comes from anonymous mappings), no panic by
//! design, no lock on the data path.
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

pub use fsocket_compat::{rings, unhooked};
pub use fsocket_fdtable::{arena, ctl, pool, pristine, socks, space, table, upcalls};
pub use fsocket_listeners::{claim, establish, in_use, listen, route, short_lived};
pub use fsocket_migrate::{path, upgrade};
pub use fsocket_ops::{accept, close, connect, names, opts, slice};
pub use fsocket_readiness::{epoll, poll, ready};
pub use fsocket_runtime::identity;
pub use fsocket_runtime::{
    bits, cow, faults, heartbeat, inspect, keeping, lengths, lent, lock, mailbox, making, memory_fd, name, options,
    probe, process, registry, rights, room, sealed, signals, slab, spin, stats, successor, token, user, Cause, Outcome,
};
pub use fsocket_shm::{asleep, cancel, chan, conn, idle, kept, peers, stage, values, waker};
pub use fsocket_streams::{msg, sendfile, stream};
pub use fsocket_sys::{Errno, Result};
pub use fsocket_uaccess::{copy_by, Memcpy};

pub use fsocket_zones as zone;
