//! BPF programs and their loaders, one concern in each pair of files: `thing.bpf.c` runs in the
//! kernel, and `thing.rs` loads it, fills its maps and reads its counters.
//!
//! Every loader calls [`probe`] first. So if a kernel or a container lacks something, the error
//! is a reason and not an errno. Programs that must outlive their loader's process are pinned
//! below [`bpffs::ROOT`]. All others end when the value that holds them is dropped.

pub mod announce;
pub mod bpffs;
pub mod closings;
mod counters;
mod error;
mod kallsyms;
pub mod links;
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
