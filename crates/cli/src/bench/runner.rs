//! Runs one step: one scenario on one path.

use super::accel::{clean_environment, Accel};
use super::child::Child;
use super::scenario::{Job, Layout, Path, Scenario};
use super::worker::{Op, Outcome, READY};
use super::{apps, idle, queue};
use anyhow::{Context, Result};
use std::collections::BTreeMap;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Metric keys to values.
pub type Values = BTreeMap<&'static str, f64>;

/// How long a process may take to become ready, or to end.
pub const READY_LIMIT: Duration = Duration::from_secs(5);

/// What every step needs.
pub struct Setting {
    pub own: PathBuf,
    pub dir: PathBuf,
    pub accel: Option<Accel>,
    /// The client's CPU and, on two, the server's.
    pub cpus: [usize; 2],
    pub quick: bool,
}

/// One step's surroundings.
pub struct Step<'a> {
    pub context: &'a Setting,
    pub path: Path,
    pub layout: Layout,
}

impl Step<'_> {
    pub fn client_cpu(&self) -> usize {
        self.context.cpus[0]
    }

    pub fn server_cpu(&self) -> usize {
        self.context.cpus[(self.layout == Layout::TwoCpus) as usize]
    }

    /// A command in the environment of this path.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        clean_environment(&mut command);
        command.stdin(Stdio::null());
        if let (Path::Ours, Some(accel)) = (self.path, &self.context.accel) {
            accel.environment(&mut command);
        }
        command
    }

    /// Seconds that a measurement lasts.
    pub fn seconds(&self) -> f64 {
        if self.context.quick {
            0.2
        } else {
            0.6
        }
    }
}

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

/// Marks an error: the step worked, but over another path.
#[derive(Debug, Clone, Copy)]
pub struct NotAccelerated;

impl std::fmt::Display for NotAccelerated {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("NOT ACCELERATED")
    }
}

/// Command of one end of a micro-benchmark.
pub fn worker(step: &Step, role: &str, op: Op, addr: &str) -> Command {
    let mut command = step.command(&step.context.own);
    let transport = match step.path {
        Path::Stock | Path::Ours => "tcp",
        Path::Unix => "unix",
        Path::Queue => "queue",
    };
    let op = clap::ValueEnum::to_possible_value(&op).expect("no operation is skipped");
    let cpu = if role == "server" { step.server_cpu() } else { step.client_cpu() };
    command.args(["bench-worker", "--role", role, "--transport", transport, "--op", op.get_name()]);
    command.args(["--addr", addr, "--cpu", &cpu.to_string()]);
    command
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
