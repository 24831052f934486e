//! The reason why a connection is in the kernel, and the process at its other end.

use super::process::{Facts, Monitor};
use super::reason::Reason;
use super::sockets::Peer;
use std::collections::BTreeMap;
use std::net::IpAddr;

/// Facts about peers, by process, so that each is read once.
pub type Seen = BTreeMap<i32, Result<Option<Facts>, String>>;

pub fn unseen() -> Reason {
    Reason { reason: "peer_unknown", text: "the other end belongs to a process that cannot be seen".into() }
}

/// The other end is on a host that announces itself (ADR 58).
pub const ANOTHER_CAPABLE: &str = "another host, capable (kernel TCP: no RDMA)";
/// The other end is on a host that the agent is to link (ADR 60).
pub const LINKED: &str = "another host, linked: connections move to RDMA after some requests";
pub const UNLINKED: &str =
    "another host, with no link now (kernel TCP): one of the two agents does not run, or finds no RDMA device";

/// Fallbacks that a process has counted, without those of zones, which concern kernel sockets.
pub fn path_fallbacks(facts: &Facts) -> impl Iterator<Item = (&str, u64)> {
    let counted = facts.counters.iter().filter(|(name, n)| name.starts_with("fallback.") && **n > 0);
    counted.filter(|(name, _)| !name.starts_with("fallback.zone")).map(|(name, n)| (name.as_str(), *n))
}

/// Says why a process has a connection on kernel TCP although it could use shared memory, and which
/// process has the other end.
pub fn why_kernel(
    facts: &Facts,
    peer: &Peer,
    address: IpAddr,
    is_server: bool,
    seen: &mut Seen,
) -> (Option<i32>, Reason) {
    let reason = |reason, text: String| Reason { reason, text };
    let Peer::Process { pid, netns } = *peer else {
        let why = match peer {
            Peer::Remote if facts.report.link(address) == Some(true) => reason("remote_linked", LINKED.into()),
            Peer::Remote if facts.report.link(address).is_some() => reason("remote_unlinked", UNLINKED.into()),
            Peer::Remote if facts.report.hosts.knows(address) => reason("remote_capable", ANOTHER_CAPABLE.into()),
            Peer::Remote => reason("remote", "another host: kernel TCP".into()),
            Peer::Translated => {
                reason("translated", "a translated address of this host: the process behind it is not known".into())
            }
            _ => unseen(),
        };
        return (None, why);
    };
    why_between(facts, (pid, netns), is_server, false, seen)
}

/// Says why a connection to process `pid` of this host is in the kernel. `netns`: the network namespace of that process.
pub fn why_between(
    facts: &Facts,
    (pid, netns): (i32, u64),
    is_server: bool,
    is_unix: bool,
    seen: &mut Seen,
) -> (Option<i32>, Reason) {
    let reason = |reason, text: String| Reason { reason, text };
    let role = if is_server { "client" } else { "server" };
    let other = match seen.entry(pid).or_insert_with(|| Facts::of(pid)) {
        Ok(Some(other)) => &*other,
        Ok(None) => return (Some(pid), reason("peer_unknown", format!("the {role}, process {pid}, has ended"))),
        Err(e) => return (Some(pid), reason("peer_unknown", e.clone())),
    };
    let name = format!("the {role}, process {pid} ({})", other.name);
    if facts.monitor.as_ref().is_some_and(|m| i64::from(m.pid) == i64::from(pid)) || other.is_monitor() {
        let text =
            format!("it has left shared memory, and the {role} has not fetched its kernel socket from the monitor yet");
        return (None, reason("on_its_way", text));
    }
    let sockets = |f: &Facts| f.monitor.as_ref().map(|m: &Monitor| (m.socket.clone(), m.pid));
    let why = if let Some(theirs) = other.obstacles.first() {
        reason("peer", format!("{name}: {}", theirs.text))
    } else if facts.netns_owner != other.netns_owner && !is_unix {
        let whose = "is in a network namespace of another user namespace (rootless): kernel TCP";
        reason("other_userns", format!("{name}, {whose}"))
    } else if sockets(facts) != sockets(other) {
        let theirs = other.monitor.as_ref().map_or("system", |m| m.kind);
        let another = if theirs == "private" { "another private monitor" } else { "the system's monitor" };
        let own = if facts.user == other.user { "" } else { ": the system's monitor would serve both" };
        reason("other_monitor", format!("{name}, uses {another}{own}"))
    } else {
        let client = if is_server { other } else { facts };
        let counted: Vec<&str> = path_fallbacks(client).map(|(name, _)| name).collect();
        if counted.contains(&"fallback.other_user") {
            let users = format!("users {} and {}", facts.user, other.user);
            reason("other_user", format!("{name}: {users} must be named in a line of 'share' (docs/policy.md)"))
        } else if counted.contains(&"fallback.policy") {
            reason("policy", format!("{name}: a rule of the monitor refuses shared memory (fallback.policy)"))
        } else if is_unix {
            let why = "moves to shared memory after some requests, unless it has passed descriptors or credentials";
            reason("unix", format!("{name}: the connection {why} (docs/limits.md)"))
        } else if facts.network_namespace != netns {
            let later = "moves to shared memory after some requests (docs/containers.md)";
            reason("other_netns", format!("{name}, is in another network namespace: the connection {later}"))
        } else if counted.is_empty() {
            reason(
                "earlier",
                format!("{name}, can be reached over shared memory now, but the connection was made before"),
            )
        } else {
            reason("fallback", format!("{name}: the client counted {} (docs/fallbacks.md)", counted.join(", ")))
        }
    };
    (Some(pid), why)
}
