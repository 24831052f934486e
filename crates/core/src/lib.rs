//! What the hooks decide: descriptors, sockets, streams, readiness, tokens,
//! waiting, and the control socket to the monitor.
//!
//! This code runs inside other people's programs: before constructors, in
//! signal handlers, between fork and exec, inside allocators. So: no standard
//! library, no allocation (memory comes from anonymous mappings), no panic by
//! design, no lock on the data path.
#![no_std]

pub mod accept;
pub mod again;
pub mod channels;
pub mod close;
pub mod connect;
pub mod credentials;
pub mod dispatch;
pub mod epoll;
pub mod establish;
pub mod exec;
pub mod fork;
pub mod in_use;
pub mod inherit;
pub mod leave;
pub mod lifecycle;
pub mod limit;
pub mod listen;
pub mod msg;
pub mod names;
pub mod opts;
pub mod path;
pub mod pidfd_transfer;
pub mod poll;
pub mod ready;
pub mod route;
pub mod sandbox;
pub mod sendfile;
pub mod slice;
pub mod start;
pub mod stream;
pub mod upgrade;
pub mod uring;
pub mod zone;

pub use fsocket_compat::{rings, unhooked};
pub use fsocket_fdtable::{arena, ctl, pool, socks, space, table, upcalls};
pub use fsocket_runtime::{
    bits, cow, faults, heartbeat, inspect, keeping, lock, mailbox, making, memory_fd, name, options, process, registry,
    rights, sealed, signals, slab, spin, stats, strangers, successor, token, user,
};
pub use fsocket_shm::{asleep, cancel, chan, conn, idle, kept, peers, stage, values, waker};
pub use fsocket_sys::{Errno, Result};
pub use fsocket_uaccess::{copy_by, Memcpy};

use fsocket_wait::{self as wait, unjoined};

/// What a hook shall do: the answer, or "let libc do it".
pub enum Outcome<T> {
    /// Done here.
    Done(T),
    /// The kernel's business; whatever reason there is has been counted.
    Kernel,
}

impl<T> Outcome<T> {
    /// Look at, or change, an answer of ours.
    pub fn map_done<U>(self, f: impl FnOnce(T) -> U) -> Outcome<U> {
        match self {
            Outcome::Done(v) => Outcome::Done(f(v)),
            Outcome::Kernel => Outcome::Kernel,
        }
    }
}
