//! Other hosts that the agent of this host links.

use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::path::PathBuf;

/// `[hosts.rdma]`; see fastsocketd.toml(5).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Links {
    /// Of this host, on its RDMA device.
    pub address: SocketAddr,
    /// Of other hosts.
    pub peers: Vec<SocketAddr>,
    /// The file with the key that all of them have.
    pub key: PathBuf,
}
