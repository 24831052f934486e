//! Real servers in a host. Each can run unchanged, with `SO_REUSEPORT`, or under `fastsocket run`.
//!
//! Every server closes the connection after each answer, unless the client wants to keep it.
//! Servers deliver the folder `www/` of their [`Host`], and their workers are pinned.

use crate::{artifacts, find_program, net, Host, Proc, Side};
use fsocket_proto::paths::ENV_SOCKET;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

const START: Duration = Duration::from_secs(60);

/// The way in which a server runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Way {
    /// Without the library, one listen socket for all workers.
    Stock,
    /// Without the library, a listen socket for each worker, if the server has an option for that.
    Reuseport,
    /// Under `fastsocket run --no-shm`, one listen socket for all workers.
    Ours,
    /// As `Ours`. In addition `fastsocket steer` brings packets of opened connections to the CPU
    /// that opened them; see [`steer`].
    Steered,
    /// Under `fastsocket run --no-shm`, a listen socket for each worker, if the server has an
    /// option for that.
    Own,
    /// Under `fastsocket run`, one listen socket for all workers. Clients on this host that have
    /// the library use shared memory.
    Shm,
}

impl Way {
    /// The ways that serve clients on other hosts.
    pub const ALL: [Way; 5] = [Way::Stock, Way::Reuseport, Way::Ours, Way::Own, Way::Steered];

    /// Whether the server makes a listen socket for each worker.
    fn shares(self) -> bool {
        matches!(self, Way::Reuseport | Way::Own)
    }

    /// Whether the server runs with the library and a monitor.
    pub fn is_ours(self) -> bool {
        matches!(self, Way::Ours | Way::Own | Way::Steered | Way::Shm)
    }

    pub fn name(self) -> &'static str {
        match self {
            Way::Stock => "stock",
            Way::Reuseport => "reuseport",
            Way::Ours => "ours",
            Way::Own => "own",
            Way::Steered => "steered",
            Way::Shm => "shm",
        }
    }

    /// A command of this way in a host.
    pub fn command(self, host: &Host, program: &str) -> Command {
        let path = find_program(program).unwrap_or_else(|| panic!("{program} is not installed"));
        self.command_of(host, path)
    }

    fn command_of(self, host: &Host, path: PathBuf) -> Command {
        if !self.is_ours() {
            return host.command(Side::Stock, path);
        }
        let mut command = host.command(Side::Stock, artifacts::cli());
        command.env(ENV_SOCKET, host.socket()).arg("run");
        if self != Way::Shm {
            command.arg("--no-shm");
        }
        command.arg("--").arg(path);
        command
    }
}

/// Waits until so many workers have a local listen socket. A worker gets it at its first use of
/// the listener, later than the listen. Until then, connections come from the global socket, to
/// any worker.
#[track_caller]
pub fn wait_zones(host: &Host, workers: u64) {
    let joined = || host.snapshot().total("zone_joins") >= workers;
    net::wait_until(START, joined).unwrap_or_else(|e| panic!("{workers} local listen sockets: {e}"));
}

/// Steers a device of the host by RFD until the host's monitor ends.
#[track_caller]
pub fn steer(host: &Host, device: &str) {
    let mut command = host.command(Side::Stock, artifacts::cli());
    command.env(ENV_SOCKET, host.socket()).args(["steer", device, "--policy", "rfd"]);
    Proc::spawn(host.logs(), "steer", command).finish(START).success();
}

/// Starts a server and waits until it listens on each of the ports.
#[track_caller]
fn start(host: &Host, name: &str, command: Command, listen: &[SocketAddr]) -> Proc {
    let mut server = Proc::spawn(host.logs(), name, command);
    let ready = net::wait_until(START, || {
        !server.running() || listen.iter().all(|address| host.kernel_sockets(address.port(), "0A") > 0)
    });
    assert!(
        ready.is_ok() && server.running(),
        "{name} does not listen on {listen:?}\n{}\n{}",
        server.stdout(),
        server.stderr()
    );
    server
}

/// nginx; its workers are processes.
#[track_caller]
pub fn nginx(host: &Host, way: Way, listen: &[SocketAddr], workers: usize) -> Proc {
    nginx_with_backlog(host, way, listen, workers, 4096)
}

