//! Where a monitor keeps the state of its listener groups for the next monitor: in a file, and in
//! pinned BPF maps. ADR 25.

use fsocket_bpf::bpffs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

/// The places where the state is kept.
pub struct Keep {
    file: PathBuf,
    /// Distinguishes the pins of this monitor from those of other monitors.
    tag: String,
}

impl Keep {
    /// The names contain the ABI: monitors of two ABIs may run at once, and must not take over
    /// each other's state.
    pub fn new(directory: &Path) -> Keep {
        let abi = fsocket_abi::VERSION;
        let mut hash = DefaultHasher::new();
        (directory, abi).hash(&mut hash);
        Keep { file: directory.join(format!("zones-{abi}.json")), tag: format!("zones-{:016x}", hash.finish()) }
    }

    fn concern(&self, group: u64) -> String {
        format!("{}-{group}", self.tag)
    }

    /// The folder for a group's pinned maps. `None`: it cannot be made, so the group ends with
    /// this process.
    pub fn folder(&self, group: u64) -> Option<PathBuf> {
        bpffs::folder(&self.concern(group)).inspect_err(|e| tracing::warn!(group, "not kept: {e}")).ok()
    }

    pub fn forget(&self, group: u64) {
        if let Err(e) = bpffs::remove(&self.concern(group)) {
            tracing::warn!(group, "{e}");
        }
    }

    pub fn read(&self) -> std::io::Result<Vec<u8>> {
        std::fs::read(&self.file)
    }

    pub fn write(&self, text: &[u8]) -> std::io::Result<()> {
        let new = self.file.with_extension("new");
        std::fs::write(&new, text).and_then(|()| std::fs::rename(&new, &self.file))
    }

    pub fn leave_nothing(&self) {
        let _ = std::fs::remove_file(&self.file);
    }
}
