//! Where a monitor leaves its groups of listeners for the next one: a file, and pinned BPF maps. ADR 25.

use fsocket_bpf::bpffs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

/// Where things are kept.
pub struct Keep {
    file: PathBuf,
    /// Tells the pins of one monitor from those of others.
    tag: String,
}

impl Keep {
    pub fn new(directory: &Path) -> Keep {
        let mut hash = DefaultHasher::new();
        directory.hash(&mut hash);
        Keep { file: directory.join("zones.json"), tag: format!("zones-{:016x}", hash.finish()) }
    }

    fn concern(&self, group: u64) -> String {
        format!("{}-{group}", self.tag)
    }

    /// The folder for a group's pins; none: it cannot be had, and the group ends with
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
