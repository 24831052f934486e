//! `fastsocket explain`: why is this process, or this listener, not accelerated?

pub mod overview;
mod process;
mod reason;
pub mod sockets;

use crate::cmdline::{Explain, Target};
use crate::text::print;
use process::{Facts, Monitor, State};
use procfs::net::{TcpNetEntry, TcpState};
use reason::Reason;
use serde::Serialize;
use sockets::{plain, Peer, Sockets};
use std::collections::{BTreeMap, HashSet};
use std::net::{IpAddr, SocketAddr};

/// Nothing could be explained.
const EXIT_NOTHING: i32 = 2;

/// One process, explained.
#[derive(Debug, Serialize)]
struct Explanation {
    accelerated: bool,
    /// `accelerated`, `ready` (nothing has connected yet) or `kernel`.
    state: &'static str,
    reasons: Vec<Reason>,
    #[serde(flatten)]
    facts: Facts,
    listeners: Vec<Listening>,
    /// Over kernel TCP, now.
    kernel_connections: Vec<Kernel>,
    /// Over shared memory, now.
    shm_connections: usize,
    /// Those of them whose other end is in another network namespace.
    across_namespaces: usize,
    /// Those of them whose other end is on another host.
    by_agents: usize,
}

#[derive(Debug, Serialize)]
struct Listening {
    local: SocketAddr,
    /// With the monitor.
    registered: bool,
    /// Connections that nobody has accepted, in the kernel's queue and in those of shared memory.
    waiting: u32,
}

/// A connection over kernel TCP.
#[derive(Debug, Serialize)]
struct Kernel {
    local: SocketAddr,
    remote: SocketAddr,
    peer: Option<i32>,
    why: Reason,
}

/// Exit status: 0 accelerated, 1 not, 2 nothing there.
pub fn run(args: &Explain) -> i32 {
    let all = Sockets::read();
    let (pids, port) = match args.target {
        Target::Process(pid) => (vec![pid], None),
        Target::Listener(address, port) => (all.listeners(address, port), Some(port)),
    };
    let mut explained = Vec::new();
    for pid in &pids {
        match Facts::of(*pid) {
            // (The monitor has a copy of each listen socket that it knows.)
            Ok(Some(facts)) if port.is_some() && facts.is_monitor() => {}
            Ok(Some(facts)) => explained.push(explain(facts, &all, port)),
            Ok(None) => {}
            Err(e) => {
                eprintln!("fastsocket: {e}");
                return EXIT_NOTHING;
            }
        }
    }
    if explained.is_empty() {
        match args.target {
            Target::Process(pid) => eprintln!("fastsocket: there is no process {pid}"),
            Target::Listener(_, port) => eprintln!("fastsocket: no process that we may look at listens on port {port}"),
        }
        return EXIT_NOTHING;
    }
    if args.json {
        anstream::println!("{}", serde_json::to_string_pretty(&explained).unwrap_or_default());
    } else {
        explained.iter().for_each(|e| print(text(e)));
    }
    i32::from(!explained.iter().all(|e| e.accelerated))
}

/// `port`: only what has to do with this one is asked for.
fn explain(facts: Facts, all: &Sockets, port: Option<u16>) -> Explanation {
    let listeners = listening(&facts, all, port);
    let kernel_connections = in_kernel(&facts, all, port, &listeners);
    let own = |c: &&fsocket_proto::report::Connection| {
        let local = c.local.parse().map(|a: SocketAddr| a.port());
        c.path == "shm"
            && c.pids.iter().any(|pid| i64::from(*pid) == i64::from(facts.pid))
            && port.is_none_or(|port| local == Ok(port))
    };
    let shm_connections = facts.report.connections.iter().filter(own).count();
    let across_namespaces = facts.report.connections.iter().filter(own).filter(|c| c.across_namespaces).count();
    let by_agents = facts.report.connections.iter().filter(own).filter(|c| c.by_agents).count();
    let mut reasons = reasons(&facts, &listeners, &kernel_connections);
    let begun = facts.counter("connect_shm") + facts.counter("accept_shm");
    // Connections that stayed there: open ones, and those that were closed there.
    let shm = shm_connections as u64 + facts.counter("close_shm") + facts.counter("path_upgrade");
    let all_left = facts.obstacles.is_empty() && begun > 0 && shm == 0 && facts.counter("path_switch") > 0;
    if all_left {
        let text = format!("{begun} connections began over shared memory, and all have gone to the kernel since");
        reasons.insert(0, Reason { reason: "left", text });
    }
    let kernel = kernel_connections.len() as u64 + facts.counter("connect_kernel") + facts.counter("accept_kernel");
    let state = if !facts.obstacles.is_empty() || listeners.iter().any(|l| !l.registered) {
        "kernel"
    } else if shm > 0 || begun > 0 && !all_left {
        "accelerated"
    } else if kernel > 0 || all_left {
        "kernel"
    } else {
        "ready"
    };
    Explanation {
        accelerated: state != "kernel",
        state,
        reasons,
        facts,
        listeners,
        kernel_connections,
        shm_connections,
        across_namespaces,
        by_agents,
    }
}

