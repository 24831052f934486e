//! A network namespace, which need not be the monitor's own, and what can be read there.

use crate::sockdiag::SockDiag;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use std::collections::BTreeSet;
use std::fs::File;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

/// From linux/sockios.h: the network namespace of a socket, as a descriptor.
const SIOCGSKNS: libc::c_ulong = 0x894C;

pub struct Place {
    namespace: OwnedFd,
    /// SO_NETNS_COOKIE.
    pub cookie: u64,
}

impl Place {
    /// The network namespace of the client of a Unix connection: the server's end belongs to the
    /// namespace in which the client made its socket.
    pub fn of(socket: BorrowedFd<'_>) -> Result<Place, String> {
        // SAFETY: the request takes no argument, and returns a new descriptor or fails.
        let fd = unsafe { libc::ioctl(socket.as_raw_fd(), SIOCGSKNS) };
        if fd < 0 {
            return Err(format!("cannot tell your network namespace: {}", std::io::Error::last_os_error()));
        }
        // SAFETY: the kernel has just made this descriptor, and nothing else owns it.
        let namespace = unsafe { OwnedFd::from_raw_fd(fd) };
        let mut place = Place { namespace, cookie: 0 };
        let found = place.within(|| {
            let socket = rustix::net::socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None);
            socket.and_then(|s| crate::descriptor::netns_cookie(s.as_fd()))
        })?;
        place.cookie = found.map_err(|e| format!("cannot make a socket there: {e}"))?;
        Ok(place)
    }

    /// The network namespace that a file names. `socket` makes a socket in it.
    pub fn named(file: &Path, socket: impl FnOnce() -> Result<OwnedFd, String> + Send) -> Result<Place, String> {
        let namespace = File::open(file).map_err(|e| format!("{}: {e}", file.display()))?.into();
        let there = Place { namespace, cookie: 0 };
        Place::of(there.within(socket)??.as_fd())
    }

    /// A second handle for the same namespace.
    pub fn again(&self) -> Result<Place, String> {
        let failed = |e: std::io::Error| format!("cannot hold the network namespace twice: {e}");
        Ok(Place { namespace: self.namespace.try_clone().map_err(failed)?, cookie: self.cookie })
    }

    /// The file in /run/netns that names the namespace, as made by `ip netns`.
    pub fn file(&self) -> Option<PathBuf> {
        let mine = rustix::fs::fstat(&self.namespace).ok()?;
        let named = std::fs::read_dir("/run/netns").ok()?.flatten().map(|e| e.path());
        let is_it = |p: &PathBuf| rustix::fs::stat(p).is_ok_and(|s| (s.st_dev, s.st_ino) == (mine.st_dev, mine.st_ino));
        named.into_iter().find(is_it)
    }

    /// Runs `work` on a new thread in this namespace. The thread of the event loop must not change
    /// its own namespace, and its watchdog's signal must not interrupt the BPF verifier.
    pub fn within<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T, String> {
        let namespace = self.namespace.as_fd();
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("namespace".into()).spawn_scoped(scope, move || {
                // SAFETY: the call accesses no memory, and changes only this thread.
                match unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNET) } {
                    0 => Ok(work()),
                    _ => Err(format!("cannot enter your network namespace: {}", std::io::Error::last_os_error())),
                }
            });
            let thread = thread.map_err(|e| format!("cannot make a thread: {e}"))?;
            thread.join().map_err(|_| "broke off".to_owned())?
        })
    }

    /// `net.ipv4.ip_local_port_range`.
    pub fn port_range(&self) -> Result<RangeInclusive<u16>, String> {
        let file = "/proc/sys/net/ipv4/ip_local_port_range";
        let text = self.within(|| std::fs::read_to_string(file))?.map_err(|e| format!("{file}: {e}"))?;
        let mut ends = text.split_whitespace().map(str::parse);
        match (ends.next(), ends.next()) {
            (Some(Ok(low)), Some(Ok(high))) => Ok(low..=high),
            _ => Err(format!("{file}: {text:?}")),
        }
    }

    /// Ports of listening sockets, in order; `None`: the kernel does not answer.
    pub fn listened_ports(&self) -> Option<Vec<u16>> {
        Some(self.ports(false)?.into_iter().collect::<BTreeSet<u16>>().into_iter().collect())
    }

    /// Local ports of connections, one entry for each connection. Empty if the kernel does not
    /// answer.
    pub fn local_ports(&self) -> Vec<u16> {
        self.ports(true).unwrap_or_default()
    }

    fn ports(&self, connected: bool) -> Option<Vec<u16>> {
        self.within(|| SockDiag::open().ok()?.local_ports(connected)).ok()?
    }
}
