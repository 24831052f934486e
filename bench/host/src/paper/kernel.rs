//! Rows of costs inside the kernel: finding a listen socket, contended locks, the use of each CPU.

use super::experiment::{Claim, Experiment, Measure};
use super::web;
use crate::child::Child;
use crate::scenario::Unit;
use crate::step::{Step, Values, READY_LIMIT};
use anyhow::{anyhow, Context, Result};
use fsocket_bench_args::{Paper as Args, Path};
use fsocket_client::locate;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Stock, local listen sockets in kernel TCP, and stock again.
const ZONES: &[Path] = &[Path::Stock, Path::KernelServer, Path::Control];

/// Fastsocket, section 2.1.
pub fn listen_lookup(_: &Args) -> Vec<Experiment> {
    let program = select_cost();
    let skip = match &program {
        None => Some("cargo build --release -p fsocket-bpf --example select_cost builds what it needs".to_owned()),
        Some(_) if !rustix::process::geteuid().is_root() => Some("loading the BPF program needs root".to_owned()),
        Some(_) => None,
    };
    let row = |n: u32| {
        let program = program.clone().unwrap_or_default();
        let run = move |step: &Step| {
            let mut command = Command::new(&program);
            command.arg(n.to_string()).arg(if step.path == Path::KernelServer { "ours" } else { "stock" });
            command.stdin(Stdio::null());
            let output = Child::spawn(command, None)?.finish(Duration::from_secs(30))?;
            Ok(Values::from([("connection", output.trim().parse::<f64>()? * 1e3)]))
        };
        Experiment::new(format!("{n} listen sockets,"), run)
            .ways(ZONES)
            .not_counted()
            .skip(skip.clone())
            .at("listen sockets", f64::from(n))
            .measures([Measure::lower("connection", "a connection", Unit::Nanoseconds)])
    };
    [1, 8, 64, 256, 512].map(row).into()
}

/// Path of the program, if cargo has built it.
fn select_cost() -> Option<PathBuf> {
    let own = std::env::current_exe().ok()?;
    Some(own.parent()?.join("examples/select_cost")).filter(|p| p.is_file())
}

/// Fastsocket, table 1. Current kernels no longer have some of the table's locks.
pub fn locks(_: &Args) -> Vec<Experiment> {
    let is_root = rustix::process::geteuid().is_root();
    let skip = (!is_root).then(|| "counting the kernel's locks needs root".to_owned());
    let row = |key, label| Measure::lower(key, label, Unit::Count).may_be_zero();
    let run = |step: &Step| web::haproxy_under_load(step, || contentions(step));
    vec![Experiment::new("contentions per 1,000 connections,", run)
        .ways(&[Path::Stock, Path::KernelServer, Path::Ours, Path::Control])
        .programs(&["nginx", "haproxy", "wrk"])
        .skip(skip)
        .measures([row("ep.lock", "ep.lock"), row("all", "all locks but the scheduler's")])]
}

/// Lock contentions of the whole machine per second, and the nanoseconds of waiting for them per second, from
/// `fastsocket stat --locks`.
fn contentions(step: &Step) -> Result<Values> {
    let program = locate::program("fastsocket").map_err(|e| anyhow!(e))?;
    let mut command = Command::new(program);
    crate::accel::clean_environment(&mut command);
    let seconds = if step.context.quick { "0.4" } else { "0.8" };
    command.args(["stat", "--locks", seconds, "--json"]).stdin(Stdio::null()).stderr(Stdio::null());
    let output = Child::spawn(command, None)?.finish(READY_LIMIT * 2)?;
    let report: serde_json::Value = serde_json::from_str(&output)?;
    let seconds = report["seconds"].as_f64().context("no seconds")?;
    let sites = report["contention"].as_array().context("no contention")?;
    let sum = |wanted: &dyn Fn(&str) -> bool| {
        let of = sites.iter().filter(|site| wanted(site["lock"].as_str().unwrap_or_default()));
        of.filter_map(|site| site["contentions"].as_f64()).sum::<f64>() / seconds
    };
    let waited = sites.iter().filter(|site| site["lock"] != "rq.lock").filter_map(|site| site["wait_ns"].as_f64());
    Ok(Values::from([
        ("ep.lock", sum(&|lock| lock == "ep.lock")),
        ("all", sum(&|lock| lock != "rq.lock")),
        ("waited", waited.sum::<f64>() / seconds),
    ]))
}

/// Affinity-Accept, table 2.
pub fn request(_: &Args) -> Vec<Experiment> {
    let is_root = rustix::process::geteuid().is_root();
    let skip = (!is_root).then(|| "counting the kernel's locks needs root".to_owned());
    let claim = Claim::Values { linux: 590e3, system: 144e3, source: "table 2" };
    let spin = Claim::Value { system: 0.0, source: "Affinity-Accept; Linux 82 us, table 2" };
    vec![Experiment::new("nginx, a connection each:", |step| web::nginx_under_load(step, || contentions(step)))
        .ways(&[Path::Stock, Path::KernelServer, Path::Ours, Path::Control])
        .programs(&["nginx", "wrk"])
        .skip(skip)
        .measures([
            Measure::lower("request", "time of a request and core", Unit::Nanoseconds).claims(claim),
            Measure::lower("waited", "waiting for locks", Unit::Nanoseconds).claims(spin).may_be_zero(),
        ])]
}

/// Fastsocket, figure 3.
pub fn cores(_: &Args) -> Vec<Experiment> {
    let row = |key, label| Measure::lower(key, label, Unit::Percent);
    let run = |step: &Step| web::haproxy_at_a_rate(step, busy);
    vec![Experiment::new("haproxy at a fixed rate,", run)
        .limit(web::one_process())
        .ways(&[Path::Stock, Path::KernelServer, Path::Ours, Path::Control])
        .programs(&["nginx", "haproxy", "wrk"])
        .measures([row("mean", "mean use of a CPU"), row("most", "use of the busiest CPU")])]
}

/// Percent of one second for which the CPUs are busy: the mean, and the busiest CPU.
fn busy() -> Result<Values> {
    let before = cpu_times()?;
    std::thread::sleep(Duration::from_secs(1));
    let after = cpu_times()?;
    let of = |(before, after): (&[f64; 2], &[f64; 2])| {
        let (busy, all) = (after[0] - before[0], after[1] - before[1]);
        100.0 * busy / all.max(1.0)
    };
    let shares: Vec<f64> = before.iter().zip(&after).map(of).collect();
    let most = shares.iter().copied().fold(0.0, f64::max);
    Ok(Values::from([("mean", shares.iter().sum::<f64>() / shares.len() as f64), ("most", most)]))
}

/// For each CPU, the number of ticks for which it was busy, and the number of all ticks.
fn cpu_times() -> Result<Vec<[f64; 2]>> {
    let text = std::fs::read_to_string("/proc/stat")?;
    let cpu = |line: &str| {
        let fields: Vec<f64> = line.split_whitespace().skip(1).filter_map(|f| f.parse().ok()).collect();
        let all: f64 = fields.iter().take(8).sum();
        // Fields 4 and 5: idle, and idle while waiting for I/O.
        let idle: f64 = fields.iter().skip(3).take(2).sum();
        [all - idle, all]
    };
    let is_cpu =
        |line: &&str| line.strip_prefix("cpu").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
    let all: Vec<_> = text.lines().filter(is_cpu).map(cpu).collect();
    anyhow::ensure!(!all.is_empty(), "no CPU in /proc/stat");
    Ok(all)
}
