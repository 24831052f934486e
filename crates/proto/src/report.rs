//! The monitor's report, which `fastsocket stat` and `fastsocket ss` show.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

/// Counter name ([`fsocket_abi::arena::COUNTERS`]) to value.
pub type Counters = BTreeMap<String, u64>;

/// The file in which a private monitor with this socket stores its last report.
pub fn last(socket: &Path) -> PathBuf {
    let mut name = socket.as_os_str().to_owned();
    name.push(".last");
    name.into()
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Report {
    /// Version of this schema.
    pub version: u32,
    pub monitor_pid: u32,
    /// Version of the monitor's program.
    #[serde(default)]
    pub monitor_version: String,
    /// Version (ABI) of the shared memory that the monitor supports.
    #[serde(default)]
    pub abi: u32,
    /// A monitor of another ABI has replaced this one, which ends when its last program ends.
    #[serde(default)]
    pub retired: bool,
    /// Seconds since the monitor started.
    pub uptime: f64,
    /// Sums over all processes, including those that have ended.
    pub totals: Counters,
    pub processes: Vec<Process>,
    pub listeners: Vec<Listener>,
    /// One entry for each end of a connection.
    pub connections: Vec<Connection>,
    pub channels: Vec<Channel>,
    /// Other hosts with Fastsocket.
    #[serde(default)]
    pub hosts: Hosts,
    /// Other hosts to which the agent has to make links.
    #[serde(default)]
    pub links: Vec<Link>,
    /// Listeners with local listen sockets.
    #[serde(default)]
    pub groups: Vec<Group>,
    /// Accepts by zone.
    #[serde(default)]
    pub zones: Vec<Zone>,
    /// Flow groups of devices that steer passive connections by group, and of listeners that give
    /// out new connections by group.
    #[serde(default)]
    pub flow_groups: Vec<FlowGroups>,
    /// The monitor's event loop.
    #[serde(default)]
    pub event_loop: Loop,
    /// Descriptors and mappings that the monitor has open for users.
    #[serde(default)]
    pub held: Vec<Held>,
    /// Kernel connections that stay idle behind connections over another path.
    #[serde(default)]
    pub idle_kernel: u64,
}

/// How long the monitor works on one thing (for example one user's turn) before it looks at the
/// next.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Loop {
    /// The longest turn, microseconds.
    pub longest_us: u64,
    /// Number of turns by their length: up to 1 µs, 2, 4 and so on; the last entry has all longer
    /// ones.
    pub turns: Vec<u64>,
    /// The same in CPU time, which does not include the time of other programs. Upper bound.
    #[serde(default)]
    pub longest_cpu_us: u64,
    #[serde(default)]
    pub turns_cpu: Vec<u64>,
    /// The longest turns for each kind of work that was done last in a turn.
    #[serde(default)]
    pub pieces: Vec<Piece>,
}

/// The longest turns of the loop that ended with one kind of work.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Piece {
    /// A kind of request, or other work of the loop.
    pub name: String,
    pub longest_us: u64,
    pub longest_cpu_us: u64,
}

/// The descriptors of one user that the monitor has open, and its mappings of the user's memory.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Held {
    pub uid: u32,
    pub descriptors: u64,
}

/// Other hosts that have announced Fastsocket in TCP's handshake.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Hosts {
    /// `on`, `off`, or the reason why it is not available.
    pub state: String,
    /// This host's number.
    pub number: u32,
    /// Hosts that have announced Fastsocket to a connection of this host.
    pub known: Vec<Host>,
}

impl Hosts {
    /// Has the host with this address announced Fastsocket?
    pub fn knows(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        self.known.iter().any(|host| host.address.parse() == Ok(address))
    }
}

/// A host with Fastsocket.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Host {
    pub address: String,
    pub number: u32,
}

/// Another host that the configuration names, and whether connections to that host go over the
/// agents now.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Link {
    pub address: String,
    pub up: bool,
}

impl Report {
    /// Is the host with this address linked? None: the configuration does not name it.
    pub fn link(&self, address: IpAddr) -> Option<bool> {
        let address = address.to_canonical();
        self.links.iter().find(|link| link.address.parse() == Ok(address)).map(|link| link.up)
    }
}

