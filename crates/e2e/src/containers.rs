//! Pairs of containers (network namespaces on bridges of one host), and the counters of their
//! connections.

use fsocket_testkit::host::{Accel, Side, Stock};
use fsocket_testkit::netns::{Containers, NetHost};
use fsocket_testkit::{artifacts, helper, net, stock_mode, Delta, Host, Proc, PYTHON};
use std::net::IpAddr;
use std::process::Command;
use std::time::Duration;

pub const REQUESTS: &str = "800";
pub const CONNECTIONS: i128 = 6;

/// A server in a container, and the monitor on its host.
pub struct Pair {
    // Dropped first: when the server ends, the programs that the monitor has pinned for it go
    // away, too.
    _server: Proc,
    pub host: Host,
    pub net: Containers,
    pub port: u16,
    /// Port of the servers that [`Pair::start`] starts by name.
    pub named: u16,
}

/// Starts `containers.py` in a container.
pub fn start(host: &Host, side: Side, place: &NetHost, name: &str, args: &[&str]) -> Proc {
    let path = helper("containers.py").display().to_string();
    let mut command = host.command(side, PYTHON);
    command.arg(path).args(args);
    place.place(&mut command);
    Proc::spawn(host.logs(), name, command)
}

impl Pair {
    /// A monitor on the host, and a server in its container.
    pub fn new(server_side: Side, address: &str) -> Pair {
        Pair::on(server_side, address, Host::on)
    }

    pub fn on(server_side: Side, address: &str, monitor: impl FnOnce(&NetHost) -> Host) -> Pair {
        let net = Containers::new().expect("containers");
        let host = monitor(&net.host);
        let port = net::free_port();
        let server = start(&host, server_side, &net.server, "serve", &["serve", &port.to_string(), address]);
        let known = || server_side == Stock || stock_mode() || host.knows(port);
        let listens = || net.server.within(|| net::kernel_sockets(port, "0A")) > 0 && known();
        net::wait_until(Duration::from_secs(60), listens).expect("the server listens, and the monitor knows it");
        let pair = Pair { _server: server, host, net, port, named: net::free_port() };
        if server_side == Accel && !stock_mode() {
            // The first process of a container makes the monitor load a BPF program. Until this is
            // done, connections stay in the kernel.
            let to = pair.net.server.interfaces[0].v6;
            let to = if address == "::" { to.into() } else { pair.net.server4() };
            let over = || pair.ask(Accel, &pair.net.neighbour, to, pair.port).get("path_upgrade") != 0;
            net::wait_until(Duration::from_secs(60), over).expect("a connection goes over");
        }
        pair
    }

    pub fn ask(&self, side: Side, from: &NetHost, to: IpAddr, port: u16) -> Delta {
        self.ask_more(side, from, to, port, &[]).0
    }

    /// Runs the client. Returns the changes of the counters, and its output.
    pub fn ask_more(&self, side: Side, from: &NetHost, to: IpAddr, port: u16, more: &[&str]) -> (Delta, String) {
        let (port, number, to) = (port.to_string(), CONNECTIONS.to_string(), to.to_string());
        let args = [&["ask", &port, &to, REQUESTS, &number], more].concat();
        self.count(|| start(&self.host, side, from, "ask", &args))
    }

    /// Runs a client that makes so many connections, one after the other, with so many requests
    /// each.
    pub fn ask_in_turn(&self, connections: i128, requests: i128) -> Delta {
        let numbers = [requests, connections].map(|n| n.to_string());
        let (port, to) = (self.port.to_string(), self.net.server4().to_string());
        let args = ["ask", &port, &to, &numbers[0], &numbers[1], "in-turn"];
        self.count(|| start(&self.host, Accel, &self.net.client, "ask", &args)).0
    }

    pub fn count(&self, client: impl FnOnce() -> Proc) -> (Delta, String) {
        let before = self.host.snapshot();
        let client = client();
        let said = client.finish(Duration::from_secs(60)).success().says("ok").stdout.clone();
        // Wait until the servers have closed all connections.
        let open = || [self.port, self.named].iter().map(|port| net::kernel_sockets(*port, "01")).sum::<usize>();
        let closed = || [&self.net.server, &self.net.neighbour].iter().all(|server| server.within(open) == 0);
        net::wait_until(Duration::from_secs(60), closed).expect("connections are closed");
        (self.host.snapshot().since(&before), said)
    }

    /// Starts another server.
    pub fn start(&self, side: Side, place: &NetHost, args: &[&str]) -> Proc {
        let server = start(&self.host, side, place, args[0], args);
        self.accepts(side, place, args[1].parse().expect("a port"), server)
    }

    pub fn accepts(&self, side: Side, place: &NetHost, port: u16, server: Proc) -> Proc {
        let known = || side == Stock || stock_mode() || self.host.knows(port);
        let listens = || place.within(|| net::kernel_sockets(port, "0A")) > 0 && known();
        net::wait_until(Duration::from_secs(60), listens).expect("it listens, and the monitor knows it");
        server
    }
}

/// Asserts that both sides moved every connection to shared memory, and that no peer was counted
/// as hostile.
#[track_caller]
pub fn all_over(delta: &Delta) {
    if stock_mode() {
        return eprintln!("PATH NOT ASSERTED: stock mode");
    }
    assert_eq!(delta.get("path_upgrade"), 2 * CONNECTIONS, "{delta}");
    assert_eq!(delta.get("hostile_peer") + delta.get("path_switch"), 0, "{delta}");
    // A connection makes two or eighteen requests in the kernel before it moves, and more only on
    // a busy machine. All requests of a connection are 11 MB.
    assert!(delta.get("tx_bytes") > 2 * CONNECTIONS * 3_000_000, "{delta}");
}

/// Runs a program with the library although `starter`, which starts it, runs without.
pub fn behind(host: &Host, place: &NetHost, starter: &[&str], program: &[&str]) -> Command {
    let mut command = host.command(Stock, starter[0]);
    command.args(&starter[1..]).arg("env");
    if !stock_mode() {
        let (library, socket) = (artifacts::library(), host.socket());
        command.arg(format!("LD_PRELOAD={}", library.display()));
        command.arg(format!("FASTSOCKET_SOCKET={}", socket.display()));
    }
    command.args(program);
    place.place(&mut command);
    command
}
