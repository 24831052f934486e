//! What `fastsocket stat` and `fastsocket ss` show, as the monitor reports it.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

/// Counter name ([`fsocket_abi::arena::COUNTERS`]) to value.
pub type Counters = BTreeMap<String, u64>;

/// Where a private monitor with that socket leaves what it says last.
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
    /// Version of its program.
    #[serde(default)]
    pub monitor_version: String,
    /// Seconds since the monitor started.
    pub uptime: f64,
    /// Sum over all processes, also those that have ended.
    pub totals: Counters,
    pub processes: Vec<Process>,
    pub listeners: Vec<Listener>,
    /// One entry per end of a connection.
    pub connections: Vec<Connection>,
    pub channels: Vec<Channel>,
    /// Other hosts with Fastsocket.
    #[serde(default)]
    pub hosts: Hosts,
    /// Other hosts that this one's agent is to link.
    #[serde(default)]
    pub links: Vec<Link>,
    /// Listeners with local listen sockets.
    #[serde(default)]
    pub groups: Vec<Group>,
    /// Accepts by zone.
    #[serde(default)]
    pub zones: Vec<Zone>,
    /// Of devices whose passive connections are steered by flow group, and of listeners whose
    /// new connections are.
    #[serde(default)]
    pub flow_groups: Vec<FlowGroups>,
    /// The monitor's event loop.
    #[serde(default)]
    pub event_loop: Loop,
    /// What the monitor has open for users.
    #[serde(default)]
    pub held: Vec<Held>,
    /// Kernel connections that stay idle behind connections over another path.
    #[serde(default)]
    pub idle_kernel: u64,
}

/// How long the monitor is with one thing (a user's turn, say) before it looks at the next.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Loop {
    /// The longest turn, microseconds.
    pub longest_us: u64,
    /// Turns by how long they took: up to 1 µs, 2, 4 and so on; the last one has all that were longer.
    pub turns: Vec<u64>,
    /// The same of CPU time, at most: without what other programs got meanwhile.
    #[serde(default)]
    pub longest_cpu_us: u64,
    #[serde(default)]
    pub turns_cpu: Vec<u64>,
    /// The longest turns by what was done last in them.
    #[serde(default)]
    pub pieces: Vec<Piece>,
}

/// The longest turns of the loop that were for one thing.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Piece {
    /// A kind of request, or something else that the loop does.
    pub name: String,
    pub longest_us: u64,
    pub longest_cpu_us: u64,
}

/// Descriptors of a user's, and mappings of its memory, that the monitor has.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Held {
    pub uid: u32,
    pub descriptors: u64,
}

/// What hosts say of themselves in the handshake of TCP.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Hosts {
    /// `on`, `off`, or why it cannot be had.
    pub state: String,
    /// This host's number.
    pub number: u32,
    /// Those that have said so to a connection of this host.
    pub known: Vec<Host>,
}

impl Hosts {
    /// Has the host with this address said that it has Fastsocket?
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

/// Another host that the configuration names, and whether connections with it go over to the agents now.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Link {
    pub address: String,
    pub up: bool,
}

impl Report {
    /// Is the host with this address linked? None: it is not to be.
    pub fn link(&self, address: IpAddr) -> Option<bool> {
        let address = address.to_canonical();
        self.links.iter().find(|link| link.address.parse() == Ok(address)).map(|link| link.up)
    }
}

/// The flow groups of a steered device, or of a listener.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct FlowGroups {
    /// Its name, or the listener's address.
    pub device: String,
    /// Number of groups that go to each CPU.
    pub by_cpu: BTreeMap<u32, u32>,
    /// Number of those that do not go where they belong.
    #[serde(default)]
    pub away: u32,
    /// Moved away from a busy zone, and brought back, since there are any.
    pub moved: u64,
    pub returned: u64,
}

/// A listener with local listen sockets.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Group {
    pub id: u64,
    pub local: String,
    pub workers: Vec<ZoneWorker>,
    /// If its workers take from each other's queues.
    #[serde(default)]
    pub balance: Option<Balance>,
    /// Name of a kind of selection to its number by CPU that handled the SYN;
    /// see `select.bpf.c`.
    pub selections: BTreeMap<String, Vec<u64>>,
}

/// The accept queues of a listener's zones.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Balance {
    /// Longest that a queue should be: the backlog over the zones.
    pub limit: u32,
    pub queues: Vec<Queue>,
    pub steals: Vec<Steals>,
}

/// One zone's accept queue.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Queue {
    pub place: u32,
    pub cpu: u32,
    /// Connections that wait, as the kernel says.
    pub length: u32,
    /// The same by our own counts, with handshakes that have just begun.
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
    /// Its zone.
    pub cpu: u32,
    pub place: u32,
}

/// What the workers of a zone accepted.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Zone {
    pub cpu: u32,
    /// local, global, remote, stolen.
    pub accepted: Counters,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Process {
    pub pid: u32,
    pub comm: String,
    /// Pid of the process whose arena family it belongs to.
    pub family: u32,
    pub counters: Counters,
    /// It uses the kernel because an operator (`fastsocket off`) or the configuration wants it.
    #[serde(default)]
    pub off: bool,
    /// Where the configuration says something of the program: FILE:LINE, or nothing.
    #[serde(default)]
    pub rule: String,
    #[serde(default)]
    pub open: Open,
}

/// Ends of connections that a process has open. Those in the kernel are not the monitor's to see.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Open {
    /// Over shared memory, with another process of this host.
    pub shm: u64,
    /// Over shared memory with the agent, and RDMA to another host.
    pub agents: u64,
    /// Ends of these two behind which a kernel connection stays, idle.
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
    /// Connections waiting in SYN queues.
    pub queued: u32,
    /// Connections opened over shared memory so far, as its clients count them.
    #[serde(default)]
    pub opened: u64,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Connection {
    /// As `ss` spells it: SYN-SENT, ESTAB, FIN-WAIT, CLOSE-WAIT, ...
    pub state: String,
    /// Bytes waiting to be read here, and sent but not read by the peer.
    pub recv_q: u64,
    pub send_q: u64,
    pub local: String,
    pub peer: String,
    pub pids: Vec<u32>,
    pub comm: String,
    /// `shm`.
    pub path: String,
    /// The other end is in another network namespace; a kernel connection stays idle behind this one.
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
    /// Connections in it.
    pub connections: u32,
    /// Resident bytes of shared memory.
    pub resident: u64,
    /// The agent is at one end: the connections go to another host.
    #[serde(default)]
    pub by_agents: bool,
}
