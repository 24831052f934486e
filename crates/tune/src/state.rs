//! The file that knows how it was before.
//!
//! Written before the first change and whole (a temporary file, renamed), so
//! that a run that was stopped anywhere can be undone. It says what was found
//! and what was wanted; which of the two is in force is looked up, never
//! remembered.

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

/// Where state files lie, below the root.
pub const DIR: &str = "var/lib/fastsocket/tune";

/// One setting.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    pub setting: Setting,
    /// As it was; None if it was not there (a queue that came with more
    /// channels).
    pub old: Option<Value>,
    /// Any of these is of our making. Empty: not changed by us, but may be
    /// reset when the number of channels changes, and then to be put back.
    pub new: Vec<Value>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    pub version: u32,
    pub device: String,
    pub ifindex: u32,
    /// Of the boot in which this was written: a restart undoes everything.
    pub boot: String,
    /// Seconds since 1970.
    pub written: u64,
    /// Was the run that wrote this carried to its end? If not, and it changed
    /// the channels, the driver may have reset values that are not in `new`.
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

    /// Notes what is about to be done. The first `old` stays: it is the one to
    /// go back to, however often this is run.
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

/// This boot.
pub fn boot(root: &Root) -> String {
    root.get("proc/sys/kernel/random/boot_id").unwrap_or_default()
}

/// The state file of one device, locked against a second `tune`.
pub struct Store {
    path: PathBuf,
    /// Held until dropped.
    _lock: Option<File>,
}

impl Store {
    /// Opens it for changes: makes the directory and takes the lock.
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

    /// Opens it for a look.
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

    /// Writes it: whole or not at all, and on the disk when this returns.
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

/// `DEV.json`; in a network namespace other than the machine's (that of
/// process 1), where the same names may stand for other devices,
/// `DEV@INODE.json` with the namespace's inode.
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
