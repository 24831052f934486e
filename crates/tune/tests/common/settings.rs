//! All settings of this machine that `fastsocket tune` may change.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

/// Network settings, interrupts and queues of a device, by path. Paths that contain one of
/// `moving` are left out, because their values change by themselves.
pub fn settings(device: &str, moving: &[&str]) -> BTreeMap<String, String> {
    let mut files = BTreeMap::new();
    let queues = format!("/sys/class/net/{device}/queues");
    let mut directories: Vec<PathBuf> =
        ["/proc/sys/net/core", "/proc/sys/net/ipv4", "/proc/irq", &queues].iter().map(PathBuf::from).collect();
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(&directory).unwrap() {
            let entry = entry.unwrap();
            let path = entry.path().display().to_string();
            if entry.file_type().unwrap().is_dir() {
                directories.push(entry.path());
            } else if let (Ok(text), false) = (fs::read(entry.path()), moving.iter().any(|own| path.contains(own))) {
                files.insert(path, String::from_utf8_lossy(&text).into_owned());
            }
        }
    }
    assert!(files.len() > 100, "{files:?}");
    files
}
