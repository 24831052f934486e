//! Detects programs that bypass the hooks: io_uring rings, and epoll instances that were made by raw system calls.
//! Higher layers decide what to do with the descriptors.
#![no_std]

pub mod entry;
pub mod rings;
pub mod unhooked;

use fsocket_fdtable::{ctl, table, upcalls};
use fsocket_runtime::{cow, lock, making, process, stats};
