//! Runs one step: one scenario on one path.

use crate::child::Child;
use crate::scenario::{Job, Layout, Scenario};
use crate::step::{worker, NotAccelerated, Setting, Step, Values, READY_LIMIT};
use crate::worker::{Op, Outcome, READY};
use crate::{apps, idle, queue};
use anyhow::{Context, Result};
use fsocket_bench_args::Path;
use std::os::fd::AsRawFd;
use std::time::Duration;

/// Measures, and makes sure that ours was ours.
pub fn step(context: &Setting, scenario: &Scenario, layout: Layout, path: Path) -> Result<Values> {
    let step = Step { context, path, layout };
    let before = match (&context.accel, path) {
        (Some(accel), Path::Ours) => Some((accel, accel.report()?.totals)),
        _ => None,
    };
    let values = match scenario.job {
        Job::Micro { op, size } => micro(&step, op, size)?,
        Job::IdleCpu => idle::cpu(&step)?,
        Job::IdleMemory => idle::memory(&step)?,
        job => apps::run(&step, job)?,
    };
    // Nothing connects while everything is idle; that step checks for itself.
    let connects = !matches!(scenario.job, Job::IdleCpu | Job::TrueLoop);
    if let (Some((accel, before)), true) = (before, connects) {
        accel.check(&before).map_err(|e| e.context(NotAccelerated))?;
    }
    Ok(values)
}

fn micro(step: &Step, op: Op, size: usize) -> Result<Values> {
    let seconds = step.seconds();
    let mut memory = None;
    let addr = match step.path {
        Path::Stock | Path::Ours => String::new(),
        Path::Unix => {
            let path = step.context.dir.join("worker.sock");
            let _ = std::fs::remove_file(&path);
            path.display().to_string()
        }
        Path::Queue => {
            let fd = rustix::fs::memfd_create("fastsocket-bench", rustix::fs::MemfdFlags::CLOEXEC)?;
            rustix::fs::ftruncate(&fd, queue::SIZE as u64)?;
            let path = format!("/proc/{}/fd/{}", std::process::id(), fd.as_raw_fd());
            memory = Some(fd);
            path
        }
    };
    let mut command = worker(step, "server", op, &addr);
    command.args(["--size", &size.to_string()]);
    let mut server = Child::spawn(command, None)?;
    let ready = server.line(READY_LIMIT)?;
    let addr = ready.strip_prefix(READY).context("the server says something else")?;
    let mut command = worker(step, "client", op, addr);
    command.args(["--size", &size.to_string(), "--secs", &seconds.to_string()]);
    if op == Op::Conn && step.path == Path::Stock {
        // Below the number of ephemeral ports: stock shall not be measured in
        // a table full of TIME-WAIT that it made itself.
        command.args(["--max-ops", "12000"]);
    }
    let output = Child::spawn(command, None)?.finish(Duration::from_secs_f64(seconds * 3.0) + READY_LIMIT)?;
    server.finish(READY_LIMIT)?;
    drop(memory);
    let outcome: Outcome = serde_json::from_str(output.trim()).context("the client says something else")?;
    Ok(Values::from([
        ("p50", outcome.p50),
        ("p99", outcome.p99),
        ("rate", outcome.ops as f64 / outcome.seconds),
        ("bytes", outcome.bytes as f64 / outcome.seconds),
    ]))
}
