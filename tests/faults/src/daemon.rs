//! Faults of the monitor's own system calls. The monitor may refuse requests. It must not die,
//! hang, or break an existing connection or a starting program.

use crate::campaign::Verdict;
use crate::plan::{Extent, Planned};
use crate::trap::{within, Fault, Faults, Seen, Trap, Whose};
use anyhow::{bail, Context, Result};
use fsocket_testkit::host::{Accel, Side};
use fsocket_testkit::{helper, net, Host, Proc, PYTHON};
use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);

/// Plans the faults, from the calls of a run without faults.
pub fn plan(extent: Extent) -> Result<Vec<Fault>> {
    match scenario(Faults::None)? {
        (seen, Verdict::Same) => Ok(Planned::of(&seen.sites, extent).faults),
        (_, other) => bail!("without a fault: {other:?}"),
    }
}

pub fn run(fault: Fault) -> Result<Verdict> {
    let (seen, verdict) = scenario(Faults::One(fault))?;
    Ok(if seen.failed == 0 && matches!(verdict, Verdict::Same) { Verdict::Missed } else { verdict })
}

/// Runs the scenario with a signal that ends each of the monitor's calls once. The monitor must
/// refuse nothing.
pub fn interrupted() -> Result<(Seen, Verdict)> {
    scenario(Faults::Signals)
}

/// Asks for a report while each of the monitor's calls takes longer than its watchdog waits. The
/// monitor must not refuse the report.
pub fn slow(each: Duration) -> Result<Verdict> {
    let (mut host, trap) = trapped(Faults::None)?;
    trap.delay(each);
    let verdict = if report(&host) { Verdict::Same } else { Verdict::Wrong("a report is refused".into()) };
    trap.delay(Duration::ZERO);
    host.kill_monitor();
    Ok(verdict)
}

/// Client A has a connection before the fault. Then a server starts, client B sends it requests,
/// and a report is made. The server and B must succeed. Afterwards A continues, and the monitor
/// serves a client C.
fn scenario(faults: Faults) -> Result<(Seen, Verdict)> {
    let (mut host, trap) = trapped(faults)?;
    let verdict = match steps(&mut host, &trap, faults == Faults::Signals) {
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

/// Starts a monitor under a trap that is not armed yet.
fn trapped(faults: Faults) -> Result<(Host, Trap)> {
    let mut host = Host::stopped();
    let mut trap = None;
    host.start_monitor_with(|command| trap = Some(Trap::set(command, Whose::Program, faults, false)));
    Ok((host, trap.context("no trap")??))
}

/// `refuses_nothing`: the monitor must refuse nothing in spite of the faults.
fn steps(host: &mut Host, trap: &Trap, refuses_nothing: bool) -> Result<(), String> {
    let (_first, port) = echo_server(host, "epoll")?;
    let mut a = Held::start(host, port)?;
    let first = host.snapshot();
    trap.arm();
    let (second, other) = echo_server(host, "threaded")?;
    if refuses_nothing && !within(LIMIT, || host.knows(other)) {
        return Err("a listener is refused".into());
    }
    client(host, Accel, other, "B")?;
    drop(second);
    let refused = !report(host);
    a.expect("echo", "echoed")?;
    trap.disarm();
    if refuses_nothing && refused {
        return Err("a report is refused".into());
    }
    // (The last fault may still break the connection of one program. This report may fail instead
    // of a later request.)
    if !within(LIMIT, || report(host)) {
        return Err("afterwards there is no report".into());
    }
    if !host.monitor().is_some_and(|m| m.running()) {
        return Err("the monitor has died".into());
    }
    let before = host.snapshot();
    let meanwhile = before.since(&first);
    if refuses_nothing && meanwhile.get("connect_shm") < 3 {
        return Err(format!("B is served by the kernel\n{meanwhile}"));
    }
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
    let path = helper("echo_server.py").display().to_string();
    let mut server = host.start(Accel, kind, PYTHON, &[&path, kind, &port.to_string()]);
    let up = within(LIMIT, || !server.running() || host.kernel_sockets(port, "0A") > 0);
    if !up || !server.running() {
        return Err(format!("a server does not start: {}", server.stderr()));
    }
    std::thread::sleep(Duration::from_millis(50));
    Ok((server, port))
}

fn client(host: &Host, side: Side, port: u16, who: &str) -> Result<(), String> {
    let path = helper("echo_client.py").display().to_string();
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

/// Asks for a report. Returns false if it is refused.
fn report(host: &Host) -> bool {
    let mut command = std::process::Command::new(fsocket_testkit::artifacts::cli());
    command.env(fsocket_proto::paths::ENV_SOCKET, host.socket()).env_remove("LD_PRELOAD").args(["ss", "--json"]);
    let mut asked = Proc::spawn(host.logs(), "ss", command);
    within(LIMIT, || !asked.running()) && asked.finish(LIMIT).code == Some(0)
}

/// A running `tests/apps/hold.py`.
struct Held {
    proc: Proc,
    control: PathBuf,
}

impl Held {
    fn start(host: &Host, port: u16) -> Result<Held, String> {
        let control = host.file("control", "");
        let path = helper("hold.py").display().to_string();
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
