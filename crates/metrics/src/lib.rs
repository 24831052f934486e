//! A report of the monitor as metrics, in the text format of OpenMetrics, which Prometheus and the
//! textfile collector of its node exporter read. docs/metrics.md lists them.
//!
//! Series are summed by their labels: two listeners may have one address (in two network namespaces),
//! and a scrape with a series twice is refused as a whole.

use fsocket_abi::arena::COUNTERS;
use fsocket_proto::report::Report;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;
use std::collections::BTreeMap;
use std::fmt;

/// Media type of [`text`].
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Series of one name: labels to value.
type Series = BTreeMap<Vec<(&'static str, String)>, u64>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Counter,
    Gauge,
}

/// One name, and what has it.
#[derive(Debug)]
struct Metric {
    name: &'static str,
    help: &'static str,
    kind: Kind,
    series: Series,
}

/// Counters that have a metric with a name of its own; the others are `events`.
const CONNECTIONS: [(&str, [&str; 2]); 4] = [
    ("connect_shm", ["shm", "client"]),
    ("connect_kernel", ["kernel", "client"]),
    ("accept_shm", ["shm", "server"]),
    ("accept_kernel", ["kernel", "server"]),
];
const BYTES: [(&str, &str); 2] = [("tx_bytes", "sent"), ("rx_bytes", "received")];
const SWITCHES: [(&str, &str); 2] = [("path_switch", "kernel"), ("path_upgrade", "shm")];
const HOSTILE: &str = "hostile_peer";
const FALLBACK: &str = "fallback.";

/// The metrics of a report; `None`: no monitor answers.
pub fn text(report: Option<&Report>) -> String {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(All(collect(report))));
    let mut text = String::new();
    // (A String takes everything.)
    let _ = encode(&mut text, &registry);
    text
}

#[derive(Debug)]
struct All(Vec<Metric>);

impl Collector for All {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), fmt::Error> {
        for metric in &self.0 {
            let kind = match metric.kind {
                Kind::Counter => ConstCounter::new(0u64).metric_type(),
                Kind::Gauge => ConstGauge::new(0u64).metric_type(),
            };
            let mut of_name = encoder.encode_descriptor(metric.name, metric.help, None, kind)?;
            for (labels, value) in &metric.series {
                let one = of_name.encode_family(labels)?;
                match metric.kind {
                    Kind::Counter => ConstCounter::new(*value).encode(one)?,
                    Kind::Gauge => ConstGauge::new(i64::try_from(*value).unwrap_or(i64::MAX)).encode(one)?,
                }
            }
        }
        Ok(())
    }
}

/// Collects one metric.
struct Lines(Metric);

fn lines(kind: Kind, name: &'static str, help: &'static str) -> Lines {
    Lines(Metric { name, help, kind, series: Series::new() })
}

