//! Differential tester: random programs of socket calls, over several processes
//! and threads, run on kernel TCP and on shared memory. The kernel is the
//! specification: the transcripts must be equal.
//!
//! A program ([`program`]) is a list of steps, each a call by one actor (a
//! thread). A scheduler ([`lane`]) makes one step at a time. It goes on when the call has returned,
//! or when the kernel says that all actors in a call sleep. In the second case the step "blocks",
//! and may return after a later step. So every run makes the same steps, and must give the same
//! answers.

pub mod actor;
pub mod call;
pub mod campaign;
pub mod free;
pub mod generate;
pub mod judge;
#[cfg(not(target_env = "gnu"))]
mod lacking;
pub mod lane;
pub mod program;
pub mod regression;
pub mod rng;
pub mod shared;
pub mod shrink;
pub mod symbols;
pub mod watch;
