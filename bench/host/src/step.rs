//! One step of the benchmark: its context, and the commands that it starts.

use crate::accel::{clean_environment, Accel};
use crate::scenario::Layout;
use crate::worker::Op;
use fsocket_bench_args::{Path, Role};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Values by metric key.
pub type Values = BTreeMap<&'static str, f64>;

/// How long a process may take to become ready, or to end.
pub const READY_LIMIT: Duration = Duration::from_secs(5);

/// The context that all steps share.
pub struct Setting {
    pub own: PathBuf,
    pub dir: PathBuf,
    pub accel: Option<Accel>,
    /// The client's CPU, and the server's CPU in the layout with two CPUs.
    pub cpus: [usize; 2],
    pub quick: bool,
}

/// The context of one step.
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

    /// A command with the environment for an end of this role: with the library, or without.
    pub fn command(&self, role: Role, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        clean_environment(&mut command);
        command.stdin(Stdio::null());
        if let (true, Some(accel)) = (self.path.has_library(role), &self.context.accel) {
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

/// Error context: the step worked, but its connections took another path than the step's.
#[derive(Debug, Clone, Copy)]
pub struct NotAccelerated;

impl std::fmt::Display for NotAccelerated {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ANOTHER PATH")
    }
}

/// Command of one end of a micro-benchmark.
pub fn worker(step: &Step, role: Role, op: Op, addr: &str) -> Command {
    let mut command = step.command(role, &step.context.own);
    let transport = match step.path {
        Path::Unix => "unix",
        Path::Queue => "queue",
        _ => "tcp",
    };
    let op = clap::ValueEnum::to_possible_value(&op).expect("no operation is skipped");
    let (role, cpu) = match role {
        Role::Client => ("client", step.client_cpu()),
        Role::Server | Role::Backend => ("server", step.server_cpu()),
    };
    command.args(["worker", "--role", role, "--transport", transport, "--op", op.get_name()]);
    command.args(["--addr", addr, "--cpu", &cpu.to_string()]);
    command
}
