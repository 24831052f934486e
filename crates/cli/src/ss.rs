//! `fastsocket ss`: lists listeners and connections over shared memory, by the monitor's report.

use crate::explain::why::{ANOTHER_CAPABLE, LINKED, UNLINKED};
use crate::others;
use crate::place;
use crate::text::{print, table};
use anyhow::Result;
use clap::Args;
use fsocket_client::control;
use fsocket_proto::report::{Connection, Host, Listener, Process, Report};
use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;

/// Connections and listeners over shared memory
#[derive(Debug, Default, Args)]
pub struct Ss {
    /// Only those of this process; may be repeated
    #[arg(long, value_name = "PID")]
    pub pid: Vec<u32>,
    /// Only those with this port, at either end; may be repeated
    #[arg(long, value_name = "PORT")]
    pub port: Vec<u16>,
    /// Only those in this state (listen, estab, fin-wait-2, close-wait, time-wait, close); may be repeated
    #[arg(long, value_name = "STATE", value_parser = parse_state)]
    pub state: Vec<String>,
    /// JSON output
    #[arg(long)]
    pub json: bool,
}

const LISTEN: &str = "LISTEN";
const STATES: [&str; 6] = [LISTEN, "ESTAB", "FIN-WAIT-2", "CLOSE-WAIT", "TIME-WAIT", "CLOSE"];

/// A state, also by the names that `ss` takes.
fn parse_state(text: &str) -> Result<String, String> {
    let upper = text.to_uppercase().replace('_', "-");
    let state = match upper.as_str() {
        "LISTENING" => LISTEN,
        "ESTABLISHED" | "CONNECTED" => "ESTAB",
        "CLOSED" => "CLOSE",
        other => other,
    };
    match STATES.contains(&state) {
        true => Ok(state.to_owned()),
        false => Err(format!("the states are {}", STATES.join(", ").to_lowercase())),
    }
}

impl Ss {
    fn wants(&self, state: &str, ends: [&str; 2], pids: &[u32]) -> bool {
        let port = |end: &str| end.parse::<SocketAddr>().map(|a| a.port());
        (self.state.is_empty() || self.state.iter().any(|s| s == state))
            && (self.pid.is_empty() || pids.iter().any(|pid| self.pid.contains(pid)))
            && (self.port.is_empty() || ends.iter().any(|end| port(end).is_ok_and(|p| self.port.contains(&p))))
    }

    fn wants_listener(&self, l: &Listener) -> bool {
        self.wants(LISTEN, [&l.local, ""], &l.pids)
    }

    fn wants_connection(&self, c: &Connection) -> bool {
        self.wants(&c.state, [&c.local, &c.peer], &c.pids)
    }
}

/// Network namespaces and containers of processes, each looked up once.
#[derive(Default)]
struct Places {
    names: HashMap<u64, String>,
    of: HashMap<u32, (String, Option<String>)>,
}

impl Places {
    /// Names the processes that have a socket. If they are in several containers, one container is shown.
    fn of(&mut self, pids: &[u32]) -> (String, Option<String>) {
        let Some(pid) = pids.first().copied() else { return ("-".into(), None) };
        let names = &self.names;
        let look = || {
            let netns = i32::try_from(pid).map_or(0, |pid| place::namespace(pid, "net"));
            let unnamed = if netns == 0 { "?".to_owned() } else { netns.to_string() };
            (names.get(&netns).cloned().unwrap_or(unnamed), place::container(pid))
        };
        self.of.entry(pid).or_insert_with(look).clone()
    }
}

/// `fastsocket ss`.
pub fn run(args: &Ss) -> Result<i32> {
    let socket = control::find()?;
    let mut report = control::report(&socket)?;
    let mut others = others::ask(&socket, Some(&report));
    for report in std::iter::once(&mut report).chain(others.iter_mut().filter_map(|other| other.report.as_mut())) {
        report.listeners.retain(|l| args.wants_listener(l));
        report.connections.retain(|c| args.wants_connection(c));
    }
    let mut places = Places { names: place::namespace_names(), ..Default::default() };
    if !args.json {
        print(text(&others::with(&report, &others), &mut places));
        return Ok(0);
    }
    let mut value = json(&report, &mut places)?;
    for other in others.iter().filter_map(|other| other.report.as_ref()) {
        // (Channels of two monitors may have the same number.)
        let mut other = json(other, &mut places)?;
        for name in ["listeners", "connections", "off"] {
            if let (Some(all), Some(more)) = (value[name].as_array_mut(), other[name].as_array_mut()) {
                all.append(more);
            }
        }
    }
    anstream::println!("{}", serde_json::to_string_pretty(&value)?);
    Ok(0)
}

