//! A monitor with servers and an honest program, and the figures that they give.

use super::probe::Figures;
use super::table::Who;
use crate::peer::Peer;
use crate::victims::{tree, Stage, Victim, CLIENTS, HOSTILE, SERVERS};
use anyhow::{Context, Result};
use fsocket_proto::raw::Packet;
use fsocket_proto::report::Report;
use fsocket_proto::{request, Payload};
use fsocket_sys as sys;
use fsocket_testkit::Proc;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The first of the users that share memory with no other user.
pub const STRANGERS: u32 = 5001;
/// Number of users of each kind.
pub const USERS: u32 = 4;

pub struct Scene {
    pub stage: Stage,
    pub ours: Victim,
    pub stock: Victim,
    program: PathBuf,
}

/// The total size of the monitor's processes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Size {
    pub descriptors: usize,
    pub threads: usize,
    pub kib: u64,
}

/// Everything of a user must be closed within the first time. Tests allow the second one, because
/// the machine may be busy.
pub const LEFT: Duration = Duration::from_secs(5);
const PATIENCE: Duration = Duration::from_secs(60);

impl Scene {
    pub fn new(dir: &Path) -> Result<Scene> {
        let clients = CLIENTS..CLIENTS + 2;
        let named: Vec<String> =
            [SERVERS].into_iter().chain(clients).chain(HOSTILE..HOSTILE + USERS).map(|u| u.to_string()).collect();
        let stage = Stage::new(dir, &format!("share = [[{}]]\n", named.join(", ")))?;
        let program = dir.join("fsocket-hostile");
        std::fs::copy(std::env::current_exe()?, &program)?; // where every user can reach it
        let server = |preloaded| -> Result<Victim> {
            stage.servers(&["threaded".to_owned()], preloaded)?.pop().context("no server")
        };
        let (ours, stock) = (server(true)?, server(false)?);
        Ok(Scene { stage, ours, stock, program })
    }

    pub fn victim(&self, kernel: bool) -> &Victim {
        if kernel {
            &self.stock
        } else {
            &self.ours
        }
    }

    /// Starts a process for each user, which attacks until it is dropped.
    pub fn assault(&self, which: Option<usize>, who: Who, users: u32, kernel: bool) -> Vec<Proc> {
        let one = |n: u32| {
            let uid = match who {
                Who::Stranger => STRANGERS + n,
                Who::Shared => HOSTILE + n,
                Who::Peer => SERVERS,
            };
            // Attackers get the CPU only if no other process wants it, because the test does not
            // measure how the CPU is shared.
            let mut c = Command::new("nice");
            c.args(["-n", "19"]).arg(&self.program).arg("assault").arg("--socket").arg(self.stage.socket());
            c.args(["--port", &self.victim(kernel).port.to_string(), "--uid", &uid.to_string(), "--time", "3600"]);
            c.args(["--seed", &(1 + n).to_string()]).args(kernel.then_some("--kernel"));
            c.args(which.iter().flat_map(|w| ["--which".to_owned(), w.to_string()])).env_remove("LD_PRELOAD");
            Proc::spawn(&self.stage.dir, &format!("assault-{n}"), c)
        };
        (0..users).map(one).collect()
    }

    pub fn probe(&self, seconds: f64, kernel: bool) -> Proc {
        let mut c = self.stage.command(CLIENTS, &self.program, !kernel);
        c.args(["probe", "--port", &self.victim(kernel).port.to_string(), "--time", &seconds.to_string()]);
        if !kernel {
            c.arg("--socket").arg(self.stage.socket());
        }
        Proc::spawn(&self.stage.dir, "probe", c)
    }

    /// The figures of an honest program that runs for this many seconds.
    pub fn figures(&self, seconds: f64, kernel: bool) -> Result<Figures> {
        let said = self.probe(seconds, kernel).finish(Duration::from_secs(180)).stdout;
        serde_json::from_str(&said).with_context(|| format!("the honest program says {said:?}"))
    }

    /// The same figures while the server is stopped half of the time.
    pub fn figures_of_busy(&self, seconds: f64, kernel: bool) -> Result<Figures> {
        let over = AtomicBool::new(false);
        std::thread::scope(|s| {
            s.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    self.victim(kernel).proc.signal(libc::SIGSTOP);
                    std::thread::sleep(Duration::from_millis(150));
                    self.victim(kernel).proc.signal(libc::SIGCONT);
                    std::thread::sleep(Duration::from_millis(150));
                }
            });
            let figures = self.figures(seconds, kernel);
            over.store(true, Ordering::Relaxed);
            figures
        })
    }

    /// The monitor's report about itself. `reset` sets its counters to zero afterwards.
    pub fn report(&self, reset: bool) -> Option<Report> {
        let mut peer = Peer::connect(&self.stage.socket()).ok()?;
        let asked = Packet { arg1: reset.into(), arg2: 1, ..Packet::new(request::Report::KIND) };
        let answer = peer.request(asked, None);
        let _ = sys::close(peer.fd);
        let (answer, fd) = answer?;
        let fd = fd?;
        let mut text = vec![0; answer.arg0 as usize];
        // SAFETY: the buffer has `text.len()` bytes.
        let n = unsafe { libc::pread(fd, text.as_mut_ptr().cast(), text.len(), 0) };
        let _ = sys::close(fd);
        (n == text.len() as isize).then(|| serde_json::from_slice(&text).ok())?
    }

    /// How long it takes until the monitor holds nothing for any hostile user.
    pub fn time_until_nothing_is_left(&self) -> Result<Duration> {
        let began = Instant::now();
        let hostile = |uid: u32| (HOSTILE..HOSTILE + USERS).contains(&uid) || uid >= STRANGERS;
        loop {
            let held = self.report(false).context("no report")?.held;
            let left: Vec<_> = held.into_iter().filter(|h| hostile(h.uid) && h.descriptors > 0).collect();
            if left.is_empty() {
                return Ok(began.elapsed());
            }
            anyhow::ensure!(began.elapsed() < PATIENCE, "left in the monitor: {left:?}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    pub fn size(&self) -> Size {
        let mut size = Size::default();
        for pid in tree(self.stage.monitor.pid()) {
            let count = |of: &str| std::fs::read_dir(format!("/proc/{pid}/{of}")).map_or(0, Iterator::count);
            size.descriptors += count("fd");
            size.threads += count("task");
            let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            // (Memory of channels counts for its user, and files count for the system.)
            let of = |name: &str| {
                let rest = text.lines().find_map(|l| l.strip_prefix(name))?;
                rest.split_whitespace().next()?.parse::<u64>().ok()
            };
            size.kib += ["RssAnon:", "RssShmem:"].into_iter().filter_map(of).sum::<u64>();
        }
        size
    }
}
