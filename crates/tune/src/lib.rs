//! `fastsocket tune`: a network device and the kernel's settings made ready
//! for short connections, each on one core, and back again.
//!
//! [`Machine`] and [`Device`] describe what is there, [`plan()`] says what
//! should change and why (it looks at descriptions only), [`apply()`] does it
//! after writing the old values to a [`Store`], [`revert()`] goes back.
//! `docs/network.md` says the purpose and the source of each setting.

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
