//! Runs one repetition of a shape, and measures it.

use super::plan::{Extra, Shape};
use super::row::Sample;
use super::way::Way;
use crate::accel::Accel;
use crate::child::Child;
use crate::ends::{Clients, Done};
use crate::hogs::Hogs;
use crate::step::READY_LIMIT;
use anyhow::{Context, Result};
use clap::ValueEnum;
use fsocket_bench_args::Role;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Parameters that all measurements share.
pub struct Setting {
    pub own: PathBuf,
    pub secs: f64,
    /// Turns of [`ends::work`] per microsecond.
    pub per_us: f64,
    pub cpus: [usize; 2],
}

/// Measures one repetition of a shape.
pub fn measure(shape: &Shape, way: &Way, setting: &Setting) -> Result<Sample> {
    let secs = setting.secs;
    let _hogs = (shape.extra == Extra::Hogs).then(|| Hogs::start(&setting.cpus, 1));
    let cpus = if shape.extra == Extra::Pinned { setting.cpus.map(Some) } else { [None; 2] };
    let before = way.accel.as_ref().map(|a| a.report()).transpose()?;
    let command = |role: Role, kind: Option<clap::builder::PossibleValue>, work: u64| {
        let mut c = Command::new(&setting.own);
        way.environment(role, &mut c);
        let number = |n: usize| n.to_string();
        let role = if role == Role::Server { "--server" } else { "--clients" };
        c.args(["end", role, kind.as_ref().map_or("", |k| k.get_name())]);
        c.args(["--work", &((work as f64 * setting.per_us) as u64).to_string(), "--secs", &secs.to_string()]);
        c.args(["--request", &number(shape.request()), "--answer", &number(shape.size)]);
        match shape.extra {
            Extra::Pipeline(n) => drop(c.args(["--pipeline", &number(n)])),
            Extra::Think(us) => drop(c.args(["--think", &us.to_string()])),
            Extra::Short => drop(c.arg("--short")),
            Extra::Nothing | Extra::Hogs | Extra::Pinned => {}
        }
        c.stdin(Stdio::piped());
        c
    };
    let mut server = Child::spawn(command(Role::Server, shape.server.to_possible_value(), shape.work[0]), cpus[0])?;
    let port = server.line(READY_LIMIT)?;
    let (processes, each) = match shape.clients {
        Clients::Processes => (shape.conns, 1),
        _ => (1, shape.conns),
    };
    let mut clients = Vec::new();
    for _ in 0..processes {
        let mut c = command(Role::Client, shape.clients.to_possible_value(), shape.work[1]);
        c.args(["--port", &port, "--conns", &each.to_string()]);
        clients.push(Child::spawn(c, cpus[1])?);
    }
    for c in &mut clients {
        c.line(READY_LIMIT)?;
    }
    let mut groups: Vec<u32> = clients.iter().map(Child::pid).chain([server.pid()]).collect();
    groups.extend(way.accel.as_deref().map(Accel::monitor_pid));
    let used = cpu_time(&groups)?;
    let started = Instant::now();
    for c in &mut clients {
        c.poke()?;
    }
    let limit = Duration::from_secs_f64(secs) + READY_LIMIT;
    let mut done = Done::default();
    for c in &mut clients {
        done.add(&serde_json::from_str(&c.line(limit)?).context("a client says something else")?);
    }
    let took = started.elapsed().as_secs_f64().max(secs);
    // All processes are still there: they wait for the end of their input.
    let used = cpu_time(&groups)? - used;
    let zoned = before.map(|before| way.check(&before.totals)).transpose()?.unwrap_or_default();
    Ok(Sample {
        zoned,
        rate: done.requests as f64 / took,
        cpu_us: used * 1e6 / done.requests.max(1) as f64,
        p50_us: done.quantile(0.5) / 1e3,
        p99_us: done.quantile(0.99) / 1e3,
    })
}

/// CPU time of all threads of all processes in these process groups, in seconds.
fn cpu_time(groups: &[u32]) -> Result<f64> {
    let mut ns = 0u64;
    for entry in std::fs::read_dir("/proc")?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse::<u32>().ok()) else { continue };
        // The process may have ended meanwhile.
        let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { continue };
        let group = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(2)?.parse().ok());
        if !group.is_some_and(|g: u32| groups.contains(&g)) {
            continue;
        }
        let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { continue };
        for task in tasks.flatten() {
            let text = std::fs::read_to_string(task.path().join("schedstat")).unwrap_or_default();
            ns += text.split(' ').next().and_then(|n| n.parse::<u64>().ok()).unwrap_or(0);
        }
    }
    Ok(ns as f64 / 1e9)
}
