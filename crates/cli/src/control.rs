//! The monitor's socket, from a client's side.

use fsocket_proto::paths;
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Connects to a monitor. EAGAIN means: one listens, but its queue is full.
pub fn connect(path: &Path, flags: SocketFlags) -> Result<OwnedFd, Errno> {
    let fd = net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags | SocketFlags::CLOEXEC, None)?;
    net::connect(&fd, &SocketAddrUnix::new(path)?)?;
    Ok(fd)
}

/// Does a monitor listen there? The uid it runs as, if it says so.
pub fn probe(path: &Path) -> Result<Option<u32>, Errno> {
    match connect(path, SocketFlags::NONBLOCK) {
        Ok(fd) => Ok(net::sockopt::socket_peercred(&fd).ok().map(|c| c.uid.as_raw())),
        Err(Errno::AGAIN) => Ok(None),
        Err(e) => Err(e),
    }
}

/// Nobody listens there, as against: somebody does and will not talk to us.
pub fn is_absent(e: Errno) -> bool {
    matches!(e, Errno::NOENT | Errno::CONNREFUSED | Errno::NOTDIR)
}

/// Path that the environment names, if any.
pub fn from_env() -> Option<PathBuf> {
    std::env::var_os(paths::ENV_SOCKET).filter(|v: &OsString| !v.is_empty()).map(PathBuf::from)
}

/// This user's private monitor.
pub fn private_path() -> PathBuf {
    paths::private_socket(rustix::process::geteuid().as_raw()).into()
}
