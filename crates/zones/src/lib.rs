//! Kernel path: a local listen socket for each worker of a listener.
//!
//! A worker (a forked process, or a thread) gets its local listen socket when it
//! first uses the listener, and holds it alone: when it dies the kernel closes the
//! socket, and what waits there moves to the global one. See ADR 16.
//!
//! | file | concern |
//! | --- | --- |
//! | `life` | which listeners, and their life |
//! | `page` | what the processes of a fork group share about a listener |
//! | `join` | making a local listen socket |
//! | `successor` | listeners that go on in another program |
//! | `cpu` | which CPU a worker's zone is |
//! | `dwell` | workers that are away for long |
//! | `accept` | the order of the queues |
//! | `acceptor` | accepting without a local listen socket beside workers that have one |
//! | `balance` | taking from the queues of busy or absent workers |
//! | `handoff` | leaving in good order where nothing migrates |
//! | `shared` | listeners that share their address by the program's own wish |
//! | `reserve` | the reservation and the page, before the first worker |
//! | `watch`, `watches` | epoll, and being told to look |
//! | `poll` | poll |
#![no_std]

pub mod accept;
mod acceptor;
pub mod balance;
mod cpu;
mod dwell;
mod handoff;
mod join;
mod life;
pub mod listener;
mod page;
pub mod poll;
mod reserve;
pub mod shared;
pub mod successor;
pub mod watch;
mod watches;

pub use cpu::Pin;
pub use join::How;
pub use life::{
    any, at_exit, become_child, closed, follow_options, has_workers, hides, init, is_unused, leave, listened, none,
    option_set, pass_on, prepare, renumbered, shut,
};
pub use listener::{enabled, of, Zoned};
pub use watches::Who;

use fsocket_fdtable::{arena, ctl, pool, socks, table, upcalls};
use fsocket_runtime::{cow, lock, making, number, pieces, process, stats, Cause, Outcome};
use fsocket_shm::values;
use fsocket_wait as wait;
