//! BPF programs and their loaders, one concern a file: `thing.bpf.c` runs in the
//! kernel, `thing.rs` loads it, fills its maps and reads its counters.
//!
//! Every loader asks [`probe`] first, so that a kernel or a container that lacks
//! something yields a reason and not an errno. Programs that must outlive the
//! process that loads them are pinned below [`bpffs::ROOT`]; all others are gone
//! with the value that holds them.

pub mod announce;
pub mod bpffs;
pub mod closings;
mod counters;
mod error;
mod kallsyms;
mod load;
pub mod locality;
mod locknames;
pub mod locks;
pub mod pairs;
pub mod probe;
pub mod select;
mod skel;
pub mod slices;
pub mod steer;
pub mod xdp;

pub use counters::Count;
pub use error::{Error, Result};
pub use load::quiet;
