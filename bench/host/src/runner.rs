//! Runs one step: a scenario on a path.

use crate::accel::Accel;
use crate::child::Child;
use crate::scenario::{Job, Layout, Scenario};
use crate::step::{worker, NotAccelerated, Setting, Step, Values, READY_LIMIT};
use crate::worker::{Op, Outcome, READY};
use crate::{apps, idle, queue};
use anyhow::{Context, Result};
use fsocket_bench_args::{Path, Role};
use std::os::fd::AsRawFd;
use std::time::Duration;

/// Runs a scenario on a path, and checks that the connections took that path.
pub fn step(context: &Setting, scenario: &Scenario, layout: Layout, path: Path) -> Result<Values> {
    // These jobs connect nothing while they are measured. `idle::cpu` has a check of its own.
    let connects = !matches!(scenario.job, Job::IdleCpu | Job::TrueLoop);
    checked(&Step { context, path, layout }, connects, |step| match scenario.job {
        Job::Micro { op, size } => micro(step, op, size),
        Job::IdleCpu => idle::cpu(step),
        Job::IdleMemory => idle::memory(step),
        job => apps::run(step, job),
    })
}

/// Runs a step. If it connects, connections over another path than the step's are an error.
pub fn checked(step: &Step, connects: bool, run: impl FnOnce(&Step) -> Result<Values>) -> Result<Values> {
    let path = step.path;
    let before = match &step.context.accel {
        Some(accel) if path == Path::Ours || path.is_kernel() => Some((accel, accel.report()?.totals)),
        _ => None,
    };
    let used = cpu_used(before.as_ref().map(|(accel, _)| *accel))?;
    let mut values = run(step)?;
    if let Some(ops) = values.remove("ops").filter(|ops| *ops > 0.0) {
        // All processes of the step have ended, so `cpu_used` includes them.
        let used = cpu_used(before.as_ref().map(|(accel, _)| *accel))? - used;
        values.insert("cpu_op", used * 1e6 / ops);
    }
    if let (Some((accel, before)), true) = (before, connects) {
        let checked = if path.is_kernel() { accel.check_kernel(&before, path) } else { accel.check(&before) };
        checked.map_err(|e| e.context(NotAccelerated))?;
    }
    Ok(values)
}

/// Seconds of CPU time of all children that have ended, and of the monitor.
fn cpu_used(accel: Option<&Accel>) -> Result<f64> {
    // SAFETY: all fields of the structure are integers, so zeros are a valid value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the structure lives through the call.
    if unsafe { libc::getrusage(libc::RUSAGE_CHILDREN, &mut usage) } != 0 {
        return Err(std::io::Error::last_os_error().into());
    }
    let seconds = |t: libc::timeval| t.tv_sec as f64 + t.tv_usec as f64 / 1e6;
    let monitor = accel.map_or(Ok(0.0), |accel| idle::cpu_time(accel.monitor_pid()))?;
    Ok(seconds(usage.ru_utime) + seconds(usage.ru_stime) + monitor)
}

/// Measures one operation of the worker between a server and a client.
pub fn micro(step: &Step, op: Op, size: usize) -> Result<Values> {
    let seconds = step.seconds();
    let mut memory = None;
    let addr = match step.path {
        Path::Stock | Path::Ours | Path::KernelServer | Path::KernelClient | Path::Control => String::new(),
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
    let mut command = worker(step, Role::Server, op, &addr);
    command.args(["--size", &size.to_string()]);
    let mut server = Child::spawn(command, None)?;
    let ready = server.line(READY_LIMIT)?;
    let addr = ready.strip_prefix(READY).context("the server says something else")?;
    let mut command = worker(step, Role::Client, op, addr);
    command.args(["--size", &size.to_string(), "--secs", &seconds.to_string()]);
    if op == Op::Conn && !matches!(step.path, Path::Ours | Path::Unix) {
        // Fewer connections than ephemeral ports. Otherwise the run would measure the kernel with a table full of
        // TIME-WAIT sockets of its own.
        command.args(["--max-ops", "12000"]);
    }
    let output = Child::spawn(command, None)?.finish(Duration::from_secs_f64(seconds * 3.0) + READY_LIMIT)?;
    server.finish(READY_LIMIT)?;
    drop(memory);
    let outcome: Outcome = serde_json::from_str(output.trim()).context("the client says something else")?;
    Ok(Values::from([
        ("mean", outcome.mean),
        ("p1", outcome.p1),
        ("p50", outcome.p50),
        ("p99", outcome.p99),
        ("rate", outcome.ops as f64 / outcome.seconds),
        ("ops", (outcome.warm + outcome.ops) as f64),
        ("bytes", outcome.bytes as f64 / outcome.seconds),
    ]))
}