/// The flow groups of a steered device, or of a listener.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct FlowGroups {
    /// The device's name, or the listener's address.
    pub device: String,
    /// Number of groups that go to each CPU.
    pub by_cpu: BTreeMap<u32, u32>,
    /// Number of groups that another CPU than their home CPU handles now.
    #[serde(default)]
    pub away: u32,
    /// Number of groups moved away from a busy zone, and of groups brought back, since the groups
    /// exist.
    pub moved: u64,
    pub returned: u64,
}

/// A listener with local listen sockets.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Group {
    pub id: u64,
    pub local: String,
    pub workers: Vec<ZoneWorker>,
    /// The balance, if the workers take connections from each other's queues.
    #[serde(default)]
    pub balance: Option<Balance>,
    /// For each kind of selection: its number for each CPU that handled the SYN; see
    /// `select.bpf.c`.
    pub selections: BTreeMap<String, Vec<u64>>,
}

/// The accept queues of a listener's zones.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Balance {
    /// The length that a queue should have at most: the backlog divided by the zones.
    pub limit: u32,
    pub queues: Vec<Queue>,
    pub steals: Vec<Steals>,
}

/// One zone's accept queue.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Queue {
    pub place: u32,
    pub cpu: u32,
    /// Number of waiting connections, as the kernel reports it.
    pub length: u32,
    /// The same number by the monitor's own counts, which include unfinished handshakes.
    pub counted: u64,
    pub average: f64,
    pub busy: bool,
    pub added: u64,
    pub taken: u64,
}

/// Connections that the worker at place `thief` accepted from the queue of `victim`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Steals {
    pub thief: u32,
    pub victim: u32,
    pub connections: u64,
}

/// One worker's local listen socket.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct ZoneWorker {
    pub pid: u32,
    /// The CPU of the worker's zone.
    pub cpu: u32,
    pub place: u32,
}

/// Connections that the workers of a zone accepted.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Zone {
    pub cpu: u32,
    /// Number of accepted connections by origin: local, global, remote, stolen.
    pub accepted: Counters,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Process {
    pub pid: u32,
    pub comm: String,
    /// Pid of the process whose arena family this process belongs to.
    pub family: u32,
    pub counters: Counters,
    /// The process uses the kernel because an operator (`fastsocket off`) or the configuration
    /// wants that.
    #[serde(default)]
    pub off: bool,
    /// The line of the configuration that names the program, as FILE:LINE, or nothing.
    #[serde(default)]
    pub rule: String,
    #[serde(default)]
    pub open: Open,
}

/// Number of ends of connections that a process has open. The monitor does not see connections over
/// the kernel.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Open {
    /// Over shared memory, with another process of this host.
    pub shm: u64,
    /// Over shared memory with the agent, and RDMA to another host.
    pub agents: u64,
    /// Number of these ends that keep an idle kernel connection.
    pub idle_kernel: u64,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Listener {
    pub id: u64,
    /// `127.0.0.1:80`, `[::]:80`.
    pub local: String,
    pub pids: Vec<u32>,
    /// Processes that accept.
    pub workers: Vec<u32>,
    /// Number of connections that wait in SYN queues.
    pub queued: u32,
    /// Number of connections opened over shared memory so far, as the clients count them.
    #[serde(default)]
    pub opened: u64,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Connection {
    /// State as `ss` spells it: SYN-SENT, ESTAB, FIN-WAIT, CLOSE-WAIT, ...
    pub state: String,
    /// Bytes that wait to be read here (`recv_q`), and bytes that were sent but not read by the
    /// peer (`send_q`).
    pub recv_q: u64,
    pub send_q: u64,
    pub local: String,
    pub peer: String,
    pub pids: Vec<u32>,
    pub comm: String,
    /// Always `shm`.
    pub path: String,
    /// The other end is in another network namespace; an idle kernel connection is kept for this
    /// one.
    #[serde(default)]
    pub across_namespaces: bool,
    /// The other end is on another host: the agents of both carry the bytes, by RDMA.
    #[serde(default)]
    pub by_agents: bool,
    pub channel: u32,
    pub slot: u32,
    pub tx_bytes: u64,
    pub rx_bytes: u64,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Channel {
    pub id: u32,
    pub listener: u64,
    pub client_pid: u32,
    /// Number of connections in the channel.
    pub connections: u32,
    /// Bytes of shared memory that are resident.
    pub resident: u64,
    /// One end of the channel is the agent: its connections lead to another host.
    #[serde(default)]
    pub by_agents: bool,
}
