//! One pair of programs: the library's calls in it, and one run for each fault.

use crate::errors;
use crate::pairs::{self, Pair};
use crate::plan::{Extent, Planned};
use crate::trap::{within, Fault, Trap, Whose};
use anyhow::{bail, ensure, Context, Result};
use fsocket_testkit::{Finished, Host, Proc};
use std::process::Command;
use std::time::Duration;

/// Longer than any program here runs, and than the library waits for its monitor (5 s).
pub const LIMIT: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Client,
    Server,
}

/// The result of a run with a fault.
#[derive(Clone, Debug)]
pub enum Verdict {
    /// The output and the exit status are as without the fault.
    Same,
    /// The program got this very error and reported it.
    Told,
    /// The faulty call was not reached in this run.
    Missed,
    Wrong(String),
}

#[derive(Clone, Debug)]
pub struct Run {
    pub fault: Fault,
    pub verdict: Verdict,
}

/// Waits for a program to end. An error says that it has not ended within [`LIMIT`], and where it
/// sleeps.
fn end(mut program: Proc) -> Result<Finished, String> {
    if within(LIMIT, || !program.running()) {
        return Ok(program.finish(LIMIT));
    }
    Err(format!("hung; it sleeps in\n{}--- it said\n{}{}", sleeps(program.pid()), program.stdout(), program.stderr()))
}

/// The calls in which the threads of a process sleep.
fn sleeps(pid: u32) -> String {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let read = |at: &std::path::Path, name| std::fs::read_to_string(at.join(name)).unwrap_or_default();
    tasks
        .map(|t| format!("{} in {}: {}", t.file_name().display(), read(&t.path(), "wchan"), read(&t.path(), "syscall")))
        .collect()
}

pub struct Campaign {
    host: Host,
    pair: Pair,
    _behind: Option<Proc>,
    /// The client's output without a fault, and the server's exit code and signal.
    expected: String,
    server_end: (Option<i32>, Option<i32>),
}

impl Campaign {
    /// Returns `None` if a program is missing.
    pub fn new(name: &str) -> Result<Option<Campaign>> {
        let host = Host::new();
        let Some(pair) = pairs::make(name, &host) else { return Ok(None) };
        let behind = match pair.behind(&host) {
            Some((command, port)) => Some(serve(&host, "behind", command, port)?),
            None => None,
        };
        let mut c = Campaign { host, pair, _behind: behind, expected: String::new(), server_end: (None, None) };
        let server = c.serve(None)?.0;
        // The kernel knows a listener a moment before the monitor does.
        std::thread::sleep(Duration::from_millis(100));
        let before = c.host.snapshot();
        let said = c.ask(None)?.0.map_err(anyhow::Error::msg)?;
        ensure!(said.code == Some(0), "{name} fails without a fault: {said:?}");
        let delta = c.host.snapshot().since(&before);
        ensure!(delta.get("connect_shm") > 0 && delta.get("accept_shm") > 0, "not over shared memory:\n{delta}");
        c.expected = said.stdout;
        let ended = c.stop(server).map_err(anyhow::Error::msg)?;
        c.server_end = (ended.code, ended.signal);
        Ok(Some(c))
    }

    fn serve(&self, trap: Option<&mut Setting>) -> Result<(Proc, Option<Trap>)> {
        self.wait_for_port()?;
        let mut command = self.pair.server(&self.host);
        let trap = set(&mut command, trap)?;
        Ok((serve(&self.host, self.pair.name, command, self.pair.port)?, trap))
    }

    /// Waits until the listener of the server that has ended is gone. Otherwise it would make the
    /// next server look ready.
    fn wait_for_port(&self) -> Result<()> {
        let free = within(LIMIT, || self.host.kernel_sockets(self.pair.port, "0A") == 0);
        ensure!(free, "another program listens on port {}", self.pair.port);
        Ok(())
    }

    fn ask(&self, trap: Option<&mut Setting>) -> Result<(Result<Finished, String>, Option<Trap>)> {
        let mut command = self.pair.client(&self.host);
        let trap = set(&mut command, trap)?;
        let client = Proc::spawn(self.host.logs(), "client", command);
        Ok((end(client), trap))
    }

    fn stop(&self, server: Proc) -> Result<Finished, String> {
        server.signal(libc::SIGTERM);
        end(server).map_err(|e| format!("after SIGTERM it {e}"))
    }

    /// Plans the faults of one side, from the calls of a run without faults.
    pub fn plan(&self, side: Side, extent: Extent) -> Result<Vec<Fault>> {
        let mut none = Setting::default();
        let seen = match side {
            Side::Client => {
                let (server, _) = self.serve(None)?;
                let (said, trap) = self.ask(Some(&mut none))?;
                said.map_err(anyhow::Error::msg)?;
                drop(server);
                trap
            }
            Side::Server => {
                let (server, trap) = self.serve(Some(&mut none))?;
                for _ in 0..2 {
                    self.ask(None)?.0.map_err(anyhow::Error::msg)?;
                }
                self.stop(server).map_err(anyhow::Error::msg)?;
                trap
            }
        };
        let seen = seen.context("a trap")?.seen();
        if let Some(broken) = seen.broken {
            bail!("the trap: {broken}");
        }
        Ok(Planned::of(&seen.sites, extent).faults)
    }

    /// Runs the faults of a side.
    pub fn run(&self, side: Side, faults: &[Fault], mut each: impl FnMut(&Run)) -> Result<Vec<Run>> {
        let mut runs = Vec::new();
        let mut server = None;
        for fault in faults {
            let verdict = match side {
                Side::Server => self.server_fault(*fault)?,
                Side::Client => {
                    let mut one = match server.take() {
                        Some(server) => server,
                        None => self.serve(None)?.0,
                    };
                    let verdict = self.client_fault(*fault, &mut one)?;
                    if !matches!(verdict, Verdict::Wrong(_)) {
                        server = Some(one);
                    }
                    verdict
                }
            };
            let run = Run { fault: *fault, verdict };
            each(&run);
            runs.push(run);
        }
        Ok(runs)
    }