fn json(report: &Report, places: &mut Places) -> Result<serde_json::Value> {
    let mut placed = |value: serde_json::Result<serde_json::Value>, pids: &[u32]| {
        let mut value = value?;
        let (netns, container) = places.of(pids);
        value["network_namespace"] = netns.into();
        value["container"] = container.into();
        anyhow::Ok(value)
    };
    let listeners: Result<Vec<_>> = report.listeners.iter().map(|l| placed(serde_json::to_value(l), &l.pids)).collect();
    let connections: Result<Vec<_>> =
        report.connections.iter().map(|c| placed(serde_json::to_value(c), &c.pids)).collect();
    Ok(serde_json::json!({
        "version": report.version,
        "listeners": listeners?,
        "connections": with_peers(connections?),
        "channels": report.channels,
        "hosts": report.hosts,
        "links": report.links,
        "off": off(report).map(|p| p.pid).collect::<Vec<_>>(),
    }))
}

/// Adds the processes at the other end of each connection: those of the entry with the same slot, if the viewer sees it.
fn with_peers(mut connections: Vec<serde_json::Value>) -> Vec<serde_json::Value> {
    let mut slots: HashMap<String, Vec<usize>> = HashMap::new();
    for (i, c) in connections.iter().enumerate() {
        slots.entry(format!("{}:{}", c["channel"], c["slot"])).or_default().push(i);
    }
    for ends in slots.into_values() {
        let pids: Vec<_> = ends.iter().map(|i| connections[*i]["pids"].clone()).collect();
        if let ([a, b], [of_a, of_b]) = (&ends[..], &pids[..]) {
            connections[*a]["peer_pids"] = of_b.clone();
            connections[*b]["peer_pids"] = of_a.clone();
        }
    }
    connections
}

/// Where a connection's bytes go.
fn path(c: &Connection) -> String {
    let way = match (c.by_agents, c.across_namespaces) {
        (true, _) => "/rdma",
        (_, true) => "/netns",
        _ => "",
    };
    format!("{}{way}", c.path)
}

const HEADER: [&str; 10] = [
    "State",
    "Recv-Q",
    "Send-Q",
    "Local Address:Port",
    "Peer Address:Port",
    "Path",
    "Channel:Slot",
    "NetNS",
    "Container",
    "Process",
];

fn text(report: &Report, places: &mut Places) -> String {
    let names: BTreeMap<u32, &str> = report.processes.iter().map(|p| (p.pid, p.comm.as_str())).collect();
    let users = |pids: &[u32], comm: &str| {
        let one = |pid: &u32| format!("(\"{}\",pid={pid})", names.get(pid).copied().unwrap_or(comm));
        format!("users:({})", pids.iter().map(one).collect::<Vec<_>>().join(","))
    };
    let mut table = table(&HEADER, &[1, 2]);
    let mut row = |cells: [&str; 7], pids: &[u32], comm: &str| {
        let (netns, container) = places.of(pids);
        let more = [netns, container.unwrap_or_else(|| "-".into()), users(pids, comm)];
        table.add_row(cells.iter().map(|c| (*c).to_owned()).chain(more));
    };
    for l in &report.listeners {
        let peer = if l.local.starts_with('[') { "[::]:*" } else { "0.0.0.0:*" };
        row([LISTEN, &l.queued.to_string(), "0", &l.local, peer, "shm", "-"], &l.pids, "");
    }
    for c in &report.connections {
        let (recv, send, slot) = (c.recv_q.to_string(), c.send_q.to_string(), format!("{}:{}", c.channel, c.slot));
        row([&c.state, &recv, &send, &c.local, &c.peer, &path(c), &slot], &c.pids, &c.comm);
    }
    let mut text = table.to_string();
    for link in &report.links {
        text.push_str(&format!("\n{}: {}", link.address, if link.up { LINKED } else { UNLINKED }));
    }
    let is_link = |host: &&Host| host.address.parse().is_ok_and(|address| report.link(address).is_some());
    for host in report.hosts.known.iter().filter(|host| !is_link(host)) {
        text.push_str(&format!("\n{}: {ANOTHER_CAPABLE}, number {}", host.address, host.number));
    }
    for p in off(report) {
        text.push_str(&format!("\nswitched off: {} (\"{}\")", p.pid, p.comm));
    }
    text
}

