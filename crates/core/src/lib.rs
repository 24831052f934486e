//! What the hooks decide: descriptors, sockets, streams, readiness, tokens,
//! waiting, and the control socket to the monitor.
//!
//! This code runs inside other people's programs: before constructors, in
//! signal handlers, between fork and exec, inside allocators. So: no standard
//! library, no allocation (memory comes from anonymous mappings), no panic by
//! design, no lock on the data path.
#![no_std]

pub mod accept;
pub mod arena;
pub mod asleep;
pub mod bits;
pub mod cancel;
pub mod chan;
pub mod channels;
pub mod close;
pub mod conn;
pub mod connect;
pub mod credentials;
pub mod ctl;
pub mod dispatch;
pub mod epoll;
pub mod establish;
pub mod exec;
pub mod faults;
pub mod fork;
mod heartbeat;
pub mod idle;
pub mod inherit;
pub mod inspect;
pub mod keeping;
pub mod leave;
pub mod lifecycle;
pub mod limit;
pub mod listen;
pub mod lock;
mod mailbox;
pub mod making;
pub mod msg;
pub mod name;
pub mod names;
pub mod options;
pub mod opts;
pub mod path;
pub mod peers;
pub mod pidfd_transfer;
pub mod poll;
pub mod pool;
pub mod process;
pub mod ready;
pub mod registry;
pub mod rights;
pub mod route;
pub mod sandbox;
pub mod sealed;
pub mod sendfile;
pub mod signals;
pub mod slab;
pub mod slice;
pub mod socks;
pub mod space;
pub mod spin;
pub mod start;
pub mod stats;
mod strangers;
pub mod stream;
pub mod successor;
pub mod table;
pub mod token;
pub mod unhooked;
pub mod upcalls;
pub mod upgrade;
pub mod uring;
pub mod user;
mod wait;
pub mod waker;
pub mod zone;

pub use fsocket_sys::{Errno, Result};
pub use fsocket_uaccess::{copy_by, Memcpy};

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
