//! The scenarios, and the goal of each.

use crate::worker::Op;
use fsocket_bench_args::Path;
use serde::Serialize;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Layout {
    TwoCpus,
    SameCpu,
}

impl Layout {
    pub fn name(self) -> &'static str {
        match self {
            Layout::TwoCpus => "two-cpus",
            Layout::SameCpu => "same-cpu",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Better {
    Higher,
    Lower,
}

/// The goal of a measure. A factor says how many times better ours must be, for rates and for latencies: Queue(0.4)
/// requires 0.4 times the queue's rate, and Queue(1.0 / 1.5) at most 1.5 times its latency.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Bar {
    Stock(f64),
    Queue(f64),
    /// At most this much more than stock.
    StockPlus(f64),
    AtMost(f64),
}

#[derive(Debug, Clone)]
pub struct Metric {
    /// Key in the result of a run.
    pub key: &'static str,
    /// Suffix of the measure's name; may be empty.
    pub label: &'static str,
    pub unit: Unit,
    pub better: Better,
    /// Goals on two CPUs. On one CPU every measure must be no worse than stock.
    pub bars: Vec<Bar>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Unit {
    #[serde(rename = "ns")]
    Nanoseconds,
    #[serde(rename = "1/s")]
    PerSecond,
    #[serde(rename = "B/s")]
    BytesPerSecond,
    #[serde(rename = "s")]
    Seconds,
    #[serde(rename = "ms CPU")]
    CpuMilliseconds,
    #[serde(rename = "us CPU")]
    CpuMicroseconds,
    #[serde(rename = "B")]
    Bytes,
    #[serde(rename = "%")]
    Percent,
    #[serde(rename = "1")]
    Count,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Job {
    Micro { op: Op, size: usize },
    Redis { clients: u32 },
    NginxKeepAlive,
    NginxClose,
    NginxAb,
    Haproxy,
    CurlLoop,
    TrueLoop,
    IdleCpu,
    IdleMemory,
}

#[derive(Debug, Clone)]
pub struct Scenario {
    pub name: String,
    pub job: Job,
    pub paths: Vec<Path>,
    pub layouts: Vec<Layout>,
    pub metrics: Vec<Metric>,
    /// Maximum number of repetitions. Long scenarios are repeated less often.
    pub max_reps: usize,
    /// Programs that must be installed.
    pub programs: &'static [&'static str],
}

fn metric(key: &'static str, label: &'static str, unit: Unit, better: Better, bars: &[Bar]) -> Metric {
    Metric { key, label, unit, better, bars: bars.to_vec() }
}

/// User and system CPU time of all processes per operation. It has no bar, because a thread that spins uses more
/// CPU time and answers sooner.
fn cpu() -> Metric {
    metric("cpu_op", "CPU", Unit::CpuMicroseconds, Better::Lower, &[])
}

fn micro(name: String, op: Op, size: usize, mut metrics: Vec<Metric>) -> Scenario {
    metrics.push(cpu());
    let mut paths = Path::ALL.to_vec();
    if matches!(op, Op::Conn | Op::Turns | Op::TurnsRate) {
        // The queue has no connections, and only one thread at each end.
        paths.retain(|p| *p != Path::Queue);
    }
    let layouts = vec![Layout::TwoCpus, Layout::SameCpu];
    Scenario { name, job: Job::Micro { op, size }, paths, layouts, metrics, max_reps: usize::MAX, programs: &[] }
}

fn app(name: &str, job: Job, mut metrics: Vec<Metric>, programs: &'static [&'static str]) -> Scenario {
    let mut paths = vec![Path::Stock, Path::Ours];
    if !matches!(job, Job::TrueLoop | Job::IdleCpu | Job::IdleMemory) {
        paths.extend(Path::BESIDE);
        metrics.push(cpu());
    }
    let layouts = vec![Layout::TwoCpus, Layout::SameCpu];
    Scenario { name: name.to_owned(), job, paths, layouts, metrics, max_reps: usize::MAX, programs }
}

pub fn size_name(size: usize) -> String {
    match size {
        s if s >= 1 << 20 => format!("{}M", s >> 20),
        s if s >= 1 << 10 => format!("{}K", s >> 10),
        s => s.to_string(),
    }
}

/// All scenarios, in the order in which they are measured.
pub fn all() -> Vec<Scenario> {
    use Bar::*;
    use Better::*;
    use Unit::*;
    let mut list = Vec::new();
    for size in [8, 64, 1 << 10, 16 << 10, 64 << 10, 1 << 20] {
        let bars: &[Bar] = if size == 8 { &[Stock(35.0), Queue(1.0 / 1.5)] } else { &[] };
        let metrics =
            vec![metric("p50", "p50", Nanoseconds, Lower, bars), metric("p99", "p99", Nanoseconds, Lower, &[])];
        list.push(micro(format!("rtt-{}", size_name(size)), Op::Rtt, size, metrics));
    }
    for size in [8, 64, 1 << 10] {
        let bars: &[Bar] = if size == 8 { &[Stock(20.0), Queue(0.4)] } else { &[] };
        let rate = |bars| vec![metric("rate", "", PerSecond, Higher, bars)];
        list.push(micro(format!("rate-{}", size_name(size)), Op::Rate, size, rate(bars)));
        list.push(micro(format!("rate-exact-{}", size_name(size)), Op::RateExact, size, rate(&[])));
    }
    for size in [64 << 10, 1 << 20] {
        let bars: &[Bar] = if size == 1 << 20 { &[Stock(4.0)] } else { &[] };
        let metrics = vec![metric("bytes", "", BytesPerSecond, Higher, bars)];
        list.push(micro(format!("bulk-{}", size_name(size)), Op::Rate, size, metrics));
    }
    let rate = |bars: &[Bar]| vec![metric("rate", "", PerSecond, Higher, bars)];
    list.push(micro("conn".to_owned(), Op::Conn, 64, rate(&[Stock(20.0)])));
    list.push(micro("turns-8".to_owned(), Op::Turns, 8, rate(&[Stock(3.0)])));
    list.push(micro("turns-rate-8".to_owned(), Op::TurnsRate, 8, rate(&[Stock(3.0)])));

    const REDIS: &[&str] = &["redis-server", "redis-benchmark"];
    for (clients, factor) in [(1, 3.0), (50, 1.8)] {
        let metrics = vec![
            metric("get", "GET", PerSecond, Higher, &[Stock(factor)]),
            metric("set", "SET", PerSecond, Higher, &[]),
        ];
        list.push(app(&format!("redis-{clients}"), Job::Redis { clients }, metrics, REDIS));
    }
    list.push(app("nginx-keepalive", Job::NginxKeepAlive, rate(&[]), &["nginx", "wrk"]));
    list.push(app("nginx-close-wrk", Job::NginxClose, rate(&[Stock(3.0)]), &["nginx", "wrk"]));
    list.push(app("nginx-close-ab", Job::NginxAb, rate(&[Stock(3.0)]), &["nginx", "ab"]));
    list.push(app("haproxy-nginx", Job::Haproxy, rate(&[]), &["haproxy", "nginx", "wrk"]));
    let wall = vec![metric("seconds", "", Seconds, Lower, &[Stock(1.0 / 1.1)])];
    list.push(app("curl-loop", Job::CurlLoop, wall, &["nginx", "curl"]));
    let wall = vec![metric("seconds", "", Seconds, Lower, &[Stock(1.0 / 1.1)])];
    list.push(app("true-loop", Job::TrueLoop, wall, &[]));

    let cpu = vec![metric("cpu", "", CpuMilliseconds, Lower, &[StockPlus(10.0)])];
    let mut idle = app("idle-cpu", Job::IdleCpu, cpu, &["nginx", "redis-server"]);
    idle.max_reps = 1;
    let memory = vec![metric("bytes", "", Bytes, Lower, &[AtMost(16384.0)])];
    let mut open = app("idle-connection", Job::IdleMemory, memory, &[]);
    open.max_reps = 1;
    // Only ours is measured, because the kernel's memory for a connection does not show in any process.
    open.paths = vec![Path::Ours];
    for mut one in [idle, open] {
        one.layouts = vec![Layout::TwoCpus];
        list.push(one);
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_every_path_is_compared_with_stock() {
        let mut names: Vec<String> = all().into_iter().map(|s| s.name).collect();
        names.sort();
        let count = names.len();
        names.dedup();
        assert_eq!(names.len(), count);
        for scenario in all().iter().filter(|s| s.job != Job::IdleMemory) {
            assert!(scenario.paths.contains(&Path::Stock) && scenario.paths.contains(&Path::Ours), "{}", scenario.name);
        }
    }

    #[test]
    fn bars_against_the_queue_have_a_queue() {
        for scenario in all() {
            let against_queue = |m: &Metric| m.bars.iter().any(|bar| matches!(bar, Bar::Queue(_)));
            assert!(!scenario.metrics.iter().any(against_queue) || scenario.paths.contains(&Path::Queue));
        }
    }
}
