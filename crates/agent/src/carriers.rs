//! Which carrier there is.

use crate::carrier::Carrier;
use fsocket_rdma::agree::{Key, Role};
use std::net::{IpAddr, TcpStream};

#[cfg(not(feature = "verbs"))]
mod double;
#[cfg(feature = "verbs")]
mod verbs;

/// Over a connection with another agent.
#[cfg(feature = "verbs")]
pub fn make(own: IpAddr, stream: TcpStream, role: Role, key: &Key) -> anyhow::Result<Box<dyn Carrier>> {
    Ok(Box::new(verbs::Verbs::new(own, stream, role, key)?))
}

/// As [`double`].
#[cfg(not(feature = "verbs"))]
pub fn make(_own: IpAddr, stream: TcpStream, _role: Role, _key: &Key) -> anyhow::Result<Box<dyn Carrier>> {
    Ok(Box::new(double::Double::new(stream)?))
}

/// Whether there can be one.
pub fn check() -> anyhow::Result<()> {
    let double = cfg!(feature = "verbs") || std::env::var_os("FASTSOCKET_AGENT_DOUBLE").is_some();
    anyhow::ensure!(double, "built without RDMA (--features verbs)");
    Ok(())
}