/// Is this socket one that was asked for?
fn is_wanted(entry: &TcpNetEntry, port: Option<u16>) -> bool {
    port.is_none_or(|port| entry.local_address.port() == port)
}

/// What the process listens at, and how many connections wait there, in the kernel and over shared memory.
fn listening(facts: &Facts, all: &Sockets, port: Option<u16>) -> Vec<Listening> {
    let address = |text: &str| text.parse().map(plain).ok();
    let known = |local| facts.report.listeners.iter().filter(move |l| address(&l.local) == Some(plain(local)));
    let mut listeners: Vec<Listening> = Vec::new();
    for entry in all.in_state(facts.pid, &TcpState::Listen).into_iter().filter(|entry| is_wanted(entry, port)) {
        let local = entry.local_address;
        // (Workers have several sockets with one address.)
        match listeners.iter_mut().find(|l| l.local == local) {
            Some(l) => l.waiting += entry.rx_queue,
            None => {
                let (registered, queued) = (known(local).next().is_some(), known(local).map(|l| l.queued).sum::<u32>());
                listeners.push(Listening { local, registered, waiting: entry.rx_queue + queued });
            }
        }
    }
    listeners
}

/// The process's connections of the kernel's, each with the reason why it is one.
fn in_kernel(facts: &Facts, all: &Sockets, port: Option<u16>, listeners: &[Listening]) -> Vec<Kernel> {
    let mut peers = BTreeMap::new();
    // Behind a connection that has gone over its kernel connection stays, idle.
    let ends = |local: SocketAddr, peer: SocketAddr| (plain(local), plain(peer));
    let over = facts.report.connections.iter().filter(|c| c.across_namespaces || c.by_agents);
    let over: HashSet<_> = over.filter_map(|c| Some(ends(c.local.parse().ok()?, c.peer.parse().ok()?))).collect();
    let live = all.in_state(facts.pid, &TcpState::Established).into_iter().filter(|entry| is_wanted(entry, port));
    live.filter(|entry| !over.contains(&ends(entry.local_address, entry.remote_address)))
        .map(|entry| {
            let peer = all.peer(facts.pid, entry);
            let is_server = listeners.iter().any(|l| l.local.port() == entry.local_address.port());
            let (peer, why) = why_kernel(facts, &peer, entry.remote_address.ip(), is_server, &mut peers);
            Kernel { local: entry.local_address, remote: entry.remote_address, peer, why }
        })
        .collect()
}

/// Why not everything goes over shared memory.
fn reasons(facts: &Facts, listeners: &[Listening], kernel_connections: &[Kernel]) -> Vec<Reason> {
    if !facts.obstacles.is_empty() {
        return facts.obstacles.clone();
    }
    let mut reasons = Vec::new();
    for l in listeners.iter().filter(|l| !l.registered) {
        reasons.push(Reason { reason: "listener_unknown", text: format!("the monitor does not know {}", l.local) });
    }
    for c in kernel_connections {
        if !reasons.contains(&c.why) {
            reasons.push(c.why.clone());
        }
    }
    let fallback = |(name, n)| Reason { reason: "fallback", text: format!("{name}: {n} times (docs/fallbacks.md)") };
    reasons.extend(path_fallbacks(facts).map(fallback));
    reasons
}

