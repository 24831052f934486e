//! Connections over shared memory: listeners, the channels to their clients, and the ends of both.
//!
//! | concern | modules |
//! | --- | --- |
//! | state | `state`, [`listeners`], [`channels`], `offers`, `pairs`, [`stand_ins`], [`passed`], [`ports`], [`registry`], [`switched`], [`idle_ends`], [`pipes`] |
//! | requests | `requests`, `leases`, `reattach`, [`switch`], [`upgrade`], `crossing`, `remote`, [`shown`], [`wakers`], [`taken`], `operate`, [`successor`], [`renew`] |
//! | ends | [`reaper`], `sweep`, `sweeping`, `steps`, [`wake`], `stale`, `closings`, [`distrust`] |
//! | in turns | [`dispatch`], `waiting`, `untaken` |

pub mod channels;
pub mod closings;
mod crossing;
pub mod dispatch;
pub mod distrust;
pub mod ending;
pub mod ends;
pub mod idle_ends;
pub mod in_use;
mod leases;
pub mod listeners;
mod offers;
mod operate;
mod pairs;
pub mod passed;
pub mod pipes;
pub mod ports;
pub mod reaper;
mod reattach;
pub mod registry;
mod remote;
pub mod renew;
mod requests;
pub mod resident;
pub mod shown;
mod stale;
pub mod stand_ins;
mod state;
mod steps;
pub mod successor;
mod sweep;
mod sweeping;
pub mod switch;
pub mod switched;
pub mod taken;
mod told;
mod touches;
pub mod transfers;
pub mod unix;
mod untaken;
pub mod upgrade;
mod waiting;
pub mod wake;
pub mod wakers;

pub use state::Shm;
