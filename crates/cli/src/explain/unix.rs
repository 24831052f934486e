//! Connected Unix stream sockets of the kernel, and their peers.

use procfs::net::{UnixNetEntry, UnixState};
use procfs::process::{FDTarget, Process};
use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::os::fd::AsFd;

mod diag;

/// A process's end of a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct End {
    /// The name that the accepting side's socket has, as ss(8) shows it.
    pub name: String,
    pub is_server: bool,
    /// Inode number of the other end; `None`: the kernel did not tell.
    pub peer: Option<u64>,
}

/// The process's connections whose server has a name, over any path. Descriptors 0 to 2 are left out: they always stay in
/// the kernel, and below a service manager they lead to the journal.
pub fn ends(process: &Process) -> Vec<End> {
    let table: HashMap<u64, UnixNetEntry> =
        process.unix().into_iter().flatten().filter(is_connection).map(|e| (e.inode, e)).collect();
    let socket = |fd: procfs::process::FDInfo| match fd.target {
        FDTarget::Socket(inode) if fd.fd > 2 && table.contains_key(&inode) => Some(inode),
        _ => None,
    };
    let own: BTreeSet<u64> = process.fd().into_iter().flatten().flatten().filter_map(socket).collect();
    if own.is_empty() {
        return Vec::new();
    }
    let peers = File::open(format!("/proc/{}/ns/net", process.pid)).map(|netns| diag::peers(netns.as_fd()));
    let peers = peers.unwrap_or_default();
    let name = |inode: u64| Some(table.get(&inode)?.path.as_ref()?.display().to_string());
    let end = |inode: u64| {
        let peer = peers.get(&inode).copied();
        let own = name(inode).map(|name| (name, true));
        let (name, is_server) = own.or_else(|| Some((name(peer?)?, false)))?;
        Some(End { name, is_server, peer })
    };
    own.into_iter().filter_map(end).collect()
}

fn is_connection(entry: &UnixNetEntry) -> bool {
    i32::from(entry.socket_type) == libc::SOCK_STREAM && entry.state == UnixState::CONNECTED && entry.inode != 0
}
