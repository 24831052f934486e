//! Errors of this crate and of the kernel's BPF.

use std::io;
use std::path::PathBuf;

/// A failure, with the object or place that it concerns.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel lacks something, or this process lacks a privilege.
    #[error("{0}")]
    Missing(#[from] crate::probe::Missing),
    /// The kernel's verifier or loader refused the program.
    #[error("{object}: the kernel refused to load it: {source}{}", tail(.log))]
    Load {
        /// Name of the BPF object.
        object: String,
        source: libbpf_rs::Error,
        /// Last lines of the verifier's log, if there is one.
        log: String,
    },
    /// A program was loaded, but could not be attached.
    #[error("{object}: cannot attach: {source}")]
    Attach {
        /// Name of the BPF object or program.
        object: String,
        source: libbpf_rs::Error,
    },
    /// Reading or writing a map failed.
    #[error("map {map}: {source}")]
    Map {
        /// Name of the map.
        map: String,
        source: libbpf_rs::Error,
    },
    /// The network namespace has no such device.
    #[error("no device {0} in this network namespace")]
    Device(String),
    /// A program of another owner is attached to the device or cgroup.
    #[error("another {what} program is attached already and is not replaced ({source})")]
    Busy { what: &'static str, source: io::Error },
    /// The device accepts the program in no mode.
    #[error("the device takes no program: {0}")]
    Refused(String),
    /// The file of a policy can be changed by other users.
    #[error("{file}: of user {uid}, mode {mode:o}; a policy must be a file that only root can write (chown root, chmod go-w)")]
    Untrusted { file: String, uid: u32, mode: u32 },
    /// The folder for pins was made by another user, or others can change it.
    #[error("{}: {why}; nothing is pinned there", path.display())]
    NotOurs { path: PathBuf, why: String },
    /// The file is not a policy.
    #[error("{0}: has not exactly one program of type XDP (see docs/network.md)")]
    NoPolicy(String),
    /// The policy was made for another version of the interface.
    #[error("{object}: made for version {found} of steer_policy.h, this is {wanted}")]
    PolicyAbi { object: String, found: u32, wanted: u32 },
    /// An operation on a file failed: bpffs, a pin, /proc.
    #[error("{}: {source}", path.display())]
    File { path: PathBuf, source: io::Error },
}

impl Error {
    pub(crate) fn file(path: impl Into<PathBuf>, source: impl Into<io::Error>) -> Self {
        Error::File { path: path.into(), source: source.into() }
    }

    pub(crate) fn attach(object: &str, source: libbpf_rs::Error) -> Self {
        Error::Attach { object: object.to_owned(), source }
    }

    pub(crate) fn map(map: &str, source: libbpf_rs::Error) -> Self {
        Error::Map { map: map.to_owned(), source }
    }
}

fn tail(log: &str) -> String {
    if log.is_empty() {
        String::new()
    } else {
        format!("\n{log}")
    }
}

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;
