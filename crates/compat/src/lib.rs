//! How to see a program that works below the hooks: io_uring's rings, and epoll instances that it has made by
//! system calls of its own. What follows for its descriptors is decided above.
#![no_std]

pub mod entry;
pub mod rings;
pub mod unhooked;

use fsocket_fdtable::{ctl, table, upcalls};
use fsocket_runtime::{cow, lock, making, process, stats};