/// Processes that an operator has switched off.
fn off(report: &Report) -> impl Iterator<Item = &Process> {
    report.processes.iter().filter(|p| p.off)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> Report {
        let process = Process { pid: 12, comm: "nginx".to_owned(), ..Default::default() };
        let listener = Listener { id: 1, local: "127.0.0.1:80".to_owned(), pids: vec![12], ..Default::default() };
        let connection = Connection {
            state: "ESTAB".to_owned(),
            recv_q: 5,
            local: "127.0.0.1:80".to_owned(),
            peer: "127.0.0.1:41000".to_owned(),
            pids: vec![12],
            path: "shm".to_owned(),
            ..Default::default()
        };
        Report {
            processes: vec![process],
            listeners: vec![listener],
            connections: vec![connection],
            ..Default::default()
        }
    }

    #[test]
    fn it_has_the_columns_of_ss() {
        let mut places = Places::default();
        places.of.insert(12, ("blue".into(), Some("0123456789ab".into())));
        let text = text(&example(), &mut places);
        let lines: Vec<Vec<&str>> = text.lines().map(|l| l.split_whitespace().collect()).collect();
        assert_eq!(lines[1][..5], ["LISTEN", "0", "0", "127.0.0.1:80", "0.0.0.0:*"]);
        assert_eq!(lines[2][..5], ["ESTAB", "5", "0", "127.0.0.1:80", "127.0.0.1:41000"]);
        assert_eq!(lines[2][7..], ["blue", "0123456789ab", "users:((\"nginx\",pid=12))"]);
    }

    #[test]
    fn capable_hosts_are_named() {
        let mut report = example();
        let host = fsocket_proto::report::Host { address: "10.9.1.2".into(), number: 7 };
        report.hosts.known.push(host);
        assert!(report.hosts.knows("::ffff:10.9.1.2".parse().unwrap()));
        assert!(!report.hosts.knows("10.9.1.3".parse().unwrap()));
        let said = text(&report, &mut Places::default());
        assert!(said.ends_with("\n10.9.1.2: another host, capable (kernel TCP: no RDMA), number 7"), "{said}");
        for (up, what) in [(true, LINKED), (false, UNLINKED)] {
            report.links = vec![fsocket_proto::report::Link { address: "10.9.1.2".into(), up }];
            assert_eq!(report.link("::ffff:10.9.1.2".parse().unwrap()), Some(up));
            let said = text(&report, &mut Places::default());
            assert!(said.ends_with(&format!("\n10.9.1.2: {what}")), "{said}");
        }
    }

    #[test]
    fn the_path_names_what_is_between() {
        let of = |by_agents, across_namespaces| {
            path(&Connection { path: "shm".into(), by_agents, across_namespaces, ..Default::default() })
        };
        assert_eq!([of(false, false), of(false, true), of(true, false)], ["shm", "shm/netns", "shm/rdma"]);
    }

    #[test]
    fn filters() {
        let of = |change: fn(&mut Ss)| {
            let mut args = Ss::default();
            change(&mut args);
            let report = example();
            (args.wants_listener(&report.listeners[0]), args.wants_connection(&report.connections[0]))
        };
        assert_eq!(of(|_| ()), (true, true));
        assert_eq!(of(|a| a.port = vec![80]), (true, true));
        assert_eq!(of(|a| a.port = vec![41000]), (false, true));
        assert_eq!(of(|a| a.port = vec![8]), (false, false));
        assert_eq!(of(|a| a.pid = vec![1, 12]), (true, true));
        assert_eq!(of(|a| a.pid = vec![1]), (false, false));
        assert_eq!(of(|a| a.state = vec![LISTEN.into()]), (true, false));
        let both = |a: &mut Ss| (a.state, a.port) = (vec!["ESTAB".into()], vec![80]);
        assert_eq!(of(both), (false, true));
        assert_eq!(parse_state("established").as_deref(), Ok("ESTAB"));
        assert_eq!(parse_state("close_wait").as_deref(), Ok("CLOSE-WAIT"));
        assert!(parse_state("open").is_err());
    }
}
