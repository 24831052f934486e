//! Other hosts to which the agent of this host has RDMA links.

use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::path::PathBuf;

/// `[hosts.rdma]`; see fastsocketd.toml(5).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Links {
    /// Address of this host on its RDMA device.
    pub address: SocketAddr,
    /// Addresses of other hosts.
    pub peers: Vec<SocketAddr>,
    /// The file with the key that all these hosts share.
    pub key: PathBuf,
}
