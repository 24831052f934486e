//! The library behind `fastsocket tune`. It prepares a network device and the kernel for short
//! connections that each stay on one core, and can undo that.
//!
//! [`Machine`] and [`Device`] describe the present state. From these descriptions alone,
//! [`plan()`] decides what should change and why. [`apply()`] writes the old values to a [`Store`]
//! and then makes the changes; [`revert()`] undoes them. `docs/network.md` gives the purpose and
//! the source of each setting.

#![deny(unsafe_code)]

mod apply;
mod cpus;
pub mod deliver;
mod device;
mod error;
pub mod ethtool;
mod machine;
mod plan;
mod revert;
mod root;
mod setting;
mod state;
pub mod sysctl;

pub use apply::{apply, Done, Fate, Outcome};
pub use cpus::{BadCpus, CpuSet};
pub use device::{Device, Irq, Role, RxQueue, TxQueue};
pub use error::Error;
pub use machine::{Balance, Conntrack, Cpus, Limits, Machine, Node};
pub use plan::{plan, Change, Kind, Note, Options, Plan, RpsPolicy, Spread};
pub use revert::{revert, system, Reverted, Undone};
pub use root::Root;
pub use setting::{Group, Setting, System, Value};
pub use state::{Record, State, Store};
