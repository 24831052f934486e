//! TCP sockets of the kernel, and the processes that have them, as /proc shows them at one moment.

use crate::place::{local_addresses, namespace};
use procfs::net::{TcpNetEntry, TcpState};
use procfs::process::{all_processes, FDTarget, Process};
use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};

/// Inodes of a process's sockets.
pub fn inodes(process: &Process) -> impl Iterator<Item = u64> {
    process.fd().into_iter().flatten().flatten().filter_map(|fd| match fd.target {
        FDTarget::Socket(inode) => Some(inode),
        _ => None,
    })
}

/// TCP sockets of the network namespace of a process.
pub fn table(process: &Process) -> Vec<TcpNetEntry> {
    [process.tcp(), process.tcp6()].into_iter().flatten().flatten().collect()
}

/// The same address for `127.0.0.1` and `::ffff:127.0.0.1`.
pub fn plain(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// All that can be seen on this machine, read once.
pub struct Sockets {
    owners: HashMap<u64, Vec<i32>>,
    /// Network namespace to its TCP sockets.
    tables: HashMap<u64, Vec<TcpNetEntry>>,
    /// Addresses of this host, in any network namespace.
    local: HashSet<IpAddr>,
}

/// The other end of a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Peer {
    /// The process that has the other end, and its network namespace.
    Process { pid: i32, netns: u64 },
    /// It is on this host. Its process cannot be seen, or has closed it.
    Hidden,
    /// Its address is one of this host, but no socket has these two addresses, so one of them is translated.
    Translated,
    /// It is not on this host.
    Remote,
}

impl Sockets {
    pub fn read() -> Sockets {
        let mut sockets = Sockets { owners: HashMap::new(), tables: HashMap::new(), local: HashSet::new() };
        for process in all_processes().into_iter().flatten().flatten() {
            for inode in inodes(&process) {
                sockets.owners.entry(inode).or_default().push(process.pid);
            }
            let netns = namespace(process.pid, "net");
            if netns != 0 {
                sockets.tables.entry(netns).or_insert_with(|| {
                    sockets.local.extend(local_addresses(process.pid));
                    table(&process)
                });
            }
        }
        sockets
    }

    /// Processes that listen on a port, at an address if one is given, in any network namespace.
    pub fn listeners(&self, address: Option<IpAddr>, port: u16) -> Vec<i32> {
        let fits = |entry: &TcpNetEntry| {
            let local = plain(entry.local_address);
            let ip_fits = |ip: IpAddr| local.ip().is_unspecified() || local.ip() == ip.to_canonical();
            entry.state == TcpState::Listen && local.port() == port && address.is_none_or(ip_fits)
        };
        let found: HashSet<i32> = self.tables.values().flatten().filter(|e| fits(e)).flat_map(|e| self.of(e)).collect();
        let mut found: Vec<i32> = found.into_iter().collect();
        found.sort_unstable();
        found
    }

    /// A process that has this socket.
    pub fn holder(&self, inode: u64) -> Option<i32> {
        self.owners.get(&inode)?.first().copied()
    }

    fn of(&self, entry: &TcpNetEntry) -> Vec<i32> {
        self.owners.get(&entry.inode).cloned().unwrap_or_default()
    }

    /// A process's own sockets in a state.
    pub fn in_state(&self, pid: i32, state: &TcpState) -> Vec<&TcpNetEntry> {
        let table = self.tables.get(&namespace(pid, "net")).into_iter().flatten();
        table.filter(|e| e.state == *state && self.owners.get(&e.inode).is_some_and(|o| o.contains(&pid))).collect()
    }

    /// Finds the process that has the other end of a connection. The process's own namespace comes first.
    pub fn peer(&self, pid: i32, entry: &TcpNetEntry) -> Peer {
        let ends = (plain(entry.local_address), plain(entry.remote_address));
        let is_other = |e: &&TcpNetEntry| (plain(e.remote_address), plain(e.local_address)) == ends;
        let own = namespace(pid, "net");
        let mut spaces: Vec<_> = self.tables.iter().collect();
        spaces.sort_by_key(|(netns, _)| **netns != own);
        for (netns, table) in spaces {
            let Some(other) = table.iter().find(|e| is_other(e) && e.inode != entry.inode) else { continue };
            return match self.of(other).first() {
                Some(pid) => Peer::Process { pid: *pid, netns: *netns },
                None => Peer::Hidden,
            };
        }
        let here = ends.1.ip().is_loopback() || ends.0.ip() == ends.1.ip();
        match here {
            true => Peer::Hidden,
            false if self.local.contains(&ends.1.ip()) => Peer::Translated,
            false => Peer::Remote,
        }
    }
}
