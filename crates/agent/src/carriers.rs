//! Selects the kind of carrier.

use crate::carrier::Carrier;
use fsocket_rdma::agree::{Key, Role};
use std::net::{IpAddr, TcpStream};

#[cfg(not(feature = "verbs"))]
mod double;
#[cfg(feature = "verbs")]
mod verbs;

/// Makes a carrier over a connection to another agent.
#[cfg(feature = "verbs")]
pub fn make(own: IpAddr, stream: TcpStream, role: Role, key: &Key) -> anyhow::Result<Box<dyn Carrier>> {
    Ok(Box::new(verbs::Verbs::new(own, stream, role, key)?))
}

/// As above, without RDMA; see [`double`].
#[cfg(not(feature = "verbs"))]
pub fn make(_own: IpAddr, stream: TcpStream, _role: Role, _key: &Key) -> anyhow::Result<Box<dyn Carrier>> {
    Ok(Box::new(double::Double::new(stream)?))
}

/// Checks whether this host can have a carrier.
pub fn check() -> anyhow::Result<()> {
    let double = cfg!(feature = "verbs") || std::env::var_os("FASTSOCKET_AGENT_DOUBLE").is_some();
    anyhow::ensure!(double, "built without RDMA (--features verbs)");
    Ok(())
}
