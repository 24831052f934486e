//! The files of /proc and /sys, or of a recorded copy of them.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// The directory that holds `proc` and `sys`: `/`, or a recording.
#[derive(Clone, Debug)]
pub struct Root(PathBuf);

impl Root {
    pub fn new(path: impl Into<PathBuf>) -> Root {
        Root(path.into())
    }

    /// Whether this is the running machine and not a recording.
    pub fn is_live(&self) -> bool {
        self.0 == Path::new("/")
    }

    /// The full path of `path`, which has no leading slash: `proc/irq/3/smp_affinity_list`.
    pub fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        debug_assert!(path.as_ref().is_relative());
        self.0.join(path)
    }

    /// Text of a file, without the newline at its end.
    pub fn read(&self, path: impl AsRef<Path>) -> io::Result<String> {
        Ok(fs::read_to_string(self.path(path))?.trim_end().to_owned())
    }

    /// Like `read`, but `None` if the file is missing or cannot be read.
    pub fn get(&self, path: impl AsRef<Path>) -> Option<String> {
        self.read(path).ok()
    }

    /// Reads a file that holds one number.
    pub fn number(&self, path: impl AsRef<Path>) -> Option<u64> {
        self.get(path)?.trim().parse().ok()
    }

    /// Writes a setting in a single `write`, as /proc and /sys require. It never creates a file: a
    /// setting that does not exist is an error.
    pub fn write(&self, path: impl AsRef<Path>, text: &str) -> io::Result<()> {
        let mut options = fs::OpenOptions::new();
        // Truncate in a recording, because ordinary files would keep the end of a longer old text.
        options.write(true).truncate(!self.is_live());
        options.open(self.path(path))?.write_all(format!("{text}\n").as_bytes())
    }

    pub fn exists(&self, path: impl AsRef<Path>) -> bool {
        self.path(path).exists()
    }

    /// Names in a directory, sorted; empty if there is no such directory.
    pub fn names(&self, path: impl AsRef<Path>) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.path(path)) else { return Vec::new() };
        let mut names: Vec<String> = entries.flatten().filter_map(|e| e.file_name().into_string().ok()).collect();
        names.sort();
        names
    }

    /// The numbers N of all entries `PREFIXN` in a directory, sorted.
    pub fn numbered(&self, path: impl AsRef<Path>, prefix: &str) -> Vec<u32> {
        let mut numbers: Vec<u32> =
            self.names(path).iter().filter_map(|n| n.strip_prefix(prefix)?.parse().ok()).collect();
        numbers.sort_unstable();
        numbers
    }
}
