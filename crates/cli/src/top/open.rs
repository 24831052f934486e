//! Connections that are open now, by path.

use crate::explain::sockets::{inodes, plain, table};
use crate::place::namespace;
use fsocket_proto::report::{Process, Report};
use procfs::net::{TcpNetEntry, TcpState};
use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;

/// Numbers of open connections: over shared memory, by RDMA, and over kernel TCP.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Open {
    /// Over shared memory within this host.
    pub shm: u64,
    /// By RDMA to another host.
    pub rdma: u64,
    pub kernel: u64,
}

impl Open {
    /// The part of all open connections that uses shared memory. `None`: no connection is open.
    pub fn share(&self) -> Option<f64> {
        let all = self.shm + self.rdma + self.kernel;
        (all > 0).then(|| self.shm as f64 / all as f64)
    }

    /// All connections of the programs that the monitor knows. A connection counts once, even if the monitor knows
    /// both ends.
    pub fn all(report: &Report, kernel: &InKernel) -> Open {
        let over = |by_agents| {
            let channels = report.channels.iter().filter(|c| c.by_agents == by_agents);
            channels.map(|c| u64::from(c.connections)).sum()
        };
        Open { shm: over(false), rdma: over(true), kernel: kernel.all.saturating_sub(report.idle_kernel) }
    }

    /// Counts of the connection ends that a process has.
    pub fn of(process: &Process, kernel: &InKernel) -> Open {
        let sockets = kernel.by_pid.get(&process.pid).copied().unwrap_or(0);
        let open = process.open;
        Open { shm: open.shm, rdma: open.agents, kernel: sockets.saturating_sub(open.idle_kernel) }
    }
}

/// Numbers of kernel TCP connections for which processes have descriptors. /proc is the source.
#[derive(Debug, Default)]
pub struct InKernel {
    pub by_pid: HashMap<u32, u64>,
    pub all: u64,
}

/// Identifies a connection, in the same way for both ends: the smaller address comes first. For
/// loopback addresses, which are valid in one network namespace only, the namespace is added.
type Ends = (Option<u64>, SocketAddr, SocketAddr);

impl InKernel {
    /// Reads the sockets of the processes in a report.
    pub fn of(report: &Report) -> InKernel {
        let mut tables = HashMap::new();
        let (mut by_pid, mut all) = (HashMap::new(), HashSet::new());
        for pid in report.processes.iter().map(|p| p.pid) {
            let Some(number) = i32::try_from(pid).ok() else { continue };
            let Ok(process) = procfs::process::Process::new(number) else { continue };
            let netns = namespace(number, "net");
            let table: &HashMap<u64, Ends> = tables.entry(netns).or_insert_with(|| {
                let open = table(&process).into_iter().filter(is_open);
                open.map(|entry| (entry.inode, ends(&entry, netns))).collect()
            });
            if netns == 0 || table.is_empty() {
                continue;
            }
            // A set, because a program may have several descriptors for one socket.
            let own: HashSet<u64> = inodes(&process).filter(|inode| table.contains_key(inode)).collect();
            all.extend(own.iter().map(|inode| table[inode]));
            by_pid.insert(pid, own.len() as u64);
        }
        InKernel { by_pid, all: all.len() as u64 }
    }
}

fn is_open(entry: &TcpNetEntry) -> bool {
    let is_none = matches!(entry.state, TcpState::Listen | TcpState::Close | TcpState::SynSent | TcpState::TimeWait);
    !is_none && entry.inode != 0
}

fn ends(entry: &TcpNetEntry, netns: u64) -> Ends {
    let (a, b) = (plain(entry.local_address), plain(entry.remote_address));
    let is_within = a.ip().is_loopback() || b.ip().is_loopback();
    (is_within.then_some(netns), a.min(b), a.max(b))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn a_connection_counts_once_and_each_end_once() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let server = listener.accept().unwrap();
        let process = Process { pid: std::process::id(), ..Default::default() };
        let report = Report { processes: vec![process], ..Default::default() };
        let kernel = InKernel::of(&report);
        // Other tests of this process may have connections as well, so there is no exact number.
        assert!(kernel.all >= 1 && kernel.by_pid[&std::process::id()] > kernel.all, "{kernel:?}");
        drop((client, server));
    }

    #[test]
    fn idle_connections_are_left_out() {
        let kernel = InKernel { by_pid: [(7, 5)].into(), all: 4 };
        let open = fsocket_proto::report::Open { shm: 3, agents: 1, idle_kernel: 2 };
        let process = Process { pid: 7, open, ..Default::default() };
        assert_eq!(Open::of(&process, &kernel), Open { shm: 3, rdma: 1, kernel: 3 });
        let report = Report { idle_kernel: 1, ..Default::default() };
        let all = Open::all(&report, &kernel);
        assert_eq!((all, all.share()), (Open { shm: 0, rdma: 0, kernel: 3 }, Some(0.0)));
        assert_eq!(Open::default().share(), None);
    }
}
