//! Errors that stop the whole command. A single setting that cannot be changed is not an error but
//! part of the outcome.

use std::io;
use std::path::PathBuf;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("'{0}' cannot be the name of a network device")]
    BadName(String),
    #[error("{0}: no such network device here (see `ip link`)")]
    NoDevice(String),
    #[error("{0}: {1}")]
    Device(String, io::Error),
    #[error("{0}: /sys shows another network namespace than this process is in; enter it with `ip netns exec`, or mount a sysfs of its own")]
    OtherNamespace(String),
    #[error("{0} needs root")]
    NotRoot(&'static str),
    #[error("{0}: {1}")]
    State(PathBuf, io::Error),
    #[error("{0} is damaged ({1}); nothing was changed. It holds the values to go back to: repair it, or remove it and set them by hand")]
    Damaged(PathBuf, String),
    #[error("another `fastsocket tune` is at work (it holds {0})")]
    Busy(PathBuf),
}