/// As [`nginx`], with another backlog.
#[track_caller]
pub fn nginx_with_backlog(host: &Host, way: Way, listen: &[SocketAddr], workers: usize, backlog: u32) -> Proc {
    let dir = host.path().join("nginx");
    std::fs::create_dir_all(&dir).expect("directory");
    let reuseport = if way.shares() { " reuseport" } else { "" };
    let listens: String = listen.iter().map(|a| format!("listen {a} backlog={backlog}{reuseport}; ")).collect();
    let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .iter()
        .map(|kind| format!("{kind}_temp_path {}/{kind}; ", dir.display()))
        .collect();
    let config = format!(
        "user root;\ndaemon off;\nworker_processes {workers};\nworker_cpu_affinity auto;\nworker_rlimit_nofile 16384;\n\
         pid {0}/pid;\nerror_log {0}/error.log notice;\nevents {{ worker_connections 4096; accept_mutex off; }}\n\
         http {{ access_log off; open_file_cache max=16; {temporary}\n\
         server {{ {listens} root {1}/www; }} }}\n",
        dir.display(),
        host.path().display()
    );
    let config = host.file("nginx/nginx.conf", config);
    let mut command = way.command(host, "nginx");
    command.arg("-p").arg(&dir).arg("-c").arg(config).arg("-e").arg(dir.join("error.log"));
    start(host, "nginx", command, listen)
}

/// haproxy in HTTP mode; its workers are threads.
///
/// By default it sets SO_REUSEPORT on every listen socket, so that the next haproxy can bind the
/// address. Such a server shares its address, and gets no zones. So this sets `noreuseport`,
/// except where each thread should have a socket. By default haproxy also hands every other
/// accepted connection to another thread, to correct unfair queues. That would move connections
/// out of their zones, so servers with the library get `multi-queue off`.
#[track_caller]
pub fn haproxy(host: &Host, way: Way, listen: SocketAddr, backend: SocketAddr, threads: usize) -> Proc {
    let (shards, global) = match way {
        Way::Reuseport | Way::Own => (" shards by-thread", ""),
        Way::Stock => ("", "  noreuseport\n"),
        Way::Ours | Way::Steered | Way::Shm => ("", "  noreuseport\n  tune.listener.multi-queue off\n"),
    };
    let config = format!(
        "global\n{global}  maxconn 8000\n  nbthread {threads}\n  cpu-map auto:1/1-{threads} 0-{}\n\
         defaults\n  mode http\n  option httpclose\n  retries 0\n  timeout connect 5s\n  timeout client 20s\n  timeout server 20s\n\
         frontend f\n  bind {listen} backlog 4096{shards}\n  default_backend b\n\
         backend b\n  server s {backend}\n",
        threads - 1
    );
    let config = host.file("haproxy/haproxy.cfg", config);
    let mut command = way.command(host, "haproxy");
    command.arg("-db").arg("-f").arg(config);
    start(host, "haproxy", command, &[listen])
}

/// lighttpd; its workers are processes. It has no option for SO_REUSEPORT.
#[track_caller]
pub fn lighttpd(host: &Host, way: Way, listen: SocketAddr, workers: usize) -> Proc {
    assert!(!way.shares(), "lighttpd cannot");
    let bind = match listen.ip() {
        IpAddr::V4(ip) => ip.to_string(),
        IpAddr::V6(ip) => format!("[{ip}]"),
    };
    let config = format!(
        "server.document-root = \"{0}/www\"\nserver.bind = \"{bind}\"\nserver.port = {1}\n\
         server.max-worker = {workers}\nserver.listen-backlog = 4096\nserver.errorlog = \"{0}/lighttpd.log\"\n",
        host.path().display(),
        listen.port()
    );
    let config = host.file("lighttpd/lighttpd.conf", config);
    let mut command = way.command(host, "lighttpd");
    command.arg("-D").arg("-f").arg(config);
    start(host, "lighttpd", command, &[listen])
}

/// The demo server; `more` are further arguments.
#[track_caller]
pub fn demo(host: &Host, way: Way, listen: &[SocketAddr], workers: usize, more: &[&str]) -> Proc {
    let mut command = way.command_of(host, artifacts::demo());
    command.args(["--workers", &workers.to_string()]).args(more);
    if way.shares() {
        command.arg("--reuseport");
    }
    for address in listen {
        command.args(["--address", &address.to_string()]);
    }
    let mut server = start(host, "demo", command, listen);
    server.wait_stdout("listening on", START);
    if way.shares() {
        let all = || host.kernel_sockets(listen[0].port(), "0A") >= workers;
        net::wait_until(START, all).expect("a listen socket for each worker");
    }
    server
}
