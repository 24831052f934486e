//! The cost of an idle program.

use crate::apps;
use crate::child::Child;
use crate::step::{worker, NotAccelerated, Step, Values, READY_LIMIT};
use crate::worker::{Op, OPEN, READY};
use anyhow::{Context, Result};
use fsocket_bench_args::{Path, Role};
use std::fs;
use std::process::Stdio;
use std::time::Duration;

/// Time for which the idle programs are observed.
const WATCH: Duration = Duration::from_secs(10);
/// Number of connections held open. It is less than the capacity of one channel.
const CONNECTIONS: u64 = 1000;

/// CPU time in milliseconds that nginx, redis and (ours) the monitor use in ten idle seconds.
pub fn cpu(step: &Step) -> Result<Values> {
    let servers = [apps::nginx(step, Role::Server)?, apps::redis(step)?];
    let mut roots: Vec<u32> = servers.iter().map(|s| s.child.pid()).collect();
    if let (Path::Ours, Some(accel)) = (step.path, &step.context.accel) {
        roots.push(accel.monitor_pid());
        anyhow::ensure!(accel.report()?.listeners.len() >= servers.len(), NotAccelerated);
    }
    // Startup work does not count as idling.
    std::thread::sleep(Duration::from_secs(1));
    let pids: Vec<u32> = roots.into_iter().flat_map(with_descendants).collect();
    let total = || pids.iter().map(|pid| cpu_time(*pid)).sum::<Result<f64>>();
    let before = total()?;
    std::thread::sleep(WATCH);
    Ok(Values::from([("cpu", (total()? - before) * 1e3)]))
}

/// A process and all its descendants.
fn with_descendants(pid: u32) -> Vec<u32> {
    let mut all = vec![pid];
    for task in entries(&format!("/proc/{pid}/task")) {
        let children = fs::read_to_string(format!("/proc/{pid}/task/{task}/children")).unwrap_or_default();
        all.extend(children.split_whitespace().filter_map(|c| c.parse().ok()).flat_map(with_descendants));
    }
    all
}

fn entries(dir: &str) -> Vec<String> {
    let list = fs::read_dir(dir).into_iter().flatten().flatten();
    list.map(|e| e.file_name().to_string_lossy().into_owned()).collect()
}

/// CPU time of all threads of a process, in seconds. It is read from `schedstat` in nanoseconds, or else from
/// `stat` in clock ticks.
pub fn cpu_time(pid: u32) -> Result<f64> {
    let mut ns = 0.0;
    for task in entries(&format!("/proc/{pid}/task")) {
        let Ok(text) = fs::read_to_string(format!("/proc/{pid}/task/{task}/schedstat")) else {
            return cpu_ticks(pid);
        };
        ns += text.split_whitespace().next().and_then(|v| v.parse::<f64>().ok()).context("schedstat")?;
    }
    Ok(ns / 1e9)
}

fn cpu_ticks(pid: u32) -> Result<f64> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let fields: Vec<&str> = text.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let tick = |i: usize| fields.get(i).and_then(|v| v.parse::<f64>().ok()).context("stat");
    // Fields 14 and 15, utime and stime; the list starts with field 3.
    Ok((tick(11)? + tick(12)?) / rustix::param::clock_ticks_per_second() as f64)
}

/// Resident bytes per idle open connection, of both ends and the monitor together.
pub fn memory(step: &Step) -> Result<Values> {
    let accel = step.context.accel.as_ref().context("only ours")?;
    let count = CONNECTIONS.to_string();
    let mut command = worker(step, Role::Server, Op::Idle, "");
    command.args(["--max-ops", &count]);
    let mut server = Child::spawn(command, None)?;
    let ready = server.line(READY_LIMIT)?;
    let mut command = worker(step, Role::Client, Op::Idle, ready.strip_prefix(READY).context("server")?);
    command.args(["--max-ops", &count]).stdin(Stdio::piped());
    let mut client = Child::spawn(command, None)?;
    let expect = |client: &mut Child| -> Result<()> {
        anyhow::ensure!(client.line(Duration::from_secs(20))? == OPEN, "the client says something else");
        Ok(())
    };
    expect(&mut client)?;
    let pids = [server.pid(), client.pid(), accel.monitor_pid()];
    let measure = || -> Result<[f64; 3]> {
        let (mut private, mut shared) = (0.0, 0.0);
        for pid in pids {
            let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
            private += kilobytes(&rollup, "Pss_Anon:")?;
            shared += kilobytes(&rollup, "Pss_Shmem:")?;
        }
        let channels = accel.report()?.channels.iter().map(|c| c.resident as f64).sum();
        Ok([private, shared, channels])
    };
    let before = measure()?;
    client.poke()?;
    expect(&mut client)?;
    let after = measure()?;
    client.poke()?;
    client.finish(READY_LIMIT)?;
    server.finish(READY_LIMIT)?;
    let grown = |i: usize| after[i] - before[i];
    // Shared memory is the larger of what is mapped and what the monitor reports. Only the monitor's number
    // contains pages that no process maps any more; only the mapped pages contain arenas.
    Ok(Values::from([("bytes", (grown(0) + grown(1).max(grown(2))) / CONNECTIONS as f64)]))
}

/// A field of `smaps_rollup`, in bytes.
fn kilobytes(rollup: &str, name: &str) -> Result<f64> {
    let line = rollup.lines().find_map(|l| l.strip_prefix(name)).with_context(|| format!("no {name}"))?;
    Ok(line.trim().trim_end_matches(" kB").parse::<f64>()? * 1024.0)
}