/// Of a host that announces itself (ADR 58).
pub const ANOTHER_CAPABLE: &str = "another host, capable (kernel TCP: no RDMA)";
/// Of a host that the agent is to link (ADR 60).
pub const LINKED: &str = "another host, linked: connections go over to RDMA when they have carried some requests";
pub const UNLINKED: &str =
    "another host, with no link now (kernel TCP): one of the two agents does not run, or finds no RDMA device";

/// Fallbacks that a process has counted, without those of zones, which are about the kernel's own sockets.
fn path_fallbacks(facts: &Facts) -> impl Iterator<Item = (&str, u64)> {
    let counted = facts.counters.iter().filter(|(name, n)| name.starts_with("fallback.") && **n > 0);
    counted.filter(|(name, _)| !name.starts_with("fallback.zone")).map(|(name, n)| (name.as_str(), *n))
}

/// The reason for a kernel connection of a process that could have better ones, and who has the
/// other end. `seen`: peers that were looked at before.
fn why_kernel(
    facts: &Facts,
    peer: &Peer,
    address: IpAddr,
    is_server: bool,
    seen: &mut BTreeMap<i32, Result<Option<Facts>, String>>,
) -> (Option<i32>, Reason) {
    let reason = |reason, text: String| Reason { reason, text };
    let Peer::Process { pid, netns } = *peer else {
        let why = match peer {
            Peer::Remote if facts.report.link(address) == Some(true) => reason("remote_linked", LINKED.into()),
            Peer::Remote if facts.report.link(address).is_some() => reason("remote_unlinked", UNLINKED.into()),
            Peer::Remote if facts.report.hosts.knows(address) => reason("remote_capable", ANOTHER_CAPABLE.into()),
            Peer::Remote => reason("remote", "another host: kernel TCP".into()),
            Peer::Translated => {
                reason("translated", "an address of this host, translated: who is behind it is not known".into())
            }
            _ => reason("peer_unknown", "the other end belongs to a process that cannot be seen".into()),
        };
        return (None, why);
    };
    let role = if is_server { "client" } else { "server" };
    let other = match seen.entry(pid).or_insert_with(|| Facts::of(pid)) {
        Ok(Some(other)) => &*other,
        Ok(None) => return (Some(pid), reason("peer_unknown", format!("the {role}, process {pid}, has ended"))),
        Err(e) => return (Some(pid), reason("peer_unknown", e.clone())),
    };
    let name = format!("the {role}, process {pid} ({})", other.name);
    if facts.monitor.as_ref().is_some_and(|m| i64::from(m.pid) == i64::from(pid)) || other.is_monitor() {
        let text =
            format!("it has left shared memory, and the {role} has not come for its end yet, which the monitor has");
        return (None, reason("on_its_way", text));
    }
    let sockets = |f: &Facts| f.monitor.as_ref().map(|m: &Monitor| (m.socket.clone(), m.pid));
    let why = if let Some(theirs) = other.obstacles.first() {
        reason("peer", format!("{name}: {}", theirs.text))
    } else if facts.netns_owner != other.netns_owner {
        let whose = "is in a network namespace of another user namespace (rootless): kernel TCP";
        reason("other_userns", format!("{name}, {whose}"))
    } else if sockets(facts) != sockets(other) {
        let theirs = other.monitor.as_ref().map_or("system", |m| m.kind);
        let another = if theirs == "private" { "another private monitor" } else { "the system's monitor" };
        let own = if facts.user == other.user { "" } else { ": one of the system's would serve both" };
        reason("other_monitor", format!("{name}, has {another}{own}"))
    } else {
        let client = if is_server { other } else { facts };
        let counted: Vec<&str> = path_fallbacks(client).map(|(name, _)| name).collect();
        if counted.contains(&"fallback.other_user") {
            let users = format!("users {} and {}", facts.user, other.user);
            reason("other_user", format!("{name}: {users} must be named in a line of 'share' (docs/policy.md)"))
        } else if counted.contains(&"fallback.policy") {
            reason("policy", format!("{name}: the client counted fallback.policy, a rule of the monitor's"))
        } else if facts.network_namespace != netns {
            let later = "goes over when it has carried some requests (docs/containers.md)";
            reason("other_netns", format!("{name}, is in another network namespace: the connection {later}"))
        } else if counted.is_empty() {
            reason("earlier", format!("{name}, can be reached over shared memory: the connection is older"))
        } else {
            reason("fallback", format!("{name}: the client counted {} (docs/fallbacks.md)", counted.join(", ")))
        }
    };
    (Some(pid), why)
}

