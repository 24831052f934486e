//! Fresh hosts with a running server, and the clients that connect to it.

use super::client::{self, Client};
use super::{cpu, Args, Kind, Path};
use anyhow::{anyhow, ensure, Context, Result};
use fsocket_testkit::netns::{Chain, Receive};
use fsocket_testkit::servers;
use fsocket_testkit::{artifacts, find_program, net, Host, Proc, Side, Snapshot};
use serde_json::Value;
use std::net::{Ipv4Addr, SocketAddr};
use std::process::Command;
use std::time::Duration;

const OFF: &str = "[balance]\nenabled = false\n";

/// Fresh hosts with a running server.
pub struct Stage {
    _server: Proc,
    host: Host,
    front: SocketAddr,
    kind: Kind,
    /// None: clients are on the server's host.
    chain: Option<Chain>,
}

impl Stage {
    /// `receives`: number of CPUs that receive packets, from CPU 0 on.
    pub fn new(kind: Kind, args: &Args, backlog: u32, receives: usize) -> Result<Stage> {
        let (cpus, path) = (cpu::count(), args.path);
        let chain = match path {
            Path::Network => {
                let receive = Receive::Threads((0..receives).collect());
                Some(Chain::new(cpus, &receive).map_err(|e| anyhow!(e))?)
            }
            Path::Shm => None,
        };
        let place = chain.as_ref().map(|c| &c.middle);
        let host = match (kind, place) {
            (Kind::Reuseport, Some(place)) => Host::without_monitor(place),
            (Kind::Unbalanced, _) => Host::configured(place, OFF),
            _ => Host::configured(place, ""),
        };
        host.file("www/64", [b'x'; super::BODY]);
        let front: SocketAddr = match &chain {
            Some(chain) => (chain.middle_front(), 80).into(),
            None => (Ipv4Addr::LOCALHOST, net::free_port()).into(),
        };
        let server = servers::nginx_with_backlog(&host, kind.way(path), &[front], cpus, backlog);
        if chain.is_some() && kind != Kind::Reuseport {
            servers::wait_zones(&host, cpus as u64);
        }
        if let (Some(chain), true) = (&chain, kind != Kind::Reuseport && args.steer) {
            let mut steer = host.command(Side::Stock, artifacts::cli());
            steer.env("FASTSOCKET_SOCKET", host.socket());
            steer.args(["steer", &chain.middle.interfaces[0].device, "--policy", "flow-groups"]);
            Proc::spawn(host.logs(), "steer", steer).finish(Duration::from_secs(20)).success();
            cpu::urgent_cpumaps()?;
        }
        Ok(Stage { _server: server, host, front, kind, chain })
    }

    /// A command that runs `program` where the clients are.
    fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        match &self.chain {
            Some(chain) => {
                let mut command = Command::new(program);
                chain.client.place(&mut command);
                command
            }
            None => self.host.command(if self.kind == Kind::Reuseport { Side::Stock } else { Side::Accel }, program),
        }
    }

    /// Requests per second that wrk gets.
    pub fn full_rate(&self, seconds: u32) -> Result<f64> {
        let mut wrk = self.command(find_program("wrk").context("wrk is not installed")?);
        wrk.args([format!("-t{}", cpu::count()), "-c64".to_owned(), format!("-d{seconds}s")]);
        wrk.args(["-H", "Connection: close"]).arg(format!("http://{}/64", self.front));
        let said = Proc::spawn(self.host.logs(), "wrk", wrk).finish(Duration::from_secs(60)).success().stdout;
        ensure!(!said.contains("Socket errors") && !said.contains("Non-2xx"), "wrk: {said}");
        let rate = said.lines().find_map(|line| line.strip_prefix("Requests/sec:")?.trim().parse().ok());
        rate.with_context(|| format!("wrk: no rate in {said}"))
    }

    /// Starts clients that begin `rate` requests per second. `timeout`: seconds until a client gives up.
    pub fn drive(&self, rate: f64, timeout: u64) -> Result<Client> {
        let Some(chain) = &self.chain else {
            let mut command = self.command(std::env::current_exe()?);
            command.args(["--drive", &self.front.to_string(), "--rate", &rate.to_string()]);
            command.args(["--timeout", &timeout.to_string()]);
            let mut program = Proc::spawn(self.host.logs(), "clients", command);
            program.wait_stdout(client::HERE, Duration::from_secs(10));
            return Ok(Client::Program(program));
        };
        Ok(Client::start(&chain.client, self.front, rate, Duration::from_secs(timeout)))
    }

    pub fn zones(&self) -> Value {
        self.host.zones()
    }

    /// Counters of the server and the clients, if there is a monitor.
    pub fn counted(&self) -> Option<Snapshot> {
        (self.kind != Kind::Reuseport).then(|| self.host.snapshot())
    }

    /// Starts a command of `fastsocket` beside the server and its clients.
    pub fn watch(&self, args: &[&str]) -> Proc {
        let mut stat = self.host.command(Side::Stock, artifacts::cli());
        stat.env("FASTSOCKET_SOCKET", self.host.socket()).args(args);
        Proc::spawn(self.host.logs(), "watch", stat)
    }
}
