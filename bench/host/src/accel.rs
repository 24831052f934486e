//! The accelerated side of the comparison: the library, a monitor that the benchmark starts, and the check that a
//! run used them.

use anyhow::{anyhow, bail, Result};
use fsocket_bench_args::Path as Way;
use fsocket_client::locate::Pieces;
use fsocket_client::{control, locate, preload_list};
use fsocket_proto::paths;
use fsocket_proto::report::{Counters, Report};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Time that the monitor may need to see the end of a process and to count it.
const SETTLE: Duration = Duration::from_millis(500);

pub struct Accel {
    pub library: PathBuf,
    pub socket: PathBuf,
    monitor: crate::child::Child,
}

impl Accel {
    /// Starts a monitor with its socket in `dir`.
    pub fn start(pieces: &Pieces, dir: &Path) -> Result<Self> {
        let library = locate::library(pieces.library.as_deref()).map_err(|e| anyhow!(e))?;
        let monitor = locate::monitor(pieces.monitor.as_deref()).map_err(|e| anyhow!(e))?;
        let dir = dir.join("monitor");
        std::os::unix::fs::DirBuilderExt::mode(&mut std::fs::DirBuilder::new(), 0o700).create(&dir)?;
        let socket = dir.join("monitor.sock");
        let mut command = Command::new(monitor);
        clean_environment(&mut command);
        // The monitor must outlast stock measurements of any length, during which it has no clients. It ends with
        // the benchmark.
        command.args(["--private", "--linger", "86400", "--socket"]).arg(&socket).stdin(Stdio::null());
        let accel = Accel { library, monitor: crate::child::Child::spawn(command, None)?, socket };
        let started = Instant::now();
        while control::probe(&accel.socket).is_err() {
            if started.elapsed() > Duration::from_secs(2) {
                bail!("the monitor does not answer");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        accel.report()?;
        Ok(accel)
    }

    pub fn monitor_pid(&self) -> u32 {
        self.monitor.pid()
    }

    pub fn report(&self) -> Result<Report> {
        control::report(&self.socket)
    }

    /// Lets `command` load the library, as `fastsocket run` does.
    pub fn environment(&self, command: &mut Command) {
        command.env(paths::ENV_SOCKET, &self.socket);
        command.env("LD_PRELOAD", preload_list::preload_list(std::env::var_os("LD_PRELOAD"), &self.library));
    }

    /// Checks that all connections since `before` stayed in the kernel, and that the end with the library had at
    /// least one. An error otherwise.
    pub fn check_kernel(&self, before: &Counters, path: Way) -> Result<()> {
        let counter = if path == Way::KernelClient { "connect_kernel" } else { "accept_kernel" };
        let started = Instant::now();
        loop {
            let after = self.report()?.totals;
            let grown = |name: &str| {
                let value = |c: &Counters| c.get(name).copied().unwrap_or(0);
                value(&after).saturating_sub(value(before))
            };
            for other in ["connect_shm", "accept_shm", "path_upgrade"] {
                if grown(other) > 0 {
                    bail!("{} of the connections were to stay in the kernel: {other}", grown(other));
                }
            }
            if grown(counter) > 0 {
                return Ok(());
            }
            if started.elapsed() > SETTLE {
                bail!("no connection over the kernel: {counter} is 0");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Checks that no connection has left shared memory since `before`. The error contains the number of
    /// connections.
    pub fn check_stayed(&self, before: &Counters) -> Result<()> {
        let left = |c: &Counters| c.get("path_switch").copied().unwrap_or(0);
        match left(&self.report()?.totals).saturating_sub(left(before)) {
            0 => Ok(()),
            n => bail!("{n} connections left shared memory for the kernel"),
        }
    }

    /// Checks that the connections since `before` used shared memory. The error contains the reasons.
    pub fn check(&self, before: &Counters) -> Result<()> {
        let started = Instant::now();
        loop {
            let after = self.report()?.totals;
            let grown = |name: &str| {
                let value = |c: &Counters| c.get(name).copied().unwrap_or(0);
                value(&after).saturating_sub(value(before))
            };
            // These connections use the kernel by design. `kernel_first`: one in 2 s of a program that gives up the
            // right to new privileges, such as haproxy. `short_lived`: all connections after the server has seen
            // that they are too short to pay.
            let short = grown("fallback.short_lived");
            let unlisted = if short > 0 { grown("fallback.no_listener") } else { 0 };
            let meant = grown("fallback.kernel_first") + short + unlisted;
            let kernel = grown("connect_kernel").saturating_sub(meant);
            if kernel > 0 {
                let reasons: Vec<String> =
                    after.keys().filter(|k| k.starts_with("fallback.") && grown(k) > 0).cloned().collect();
                bail!("{kernel} connections over the kernel ({})", reasons.join(", "));
            }
            if grown("connect_shm") > 0 && grown("accept_shm") > 0 {
                return Ok(());
            }
            if started.elapsed() > SETTLE {
                bail!("no connection over shared memory");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Removes the library's variables and LD_PRELOAD entry, with which the benchmark itself may have been started.
pub fn clean_environment(command: &mut Command) {
    command.env_remove(paths::ENV_SOCKET).env_remove(paths::ENV_DISABLE);
    match std::env::var_os("LD_PRELOAD").map(|v| v.to_string_lossy().into_owned()) {
        Some(list) if list.contains(locate::LIBRARY) => {
            let rest: Vec<&str> =
                list.split([':', ' ']).filter(|e| !e.is_empty() && !e.ends_with(locate::LIBRARY)).collect();
            command.env("LD_PRELOAD", rest.join(":"));
        }
        _ => {}
    }
}