    fn client_fault(&self, fault: Fault, server: &mut Proc) -> Result<Verdict> {
        let (said, trap) = self.ask(Some(&mut Setting { fault: Some(fault) }))?;
        let seen = trap.context("a trap")?.seen();
        if let Some(broken) = seen.broken {
            bail!("the trap: {broken}");
        }
        if !server.running() {
            return Ok(Verdict::Wrong(format!("the server ended: {}", server.stderr())));
        }
        let verdict = self.judge(fault, said, "");
        if matches!(verdict, Verdict::Wrong(_)) {
            return Ok(verdict);
        }
        // Another client of the same server must be served.
        match self.judge(fault, self.ask(None)?.0, "") {
            Verdict::Same if seen.failed == 0 => Ok(Verdict::Missed),
            Verdict::Same => Ok(verdict),
            other => Ok(Verdict::Wrong(format!("the next client: {other:?}"))),
        }
    }

    fn server_fault(&self, fault: Fault) -> Result<Verdict> {
        let mut command = self.pair.server(&self.host);
        let trap = set(&mut command, Some(&mut Setting { fault: Some(fault) }))?.context("a trap")?;
        self.wait_for_port()?;
        // (The logs of earlier runs must not count for this one.)
        self.pair.logs.iter().for_each(|log| drop(std::fs::remove_file(log)));
        let mut server = Proc::spawn(self.host.logs(), self.pair.name, command);
        let up = within(LIMIT, || !server.running() || self.host.kernel_sockets(self.pair.port, "0A") > 0);
        let mut verdict = Verdict::Same;
        if up && server.running() {
            std::thread::sleep(Duration::from_millis(20));
            for when in ["the client", "the next client"] {
                let said = self.ask(None)?.0;
                let logs = self.logs(&server);
                match self.judge(fault, said, &logs) {
                    Verdict::Same => {}
                    Verdict::Told => verdict = Verdict::Told,
                    Verdict::Wrong(what) => {
                        verdict =
                            Verdict::Wrong(format!("{when}: {what}\n--- the server\n{logs}\n{}", sleeps(server.pid())));
                        break;
                    }
                    Verdict::Missed => {}
                }
            }
        } else if up && self.is_named(fault, &self.logs(&server)) {
            return Ok(Verdict::Told);
        } else {
            verdict = Verdict::Wrong(format!("it does not listen: {}", self.logs(&server)));
        }
        if !matches!(verdict, Verdict::Wrong(_)) {
            match self.stop(server) {
                Ok(e) if (e.code, e.signal) == self.server_end => {}
                Ok(e) if self.is_named(fault, &e.stderr) => verdict = Verdict::Told,
                Ok(e) => verdict = Verdict::Wrong(format!("the server ended with {e:?}")),
                Err(e) => verdict = Verdict::Wrong(format!("the server: {e}")),
            }
        }
        let seen = trap.seen();
        if let Some(broken) = seen.broken {
            bail!("the trap: {broken}");
        }
        Ok(if seen.failed == 0 && matches!(verdict, Verdict::Same) { Verdict::Missed } else { verdict })
    }

    /// Does this output report the error?
    fn is_named(&self, fault: Fault, output: &str) -> bool {
        let is_of = |call: i64| call == 0 || call == fault.site.number;
        let is_said = self.pair.refusals.iter().any(|(call, text)| is_of(*call) && output.contains(text));
        is_said || errors::is_named(fault.error, output)
    }

    /// The server's output and log files so far.
    fn logs(&self, server: &Proc) -> String {
        let files = self.pair.logs.iter().filter_map(|f| std::fs::read_to_string(f).ok());
        files.chain([server.stdout(), server.stderr()]).collect()
    }

    fn judge(&self, fault: Fault, said: Result<Finished, String>, server: &str) -> Verdict {
        match said {
            // A hang after such an error is no failure. With kernel TCP, too, a program that
            // continues after the error waits for ever. So does the client of a server whose
            // calls fail for good.
            Err(hung) if self.is_named(fault, &hung) => Verdict::Told,
            Err(_) if fault.on && self.is_named(fault, server) => Verdict::Told,
            Err(hung) => Verdict::Wrong(hung),
            Ok(f) if f.code == Some(0) && f.stdout == self.expected => Verdict::Same,
            Ok(f) => {
                let named = self.is_named(fault, &[&f.stdout, &f.stderr, server].concat());
                let other_bytes = ["memcmp", "differs", "bytes differ"].iter().any(|w| f.stderr.contains(w));
                if f.signal.is_none() && named && !other_bytes {
                    Verdict::Told
                } else {
                    Verdict::Wrong(format!("{f:?}"))
                }
            }
        }
    }
}

/// The fault for a program that runs under a trap.
#[derive(Default)]
struct Setting {
    fault: Option<Fault>,
}

fn set(command: &mut Command, setting: Option<&mut Setting>) -> Result<Option<Trap>> {
    setting.map(|s| Trap::set(command, Whose::Library, s.fault.into(), true)).transpose()
}

fn serve(host: &Host, name: &str, command: Command, port: u16) -> Result<Proc> {
    let mut server = Proc::spawn(host.logs(), name, command);
    let up = within(LIMIT, || !server.running() || host.kernel_sockets(port, "0A") > 0);
    ensure!(up && server.running(), "{name} does not listen: {}{}", server.stdout(), server.stderr());
    Ok(server)
}
