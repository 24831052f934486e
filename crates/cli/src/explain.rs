//! `fastsocket explain`: says why a process, or a listener, is not accelerated. The facts come from the monitor and
//! from /proc; the command works without a monitor.

pub mod overview;
mod process;
mod reason;
pub mod sockets;
mod unix;
pub mod why;

use crate::cmdline::{Explain, Target};
use crate::place;
use crate::text::print;
use process::{Facts, State};
use procfs::net::{TcpNetEntry, TcpState};
use reason::Reason;
use serde::Serialize;
use sockets::{plain, Sockets};
use std::collections::{BTreeMap, HashSet};
use std::net::SocketAddr;
use why::{path_fallbacks, unseen, why_between, why_kernel, Seen};

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
    /// In the kernel, now.
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
    /// Connections that no process has accepted, in the kernel's queue and in those of shared memory.
    waiting: u32,
}

/// A connection in the kernel.
#[derive(Debug, Serialize)]
struct Kernel {
    /// Of a Unix connection the end that has no name is `*`.
    local: String,
    remote: String,
    peer: Option<i32>,
    why: Reason,
}

/// Exit status: 0 accelerated, 1 not, 2 not found.
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
            Target::Listener(_, port) => {
                eprintln!("fastsocket: no process that this user may inspect listens on port {port}")
            }
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

/// `port`: only facts about this port are wanted.
fn explain(facts: Facts, all: &Sockets, port: Option<u16>) -> Explanation {
    let listeners = listening(&facts, all, port);
    let mut seen = BTreeMap::new();
    let mut kernel_connections = in_kernel(&facts, all, port, &listeners, &mut seen);
    // A server that waits for clients is ready, whatever it asks over Unix sockets.
    let counts = listeners.is_empty() || !kernel_connections.is_empty();
    if port.is_none() {
        kernel_connections.extend(unix_in_kernel(&facts, all, &mut seen));
    }
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
    // Connections that stayed on kernel TCP: the open ones and those that were closed there.
    let shm = shm_connections as u64 + facts.counter("close_shm") + facts.counter("path_upgrade");
    let all_left = facts.obstacles.is_empty() && begun > 0 && shm == 0 && facts.counter("path_switch") > 0;
    if all_left {
        let text = format!("{begun} connections began over shared memory, and all have gone to the kernel since");
        reasons.insert(0, Reason { reason: "left", text });
    }
    let kernel = if counts { kernel_connections.len() as u64 } else { 0 }
        + facts.counter("connect_kernel")
        + facts.counter("accept_kernel");
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

/// Did the user ask for this socket?
fn is_wanted(entry: &TcpNetEntry, port: Option<u16>) -> bool {
    port.is_none_or(|port| entry.local_address.port() == port)
}

/// The process's listeners, with the number of connections that wait there, in the kernel and over shared
/// memory.
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

/// The process's connections over kernel TCP, each with its reason.
fn in_kernel(facts: &Facts, all: &Sockets, port: Option<u16>, listeners: &[Listening], seen: &mut Seen) -> Vec<Kernel> {
    // The idle kernel connection stays behind a connection that has moved to shared memory.
    let ends = |local: SocketAddr, peer: SocketAddr| (plain(local), plain(peer));
    let over = facts.report.connections.iter().filter(|c| c.across_namespaces || c.by_agents);
    let over: HashSet<_> = over.filter_map(|c| Some(ends(c.local.parse().ok()?, c.peer.parse().ok()?))).collect();
    let live = all.in_state(facts.pid, &TcpState::Established).into_iter().filter(|entry| is_wanted(entry, port));
    live.filter(|entry| !over.contains(&ends(entry.local_address, entry.remote_address)))
        .map(|entry| {
            let peer = all.peer(facts.pid, entry);
            let is_server = listeners.iter().any(|l| l.local.port() == entry.local_address.port());
            let (peer, why) = why_kernel(facts, &peer, entry.remote_address.ip(), is_server, seen);
            Kernel { local: entry.local_address.to_string(), remote: entry.remote_address.to_string(), peer, why }
        })
        .collect()
}

/// The process's Unix connections in the kernel, each with its reason.
fn unix_in_kernel(facts: &Facts, all: &Sockets, seen: &mut Seen) -> Vec<Kernel> {
    let Ok(process) = procfs::process::Process::new(facts.pid) else { return Vec::new() };
    let is_own =
        |c: &&fsocket_proto::report::Connection| c.pids.iter().any(|pid| i64::from(*pid) == i64::from(facts.pid));
    let mut over: BTreeMap<(String, String), usize> = BTreeMap::new();
    for c in facts.report.connections.iter().filter(is_own) {
        *over.entry((c.local.clone(), c.peer.clone())).or_default() += 1;
    }
    let mut kernel = Vec::new();
    for end in unix::ends(&process) {
        let (local, remote) = if end.is_server { (end.name, "*".into()) } else { ("*".into(), end.name) };
        let names = (local, remote);
        // The kernel does not tell which of several connections with the same names has moved.
        if let Some(left) = over.get_mut(&names).filter(|left| **left > 0) {
            *left -= 1;
            continue;
        }
        let (peer, why) = match end.peer.and_then(|inode| all.holder(inode)) {
            Some(pid) => why_between(facts, (pid, place::namespace(pid, "net")), end.is_server, true, seen),
            None => (None, unseen()),
        };
        kernel.push(Kernel { local: names.0, remote: names.1, peer, why });
    }
    kernel
}

/// The reasons why some connections do not use shared memory.
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

fn text(e: &Explanation) -> String {
    let f = &e.facts;
    let mut lines = vec![format!("process {} ({}), user {}", f.pid, f.name, f.user)];
    let mut line = |name: &str, value: String| lines.push(format!("  {name:<12}{value}"));
    let program = f.program.as_ref().map(|p| p.display().to_string()).unwrap_or_default();
    line("program", format!("{program} ({})", f.program_kind));
    line(
        "library",
        match &f.library {
            Some(l) if l.replaced => format!("{} (the file was replaced since)", l.path.display()),
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
    line("now", format!("{} over shared memory{across}{agents}, {kernel} in the kernel", e.shm_connections));
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
    // (The reasons of connections have been printed.)
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
