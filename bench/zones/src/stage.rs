//! Fresh hosts (network namespaces) for one measurement, and the library's counters during it.

use crate::Setting;
use anyhow::{anyhow, ensure, Result};
use fsocket_testkit::netns::Chain;
use fsocket_testkit::servers::{self, Way};
use fsocket_testkit::{Host, Snapshot};
use serde_json::{json, Value};
use std::net::SocketAddr;

pub const PORT: u16 = 80;

/// The hosts of one measurement: clients, server or proxy (`middle`), and backend. Fields are dropped in order: the
/// servers' directories before the namespaces.
pub struct Stage {
    pub middle: Host,
    pub backend: Host,
    before: Snapshot,
    pub chain: Chain,
}

impl Stage {
    pub fn new(setting: &Setting, way: Way) -> Result<Stage> {
        let chain = Chain::new(setting.cpus, &setting.receive).map_err(|e| anyhow!(e))?;
        let middle = if way.is_ours() { Host::on(&chain.middle) } else { Host::without_monitor(&chain.middle) };
        if way == Way::Steered {
            servers::steer(&middle, &chain.middle.interfaces[1].device);
        }
        let backend = Host::without_monitor(&chain.backend);
        let before = if way.is_ours() { middle.snapshot() } else { Snapshot::default() };
        Ok(Stage { middle, backend, before, chain })
    }

    /// The address that clients connect to.
    pub fn front(&self) -> SocketAddr {
        (self.chain.middle_front(), PORT).into()
    }

    /// The address that the middle host connects to.
    pub fn back(&self) -> SocketAddr {
        (self.chain.backend_address(), PORT).into()
    }

    /// Counters of the middle host's kernel: connections and handshakes that it dropped, refused or moved. Counters
    /// that are 0 are left out.
    pub fn kernel_counts(&self) -> Value {
        const NAMES: [&str; 6] = [
            "ListenOverflows",
            "ListenDrops",
            "TCPReqQFullDrop",
            "TCPMigrateReqSuccess",
            "TCPMigrateReqFailure",
            "TCPTimeouts",
        ];
        let text = self.chain.middle.within(|| std::fs::read_to_string("/proc/thread-self/net/netstat"));
        let text = text.unwrap_or_default();
        let mut lines = text.lines().filter(|line| line.starts_with("TcpExt:"));
        let (Some(names), Some(values)) = (lines.next(), lines.next()) else { return Value::Null };
        let pairs = names.split_whitespace().zip(values.split_whitespace());
        let found = pairs.filter(|(name, value)| NAMES.contains(name) && *value != "0");
        Value::Object(found.map(|(name, value)| (name.to_owned(), json!(value.parse::<u64>().ok()))).collect())
    }

    /// For ways with the library: the counters that changed. An error if zones had no effect, because then stock
    /// sockets were measured.
    pub fn proof(&self, way: Way) -> Result<Value> {
        if !way.is_ours() {
            return Ok(Value::Null);
        }
        let delta = self.middle.snapshot().since(&self.before);
        let counters: serde_json::Map<String, Value> =
            delta.changed().into_iter().map(|(name, value)| (name.to_owned(), json!(value as i64))).collect();
        ensure!(delta.get("accept_local") > 0, "NOT OURS: no connection came from a local listen socket: {counters:?}");
        let sliced = delta.get("connect_slice");
        ensure!(
            way != Way::Steered || sliced > 0,
            "NOT STEERED: no connection took its port from a slice: {counters:?}"
        );
        Ok(Value::Object(counters))
    }
}
