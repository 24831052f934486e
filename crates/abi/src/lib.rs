//! What lies in shared memory: layouts, sizes, version words.
//!
//! Two kinds of shared memory exist. A **channel** is shared by one client
//! process and one listener group, which distrust each other: everything read
//! from it is checked before use and never read twice. An **arena** is shared
//! by a process, its forked children, and the monitor (which checks it, too).
//!
//! Nothing here has a pointer in it: the same bytes are mapped at different
//! addresses in different processes.
#![cfg_attr(not(loom), no_std)]

pub mod arena;
pub mod balance;
pub mod channel;
pub mod flags;
pub mod half;
pub mod sock;

/// Version of every layout in this crate; the monitor refuses another one.
pub const VERSION: u32 = 16;
