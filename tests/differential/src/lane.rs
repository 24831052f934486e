//! A lane runs programs one after the other. It has a monitor of its own, a fork server without the
//! library and one with it, and a scheduler. The scheduler makes one step at a time, and waits
//! until the kernel says that nothing moves any more.

mod format;
mod run;

use crate::call::Call;
use crate::program::Program;
use crate::shared::{self, state, Shared, REAP};
use crate::symbols::PATH;
use crate::watch::{Doing, Watch};
use anyhow::{ensure, Context, Result};
use fsocket_sys as sys;
use fsocket_testkit::host::{Accel, Stock};
use fsocket_testkit::workers::children;
use fsocket_testkit::{Host, Proc, Snapshot};
use std::iter::once;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::*;
use std::time::{Duration, Instant};

/// Which processes of a program have the library: bit i for process i.
pub type Mode = u8;
pub const STOCK: Mode = 0;
pub const LIBRARY: Mode = 0xff;

/// The behaviour of a program: one line per step, and one per step that finished later.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Transcript {
    pub lines: Vec<String>,
}

/// Prefix of the names of Unix sockets, in the lane's directory.
pub const SOCKETS: &str = "unix-";
/// Limit for a fork server's answer.
const SERVER: Duration = Duration::from_secs(20);

pub struct Lane {
    // The servers are dropped first, because they talk to the monitor.
    servers: [Option<Proc>; 2],
    shared: &'static Shared,
    path: String,
    program: PathBuf,
    /// The monitor's processes: with privileges, and without.
    monitor: Vec<i32>,
    host: Host,
    /// If nothing has moved for this long, nothing will. Microseconds.
    pub quiet_us: u64,
}

impl Lane {
    /// `program` is the path of this executable.
    pub fn new(program: &Path) -> Result<Lane> {
        let mut host = Host::new();
        let (shared, fd) = shared::create()?;
        let path = format!("/proc/{}/fd/{fd}", std::process::id());
        let pid = host.monitor().map(|m| m.pid());
        let monitor = pid.into_iter().flat_map(|pid| once(pid as i32).chain(children(pid))).collect();
        let mut lane =
            Lane { servers: [None, None], shared, path, program: program.into(), monitor, host, quiet_us: 700 };
        lane.start(0)?;
        lane.start(1)?;
        Ok(lane)
    }

    fn start(&mut self, flavour: usize) -> Result<()> {
        let (side, name) = [(Stock, "stock"), (Accel, "library")][flavour];
        self.shared.server(flavour).forget();
        let text = flavour.to_string();
        self.servers[flavour] = None;
        self.servers[flavour] = Some(self.host.start(side, name, &self.program, &["serve", &self.path, &text]));
        self.server_done(flavour).context("a fork server did not start")
    }

    fn server_done(&mut self, flavour: usize) -> Result<()> {
        let end = Instant::now() + SERVER;
        let slot = self.shared.server(flavour);
        loop {
            let seen = self.shared.answers.load(Acquire);
            if slot.state.load(Acquire) == state::DONE {
                slot.state.store(state::IDLE, Release);
                return Ok(());
            }
            let server = self.servers[flavour].as_mut().context("no fork server")?;
            ensure!(server.running(), "fork server {flavour} ended\n{}", server.stderr());
            ensure!(Instant::now() < end, "fork server {flavour} hangs\n{}", server.stderr());
            let _ = sys::futex_wait(&self.shared.answers, seen, Some(1_000_000));
        }
    }

    fn order_server(&mut self, flavour: usize, call: u32, arg: i64) -> Result<()> {
        self.shared.server(flavour).order(call, 0, &[arg]);
        self.server_done(flavour)
    }

    /// Counters of this lane's monitor.
    pub fn snapshot(&self) -> Snapshot {
        self.host.snapshot()
    }

    /// Runs a program from start to end. An error means that the tester has failed.
    pub fn run(&mut self, program: &Program, mode: Mode) -> Result<Transcript> {
        let result = run::run(self, program, mode);
        if let Some(monitor) = self.host.monitor() {
            ensure!(monitor.running(), "the monitor ended with this program:\n{program}\n{}", monitor.stderr());
        }
        if result.is_err() {
            // All remaining processes are in the servers' process groups.
            for flavour in 0..2 {
                self.start(flavour)?;
            }
        }
        result
    }

    /// Removes files that `bind` has left in the directory.
    fn remove_sockets(&self, program: &Program) {
        if !program.steps.iter().any(|s| s.call == Call::Bind && s.args[1] == PATH) {
            return;
        }
        let files = std::fs::read_dir(self.host.path()).into_iter().flatten().flatten();
        for file in files.filter(|f| f.file_name().to_string_lossy().starts_with(SOCKETS)) {
            let _ = std::fs::remove_file(file.path());
        }
    }

    fn collect_dead(&mut self, flavour: usize) -> Result<()> {
        self.order_server(flavour, REAP, 0)
    }

    /// Do all threads of the monitor sleep? The monitor starts a thread for a moment to look at
    /// another network namespace.
    fn monitor_sleeps(&self) -> bool {
        self.monitor.iter().flat_map(|pid| threads(*pid)).all(|tid| Watch::new(tid).doing() != Doing::Running)
    }

    /// The executors' messages on stderr: panics, mostly.
    pub fn complaints(&self) -> String {
        self.servers.iter().flatten().map(|s| s.stderr()).collect()
    }
}

fn threads(pid: i32) -> impl Iterator<Item = i32> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task"));
    tasks.into_iter().flatten().filter_map(|t| t.ok()?.file_name().to_str()?.parse().ok())
}