fn text(e: &Explanation) -> String {
    let f = &e.facts;
    let mut lines = vec![format!("process {} ({}), user {}", f.pid, f.name, f.user)];
    let mut line = |name: &str, value: String| lines.push(format!("  {name:<12}{value}"));
    let program = f.program.as_ref().map(|p| p.display().to_string()).unwrap_or_default();
    line("program", format!("{program} ({})", f.program_kind));
    line(
        "library",
        match &f.library {
            Some(l) if l.replaced => format!("{}, of which the file has been replaced since", l.path.display()),
            Some(l) => l.path.display().to_string(),
            None => "not loaded".into(),
        },
    );
    if let Some(m) = &f.monitor {
        let state = match &m.state {
            State::Answers => format!("process {}", m.pid),
            State::Absent => "absent".into(),
            State::OtherVersion => "another version".into(),
            State::Refuses(e) => e.clone(),
        };
        line("monitor", format!("{} ({}), {state}", m.socket.display(), m.kind));
        line("registered", if f.registered { "yes".into() } else { "no".into() });
        if !f.rule.is_empty() {
            line("rule", f.rule.clone());
        }
    }
    line("namespaces", format!("network {}, user {}", f.network_namespace, f.user_namespace));
    for l in &e.listeners {
        let waiting = match l.waiting {
            0 => String::new(),
            n => format!(", {n} wait to be accepted"),
        };
        let paths = if l.registered { "shared memory, kernel" } else { "kernel only" };
        line("listens", format!("{} ({paths}){waiting}", l.local));
    }
    let counters = ["connect_shm", "accept_shm", "connect_kernel", "accept_kernel", "path_switch", "path_upgrade"];
    let counted: Vec<String> = counters.iter().map(|c| format!("{c} {}", f.counter(c))).collect();
    let across = match e.across_namespaces {
        0 => String::new(),
        n => format!(" ({n} across network namespaces)"),
    };
    let kernel = e.kernel_connections.len();
    let agents = match e.by_agents {
        0 => String::new(),
        n => format!(" ({n} with another host, by RDMA)"),
    };
    line("now", format!("{} over shared memory{across}{agents}, {kernel} over kernel TCP", e.shm_connections));
    line("so far", counted.join(", "));
    for c in &e.kernel_connections {
        line("kernel", format!("{} - {}: {}", c.local, c.remote, c.why.text));
    }
    lines.push(match e.state {
        "accelerated" => "accelerated".into(),
        "ready" => match e.listeners.iter().map(|l| l.waiting).sum() {
            0u32 => "ready: nothing has connected yet".into(),
            n => format!("ready: nothing has been accepted yet, and {n} connections wait"),
        },
        _ => "not accelerated".to_owned(),
    });
    // (Those of connections have been said.)
    let said = |r: &&Reason| !e.kernel_connections.iter().any(|c| c.why == **r);
    lines.extend(e.reasons.iter().filter(said).map(|r| format!("  {}: {}", r.reason, r.text)));
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets() {
        assert_eq!(crate::cmdline::parse_target("17"), Ok(Target::Process(17)));
        assert_eq!(crate::cmdline::parse_target(":80"), Ok(Target::Listener(None, 80)));
        assert_eq!(crate::cmdline::parse_target("[::1]:80"), Ok(Target::Listener(Some("::1".parse().unwrap()), 80)));
        assert_eq!(
            crate::cmdline::parse_target("127.0.0.1:80"),
            Ok(Target::Listener(Some("127.0.0.1".parse().unwrap()), 80))
        );
        assert!(
            matches!(crate::cmdline::parse_target("localhost:80"), Ok(Target::Listener(Some(ip), 80)) if ip.is_loopback())
        );
        for bad in ["", "0", "-1", "x", "1.2.3.4", ":x", ":70000"] {
            assert!(crate::cmdline::parse_target(bad).is_err(), "{bad}");
        }
    }
}
