//! Remarks on things that `tune` does not change: limits, connection tracking, offloads.

use super::change::Plan;
use crate::device::Device;
use crate::ethtool::{GRO, LRO, RXHASH, TSO};
use crate::machine::Machine;
use crate::setting::{Setting, Value};

/// A busy proxy needs two descriptors per connection.
const OPEN_FILES: u64 = 65536;
/// A burst of small packets overruns a receive ring with fewer descriptors than this.
const RING: u32 = 512;

pub fn add(machine: &Machine, device: &Device, plan: &mut Plan) {
    conntrack(machine, plan);
    limits(machine, plan);
    settings(machine, plan);
    ports(machine, plan);
    offloads(device, plan);
    rings(device, plan);
}

fn conntrack(machine: &Machine, plan: &mut Plan) {
    let Some(c) = machine.conntrack else {
        plan.found("conntrack", "not there");
        return;
    };
    plan.found("conntrack", format!("{} of {} entries", c.count, c.max));
    if c.count == 0 {
        return;
    }
    // Every short connection holds an entry until its TIME_WAIT ends.
    let rate = c.max / c.time_wait.max(1);
    plan.warn(
        "conntrack",
        format!(
            "it is in use: each packet pays for it, and {} entries kept {} s after closing allow {rate} connections \
             a second at most; exempt the service (`notrack`) or raise net.netfilter.nf_conntrack_max",
            c.max, c.time_wait
        ),
    );
}

fn limits(machine: &Machine, plan: &mut Plan) {
    let l = machine.limits;
    let show = |n: Option<u64>| n.map_or("unlimited".to_owned(), |n| n.to_string());
    plan.found(
        "open files",
        format!("{} here ({} hard), {} in all", show(l.nofile), show(l.nofile_hard), show(l.file_max)),
    );
    if l.nofile_hard.is_some_and(|n| n < OPEN_FILES) || l.nofile.is_some_and(|n| n <= 1024) {
        plan.warn(
            "open files",
            format!(
                "a process started from here may have {} open; a busy server wants {OPEN_FILES}: \
                 `ulimit -n`, or LimitNOFILE= in its unit",
                show(l.nofile)
            ),
        );
    }
    if l.nr_open.is_some_and(|n| n < OPEN_FILES) {
        plan.warn("open files", format!("fs.nr_open is {}: no limit can be raised above it", show(l.nr_open)));
    }
}

/// Warns about settings that `tune` does not change, if their values are bad.
fn settings(machine: &Machine, plan: &mut Plan) {
    if machine.sysctl_number("net.ipv4.tcp_timestamps") == Some(0) {
        plan.warn("sysctl", "net.ipv4.tcp_timestamps is 0: tcp_tw_reuse has no effect");
    }
    if machine.sysctl_number("net.ipv4.tcp_abort_on_overflow") == Some(1) {
        plan.warn("sysctl", "net.ipv4.tcp_abort_on_overflow is 1: a full accept queue resets clients");
    }
    if let Some(n) = machine.sysctl_number("net.ipv4.tcp_fin_timeout") {
        plan.found("sysctl", format!("net.ipv4.tcp_fin_timeout {n} s; it does not shorten TIME_WAIT, left"));
    }
    if let Some(n @ 1..) = machine.sysctl_number("net.core.rps_sock_flow_entries") {
        plan.found("rfs", format!("net.core.rps_sock_flow_entries {n}; left"));
    }
}

/// Warns about listening ports within the new range of local ports. A listener keeps its port, but
/// after a restart another socket may have it.
fn ports(machine: &Machine, plan: &mut Plan) {
    let name = "net.ipv4.ip_local_port_range";
    let Some(change) = plan.find(&Setting::Sysctl(name.to_owned())) else { return };
    let (Value::Text(old), Value::Text(new)) = (&change.old, &change.new) else { return };
    let within = |range: &str, port: u16| {
        let mut ends = range.split_whitespace().filter_map(|p| p.parse::<u16>().ok());
        ends.next().zip(ends.next()).is_some_and(|(low, high)| (low..=high).contains(&port))
    };
    let reserved = machine.sysctls.get("net.ipv4.ip_local_reserved_ports");
    let reserved = reserved.and_then(|t| crate::cpus::CpuSet::parse_list(t).ok()).unwrap_or_default();
    let taken: Vec<String> = machine
        .listening
        .iter()
        .filter(|&&port| within(new, port) && !within(old, port) && !reserved.contains(port.into()))
        .map(|port| port.to_string())
        .collect();
    if !taken.is_empty() {
        plan.warn(
            "ports",
            format!(
                "a program listens on {}, in the wider range for active connections: add to \
                 net.ipv4.ip_local_reserved_ports, or a restart may find the port taken",
                taken.join(",")
            ),
        );
    }
}

fn offloads(device: &Device, plan: &mut Plan) {
    let state = |name| device.feature(name).map(|f| f.on);
    let words: Vec<String> = [("GRO", GRO), ("LRO", LRO), ("TSO", TSO), ("receive hash", RXHASH)]
        .iter()
        .filter_map(|(word, name)| Some(format!("{word} {}", if state(name)? { "on" } else { "off" })))
        .collect();
    if !words.is_empty() {
        plan.found("offloads", words.join(", "));
    }
    if !device.physical {
        return;
    }
    for (word, name) in [("GRO", GRO), ("TSO", TSO)] {
        if state(name) == Some(false) {
            plan.warn("offloads", format!("{word} is off: larger responses cost more packets (ethtool -K)"));
        }
    }
    if state(LRO) == Some(true) {
        plan.warn("offloads", "LRO is on: unsuitable if this host forwards packets; GRO does the same safely");
    }
}

fn rings(device: &Device, plan: &mut Plan) {
    let Some(r) = device.rings else {
        plan.lacks("rings", "their sizes cannot be read");
        return;
    };
    plan.found("rings", format!("rx {} of {}, tx {} of {}", r.rx, r.max_rx, r.tx, r.max_tx));
    if r.rx < RING && r.max_rx > r.rx {
        plan.warn(
            "rings",
            format!("receive rings of {} may overflow in a burst; {} possible (ethtool -G)", r.rx, r.max_rx),
        );
    }
}
