//! The state file: for each setting, the value that was found and the values that were set (ADR 20).
//!
//! `tune` writes the file before the first change. It replaces the file as a whole (a temporary
//! file, renamed), so that an interrupted run can be undone. The file only says which values are
//! possible; the machine says which one is in force.

use crate::error::Error;
use crate::root::Root;
use crate::setting::{Setting, Value};
use rustix::fs::{flock, FlockOperation};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

pub const VERSION: u32 = 1;

/// Directory of the state files, below the root.
pub const DIR: &str = "var/lib/fastsocket/tune";

/// The record of one setting.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    pub setting: Setting,
    /// The old value. `None`: the setting did not exist before (its queue came with more
    /// channels).
    pub old: Option<Value>,
    /// Values that Fastsocket has set. Empty: Fastsocket did not change the setting itself, but a
    /// change of channels may reset it; a revert then restores `old`.
    pub new: Vec<Value>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    pub version: u32,
    pub device: String,
    pub ifindex: u32,
    /// ID of the boot in which the state was written. A restart undoes all changes.
    pub boot: String,
    /// Time of writing, in seconds since 1970.
    pub written: u64,
    /// Whether the run that wrote the state reached its end. If it did not, and it changed the
    /// channels, the driver may have set values that are not in `new`.
    pub settled: bool,
    pub records: Vec<Record>,
}

impl State {
    pub fn new(root: &Root, device: &str, ifindex: u32) -> State {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        State {
            version: VERSION,
            device: device.to_owned(),
            ifindex,
            boot: boot(root),
            written: now.as_secs(),
            settled: false,
            records: Vec::new(),
        }
    }

    pub fn find(&self, setting: &Setting) -> Option<&Record> {
        self.records.iter().find(|r| r.setting == *setting)
    }

    /// Records a change before it is made. `old` is kept from the first run, so that a revert goes
    /// back to the state before all runs.
    pub fn intend(&mut self, setting: &Setting, old: Option<Value>, new: impl IntoIterator<Item = Value>) {
        let at = self.records.iter().position(|r| r.setting == *setting).unwrap_or_else(|| {
            self.records.push(Record { setting: setting.clone(), old, new: Vec::new() });
            self.records.len() - 1
        });
        let record = &mut self.records[at];
        for value in new {
            if !record.new.contains(&value) {
                record.new.push(value);
            }
        }
    }
}

/// The ID of the present boot.
pub fn boot(root: &Root) -> String {
    root.get("proc/sys/kernel/random/boot_id").unwrap_or_default()
}

/// The state file of one device, locked against a second `tune`.
pub struct Store {
    path: PathBuf,
    /// The lock on the file; it is released when `Store` is dropped.
    _lock: Option<File>,
}

impl Store {
    /// Opens the store for changes: makes the directory and takes the lock.
    pub fn lock(root: &Root, dir: Option<&Path>, device: &str) -> Result<Store, Error> {
        let dir = dir.map_or_else(|| root.path(DIR), Path::to_owned);
        let path = dir.join(".lock");
        let fail = |e| Error::State(path.clone(), e);
        fs::create_dir_all(&dir).map_err(|e| Error::State(dir.clone(), e))?;
        let lock = File::options().create(true).truncate(false).write(true).open(&path).map_err(fail)?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Store { path: file(root, &dir, device), _lock: Some(lock) }),
            Err(rustix::io::Errno::WOULDBLOCK) => Err(Error::Busy(path)),
            Err(e) => Err(fail(e.into())),
        }
    }

    /// Opens the store for reading, without the lock.
    pub fn look(root: &Root, dir: Option<&Path>, device: &str) -> Store {
        let dir = dir.map_or_else(|| root.path(DIR), Path::to_owned);
        Store { path: file(root, &dir, device), _lock: None }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn load(&self) -> Result<Option<State>, Error> {
        let bytes = match fs::read(&self.path) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(Error::State(self.path.clone(), e)),
        };
        let damaged = |text: String| Error::Damaged(self.path.clone(), text);
        let state: State = serde_json::from_slice(&bytes).map_err(|e| damaged(e.to_string()))?;
        if state.version != VERSION {
            return Err(damaged(format!("version {}, not {VERSION}", state.version)));
        }
        Ok(Some(state))
    }

    /// Replaces the file in one step. When this returns, the file is on the disk.
    pub fn save(&self, state: &State) -> Result<(), Error> {
        self.replace(state).map_err(|e| Error::State(self.path.clone(), e))
    }

    fn replace(&self, state: &State) -> io::Result<()> {
        let dir = self.path.parent().unwrap_or(Path::new("."));
        let mut file = tempfile::Builder::new().prefix(".tune-").tempfile_in(dir)?;
        serde_json::to_writer_pretty(&mut file, state)?;
        file.write_all(b"\n")?;
        file.as_file().sync_all()?;
        file.persist(&self.path)?;
        File::open(dir)?.sync_all()
    }

    pub fn remove(&self) -> Result<(), Error> {
        match fs::remove_file(&self.path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(Error::State(self.path.clone(), e)),
            _ => Ok(()),
        }
    }
}

/// The path of the state file: `DEV.json`. A network namespace other than the machine's (that of
/// process 1) may have another device of this name, so its file is `DEV@INODE.json` with the inode
/// of the namespace.
fn file(root: &Root, dir: &Path, device: &str) -> PathBuf {
    let inode = |process: &str| fs::metadata(root.path(format!("proc/{process}/ns/net"))).ok().map(|m| m.ino());
    match (inode("self"), inode("1")) {
        (Some(ours), Some(machine)) if ours != machine => dir.join(format!("{device}@{ours}.json")),
        _ => dir.join(format!("{device}.json")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(t: &str) -> Value {
        Value::Text(t.to_owned())
    }

    #[test]
    fn the_first_old_value_stays() {
        let mut state = State::new(&Root::new("/"), "eth0", 2);
        let setting = Setting::Sysctl("net.core.somaxconn".to_owned());
        state.intend(&setting, Some(text("128")), [text("4096")]);
        state.intend(&setting, Some(text("4096")), [text("16384"), text("4096")]);
        assert_eq!(state.records.len(), 1);
        assert_eq!(state.records[0].old, Some(text("128")));
        assert_eq!(state.records[0].new, [text("4096"), text("16384")]);
    }

    #[test]
    fn whole_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::new("/");
        let store = Store::lock(&root, Some(dir.path()), "eth0").unwrap();
        assert!(store.load().unwrap().is_none());
        let state = State::new(&root, "eth0", 2);
        store.save(&state).unwrap();
        assert_eq!(store.load().unwrap().unwrap(), state);
        assert!(matches!(Store::lock(&root, Some(dir.path()), "eth1"), Err(Error::Busy(_))));
        fs::write(store.path(), "{\"version\": 1, \"dev").unwrap();
        assert!(matches!(store.load(), Err(Error::Damaged(..))));
        fs::write(store.path(), serde_json::to_vec(&State { version: 9, ..state }).unwrap()).unwrap();
        assert!(matches!(store.load(), Err(Error::Damaged(..))));
        store.remove().unwrap();
        store.remove().unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "only the lock is left");
    }
}
