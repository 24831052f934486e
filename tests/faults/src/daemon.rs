//! The monitor's own system calls: it may refuse, but neither die nor hang, nor break a connection
//! that exists or a program that starts.

use crate::campaign::Verdict;
use crate::plan::{Extent, Planned};
use crate::trap::{within, Fault, Seen, Trap, Whose};
use anyhow::{bail, Result};
use fsocket_testkit::host::{Accel, Side};
use fsocket_testkit::{net, script, Host, Proc, PYTHON};
use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);

/// The faults, from a run without.
pub fn plan(extent: Extent) -> Result<Vec<Fault>> {
    match scenario(None)? {
        (seen, Verdict::Same) => Ok(Planned::of(&seen.sites, extent).faults),
        (_, other) => bail!("without a fault: {other:?}"),
    }
}

pub fn run(fault: Fault) -> Result<Verdict> {
    let (seen, verdict) = scenario(Some(fault))?;
    Ok(if seen.failed == 0 && matches!(verdict, Verdict::Same) { Verdict::Missed } else { verdict })
}

/// Client A has a connection before the fault. Then a server starts, client B asks it, a report is
/// made. Both must get on; A goes on afterwards, and the monitor serves a client C.
fn scenario(fault: Option<Fault>) -> Result<(Seen, Verdict)> {
    let mut host = Host::stopped();
    let mut trap = None;
    let mut broken = None;
    host.start_monitor_with(|command| match Trap::set(command, Whose::Program, fault, false) {
        Ok(t) => trap = Some(t),
        Err(e) => broken = Some(e),
    });
    if let Some(e) = broken {
        return Err(e);
    }
    let Some(trap) = trap else { bail!("no trap") };
    let verdict = match steps(&mut host, &trap) {
        Ok(()) => Verdict::Same,
        Err(what) => {
            let said = host.monitor().map(|m| m.stderr()).unwrap_or_default();
            Verdict::Wrong(format!("{what}\n--- the monitor\n{said}"))
        }
    };
    host.kill_monitor();
    let seen = trap.seen();
    match seen.broken {
        Some(broken) => bail!("the trap: {broken}"),
        None => Ok((seen, verdict)),
    }
}

fn steps(host: &mut Host, trap: &Trap) -> Result<(), String> {
    let (_first, port) = echo_server(host, "epoll")?;
    let mut a = Held::start(host, port)?;
    trap.arm();
    let (second, other) = echo_server(host, "threaded")?;
    client(host, Accel, other, "B")?;
    drop(second);
    let _refused = !report(host);
    a.expect("echo", "echoed")?;
    trap.disarm();
    // (The last fault may still break the connection of one program. This report takes that place.)
    if !within(LIMIT, || report(host)) {
        return Err("afterwards there is no report".into());
    }
    if !host.monitor().is_some_and(|m| m.running()) {
        return Err("the monitor has died".into());
    }
    let before = host.snapshot();
    client(host, Accel, port, "C")?;
    a.expect("new", "new ok")?;
    a.expect("exit", "bye")?;
    let delta = host.snapshot().since(&before);
    if delta.get("connect_shm") == 0 {
        return Err(format!("afterwards it serves nobody any more\n{delta}"));
    }
    let Some(monitor) = host.monitor() else { return Err("no monitor".into()) };
    monitor.signal(libc::SIGTERM);
    if !within(LIMIT, || !monitor.running()) {
        return Err("it does not end".into());
    }
    Ok(())
}

fn echo_server(host: &Host, kind: &str) -> Result<(Proc, u16), String> {
    let port = net::free_port();
    let path = script("apps/echo_server.py").display().to_string();
    let mut server = host.start(Accel, kind, PYTHON, &[&path, kind, &port.to_string()]);
    let up = within(LIMIT, || !server.running() || host.kernel_sockets(port, "0A") > 0);
    if !up || !server.running() {
        return Err(format!("a server does not start: {}", server.stderr()));
    }
    std::thread::sleep(Duration::from_millis(50));
    Ok((server, port))
}

fn client(host: &Host, side: Side, port: u16, who: &str) -> Result<(), String> {
    let path = script("apps/echo_client.py").display().to_string();
    let args = [&path, "seq", &port.to_string(), "--connections", "3", "--bytes", "100000"];
    let mut client = host.start(side, "client", PYTHON, &args);
    if !within(LIMIT, || !client.running()) {
        return Err(format!("client {who} hangs: {}", client.stderr()));
    }
    let done = client.finish(LIMIT);
    match done.code {
        Some(0) if done.stdout.starts_with("ok 3 100000") => Ok(()),
        _ => Err(format!("client {who}: {done:?}")),
    }
}

/// Asks for a report. False: that is refused.
fn report(host: &Host) -> bool {
    let mut command = std::process::Command::new(fsocket_testkit::artifacts::cli());
    command.env(fsocket_proto::paths::ENV_SOCKET, host.socket()).env_remove("LD_PRELOAD").args(["ss", "--json"]);
    let mut asked = Proc::spawn(host.logs(), "ss", command);
    within(LIMIT, || !asked.running()) && asked.finish(LIMIT).code == Some(0)
}

/// `tests/apps/hold.py`.
struct Held {
    proc: Proc,
    control: PathBuf,
}

impl Held {
    fn start(host: &Host, port: u16) -> Result<Held, String> {
        let control = host.file("control", "");
        let path = script("apps/hold.py").display().to_string();
        let args = [path.as_str(), &port.to_string(), &control.display().to_string()];
        let proc = host.start(Accel, "hold", PYTHON, &args);
        let mut held = Held { proc, control };
        held.wait("established")?;
        Ok(held)
    }

    fn expect(&mut self, command: &str, answer: &str) -> Result<(), String> {
        let told = OpenOptions::new().append(true).open(&self.control).and_then(|mut f| writeln!(f, "{command}"));
        told.map_err(|e| e.to_string())?;
        self.wait(answer)
    }

    fn wait(&mut self, answer: &str) -> Result<(), String> {
        let said = within(LIMIT, || self.proc.stdout().contains(answer) || !self.proc.running());
        if said && self.proc.stdout().contains(answer) {
            return Ok(());
        }
        Err(format!("A does not say {answer:?}: {}{}", self.proc.stdout(), self.proc.stderr()))
    }
}