impl Lines {
    fn add<const N: usize>(&mut self, labels: [(&'static str, &str); N], value: u64) {
        let labels = labels.map(|(name, value)| (name, value.to_owned())).to_vec();
        let sum = self.0.series.entry(labels).or_default();
        // (Values are written by programs; a sum of them must not wrap.)
        *sum = sum.saturating_add(value);
    }

    fn one(mut self, value: u64) -> Metric {
        self.add([], value);
        self.0
    }
}

fn collect(report: Option<&Report>) -> Vec<Metric> {
    let up = lines(Kind::Gauge, "fastsocket_up", "1: the monitor answers").one(report.is_some().into());
    let mut all = vec![up];
    if let Some(report) = report {
        all.extend(state(report));
        all.extend(counters(report));
        all.extend(listeners(report));
        all.extend(zones(report));
    }
    all
}

fn state(report: &Report) -> Vec<Metric> {
    let gauge = |name, help, value: u64| lines(Kind::Gauge, name, help).one(value);
    let mut build = lines(Kind::Gauge, "fastsocket_build_info", "Version of the monitor and of its shared memory");
    build.add([("version", &report.monitor_version), ("abi", &fsocket_abi::VERSION.to_string())], 1);
    let open = report.channels.iter().map(|c| u64::from(c.connections)).sum();
    let resident = report.channels.iter().fold(0u64, |sum, c| sum.saturating_add(c.resident));
    let mut turns = lines(Kind::Counter, "fastsocket_loop_turns", "Turns of the monitor's event loop, by their length");
    for (power, n) in report.event_loop.turns.iter().enumerate() {
        turns.add([("microseconds", &(1u64 << power.min(63)).to_string())], *n);
    }
    let longest = report.event_loop.longest_us;
    vec![
        build.0,
        turns.0,
        gauge("fastsocket_loop_longest_microseconds", "Longest turn of the monitor's event loop", longest),
        gauge("fastsocket_uptime_seconds", "Since the monitor started", report.uptime as u64),
        gauge("fastsocket_processes", "Processes that are known to the monitor", report.processes.len() as u64),
        gauge("fastsocket_listeners", "Listening sockets that are known to the monitor", report.listeners.len() as u64),
        gauge("fastsocket_open_connections", "Open connections over shared memory", open),
        gauge("fastsocket_channels", "Shared memory between a client and a listener", report.channels.len() as u64),
        gauge("fastsocket_resident_bytes", "Memory behind all channels", resident),
    ]
}

fn counters(report: &Report) -> Vec<Metric> {
    let counter = |name, help| lines(Kind::Counter, name, help);
    let mut connections = counter("fastsocket_connections", "Connections, by path and role of the process");
    let mut bytes = counter("fastsocket_bytes", "Bytes over shared memory");
    let mut switches = counter("fastsocket_path_switches", "Connections that changed their path, by the new one");
    let mut hostile = counter("fastsocket_hostile_peers", "Connections reset because the peer broke the protocol");
    let mut fallbacks = counter("fastsocket_fallbacks", "Why the kernel was used (docs/fallbacks.md)");
    let mut events = counter("fastsocket_events", "Other counters of the library");
    for name in COUNTERS {
        let value = report.totals.get(*name).copied().unwrap_or(0);
        if let Some((_, [path, role])) = CONNECTIONS.iter().find(|(n, _)| n == name) {
            connections.add([("path", path), ("role", role)], value);
        } else if let Some((_, direction)) = BYTES.iter().find(|(n, _)| n == name) {
            bytes.add([("direction", direction)], value);
        } else if let Some((_, to)) = SWITCHES.iter().find(|(n, _)| n == name) {
            switches.add([("to", to)], value);
        } else if *name == HOSTILE {
            hostile.add([], value);
        } else if let Some(reason) = name.strip_prefix(FALLBACK) {
            fallbacks.add([("reason", reason)], value);
        } else {
            events.add([("event", name)], value);
        }
    }
    vec![connections.0, bytes.0, switches.0, hostile.0, fallbacks.0, events.0]
}

fn listeners(report: &Report) -> Vec<Metric> {
    let mut opened =
        lines(Kind::Counter, "fastsocket_listener_connections", "Connections opened to a listener over shared memory");
    let mut open =
        lines(Kind::Gauge, "fastsocket_listener_open_connections", "Open connections to a listener over shared memory");
    let mut queued = lines(Kind::Gauge, "fastsocket_listener_queued", "Connections that wait to be accepted");
    for l in &report.listeners {
        opened.add([("listener", &l.local)], l.opened);
        queued.add([("listener", &l.local)], l.queued.into());
        open.add([("listener", &l.local)], 0);
        for channel in report.channels.iter().filter(|c| c.listener == l.id) {
            open.add([("listener", &l.local)], channel.connections.into());
        }
    }
    vec![opened.0, open.0, queued.0]
}

fn zones(report: &Report) -> Vec<Metric> {
    let mut accepted = lines(Kind::Counter, "fastsocket_zone_accepts", "Kernel connections accepted in a zone");
    for zone in &report.zones {
        for (from, n) in &zone.accepted {
            accepted.add([("cpu", &zone.cpu.to_string()), ("from", from)], *n);
        }
    }
    let mut workers = lines(Kind::Gauge, "fastsocket_zone_workers", "Local listen sockets");
    let mut waiting = lines(Kind::Gauge, "fastsocket_zone_queue_length", "Connections in the accept queues of a zone");
    let mut busy = lines(Kind::Gauge, "fastsocket_zone_busy", "Accept queues of a zone that are busy");
    for group in &report.groups {
        for worker in &group.workers {
            workers.add([("listener", &group.local), ("cpu", &worker.cpu.to_string())], 1);
        }
        for queue in group.balance.iter().flat_map(|b| &b.queues) {
            let cpu = queue.cpu.to_string();
            waiting.add([("listener", &group.local), ("cpu", &cpu)], queue.length.into());
            busy.add([("listener", &group.local), ("cpu", &cpu)], queue.busy.into());
        }
    }
    vec![accepted.0, workers.0, waiting.0, busy.0]
}

#[cfg(test)]
mod tests {
    use super::*;
    use fsocket_proto::report::{Channel, Counters, Listener, Zone};

    fn example() -> Report {
        let totals =
            [("connect_shm", 7), ("accept_kernel", 3), ("fallback.remote", 2), ("hostile_peer", 1), ("wakes", 9)];
        // Two listeners in two network namespaces.
        let listener =
            |id, opened| Listener { id, local: "0.0.0.0:80".into(), opened, queued: 1, ..Default::default() };
        let channel = |id, connections| Channel {
            id,
            listener: id.into(),
            connections,
            resident: 4096,
            client_pid: 1,
            by_agents: false,
        };
        Report {
            monitor_version: "1.2.3".into(),
            totals: Counters::from(totals.map(|(n, v)| (n.to_owned(), v))),
            listeners: vec![listener(1, 5), listener(2, 6)],
            channels: vec![channel(1, 2), channel(2, 1)],
            zones: vec![Zone { cpu: 3, accepted: Counters::from([("local".into(), 4)]) }],
            ..Default::default()
        }
    }

    #[test]
    fn everything_is_said_once() {
        let text = text(Some(&example()));
        for line in [
            "fastsocket_up 1",
            "fastsocket_build_info{version=\"1.2.3\",abi=",
            "fastsocket_connections_total{path=\"shm\",role=\"client\"} 7",
            "fastsocket_connections_total{path=\"kernel\",role=\"server\"} 3",
            "fastsocket_fallbacks_total{reason=\"remote\"} 2",
            "fastsocket_hostile_peers_total 1",
            "fastsocket_events_total{event=\"wakes\"} 9",
            "fastsocket_channels 2",
            "fastsocket_resident_bytes 8192",
            "fastsocket_open_connections 3",
            "fastsocket_listener_connections_total{listener=\"0.0.0.0:80\"} 11",
            "fastsocket_listener_open_connections{listener=\"0.0.0.0:80\"} 3",
            "fastsocket_zone_accepts_total{cpu=\"3\",from=\"local\"} 4",
        ] {
            assert!(text.lines().any(|l| l.starts_with(line)), "{line}: {text}");
        }
        assert!(text.ends_with("# EOF\n"));
        let mut series: Vec<&str> =
            text.lines().filter(|l| !l.starts_with('#')).filter_map(|l| l.rsplit_once(' ')).map(|(s, _)| s).collect();
        let all = series.len();
        series.sort_unstable();
        series.dedup();
        assert_eq!(series.len(), all, "a series is there twice: {text}");
    }

    /// No counter of the library is left out.
    #[test]
    fn every_counter_has_a_series() {
        let totals: Counters = COUNTERS.iter().map(|name| ((*name).to_owned(), 1_234_567)).collect();
        let text = text(Some(&Report { totals, ..Default::default() }));
        assert_eq!(text.matches(" 1234567\n").count(), COUNTERS.len());
    }

    #[test]
    fn without_a_monitor() {
        let text = text(None);
        assert!(text.contains("fastsocket_up 0\n") && !text.contains("fastsocket_channels"));
    }

    /// docs/metrics.md and the dashboard know these names, and no others.
    #[test]
    fn documents_name_what_there_is() {
        let names: Vec<String> = collect(Some(&example()))
            .iter()
            .map(|m| if m.kind == Kind::Counter { format!("{}_total", m.name) } else { m.name.to_owned() })
            .collect();
        let page = include_str!("../../../docs/metrics.md");
        let dashboard = include_str!("../../../packaging/grafana-dashboard.json");
        for name in &names {
            assert!(page.contains(&format!("| `{name}` |")), "docs/metrics.md lacks {name}");
        }
        for (file, text) in [("docs/metrics.md", page), ("the dashboard", dashboard)] {
            let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
            for word in words.filter(|w| w.starts_with("fastsocket_")) {
                assert!(names.iter().any(|n| n == word), "{file} names {word}, which does not exist");
            }
        }
    }
}
