//! Kernel path: a local listen socket for each worker of a listener.
//!
//! A worker (a forked process, or a thread) gets its local listen socket when it first uses the
//! listener, and no other worker has it. When the worker dies, the kernel closes the socket and
//! moves waiting connections to the global listen socket. See ADR 16.
//!
//! | file | concern |
//! | --- | --- |
//! | `life` | which listeners, and their life |
//! | `page` | what the processes of a fork group share about a listener |
//! | `join` | making a local listen socket |
//! | `successor` | listeners that the next program inherits |
//! | `cpu` | the CPU that a worker belongs to: its zone |
//! | `dwell` | whether a worker that blocks in `accept` gets a queue of its own |
//! | `accept` | the order of the queues |
//! | `rivals` | accepting from a global socket that blocks |
//! | `acceptor` | accepting without a local listen socket beside workers that have one |
//! | `balance` | taking from the queues of busy or absent workers |
//! | `handoff` | handing connections over at exit, where the kernel migrates none |
//! | `shared` | listeners for which the program itself has set SO_REUSEPORT |
//! | `reserve` | what a listener gets before its first worker: the page, and a socket that keeps the address |
//! | `watch`, `watches` | waiting on global and local listen sockets together; which epoll instances and threads wait |
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
mod rivals;
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
