//! A monitor for all users, servers under the library, and the resources that they use.

use anyhow::{bail, Context, Result};
use fsocket_proto::paths::ENV_SOCKET;
use fsocket_testkit::{artifacts, find_program, helper, net, Proc, PYTHON};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const START: Duration = Duration::from_secs(15);
/// Users of the servers and of the honest clients, and the first hostile user.
pub const SERVERS: u32 = 3001;
pub const CLIENTS: u32 = 3101;
pub const HOSTILE: u32 = 4001;

pub struct Stage {
    pub dir: PathBuf,
    pub monitor: Proc,
}

impl Drop for Stage {
    /// A monitor that ends leaves its pins for the next one, unless their listeners have ended. So
    /// wait for the end of the listeners.
    fn drop(&mut self) {
        if self.monitor.running() {
            let _ = net::wait_until(START, || self.has_no_zones()).inspect_err(|e| eprintln!("pins are left: {e}"));
        }
    }
}

/// A server under attack.
pub struct Victim {
    pub kind: &'static str,
    pub name: &'static str,
    pub port: u16,
    pub proc: Proc,
    /// Does the server run with the library? If so, its clients do, too.
    pub preloaded: bool,
}

impl Stage {
    /// Starts a monitor with a configuration file that has this text.
    ///
    /// # Errors
    /// The monitor does not start.
    pub fn new(dir: &Path, config: &str) -> Result<Stage> {
        std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o755))?;
        let file = dir.join("fastsocketd.toml");
        std::fs::write(&file, config)?;
        let mut command = Command::new(artifacts::monitor());
        command.arg("--socket").arg(dir.join("monitor.sock")).arg("--config").arg(file);
        let mut monitor = Proc::spawn(dir, "fastsocketd", command);
        let socket = dir.join("monitor.sock");
        let up = net::wait_until(START, || !monitor.running() || socket.exists());
        if up.is_err() || !monitor.running() {
            bail!("the monitor does not start: {}", monitor.stderr());
        }
        Ok(Stage { dir: dir.to_owned(), monitor })
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.join("monitor.sock")
    }

    /// Number of connections that a user's processes have opened over shared memory. (The totals of
    /// all users would include what hostile processes write into their own counters.)
    ///
    /// # Errors
    /// `fastsocket stat` does not work.
    pub fn over_shm(&self, uid: u32) -> Result<u64> {
        self.counter(uid, "connect_shm")
    }

    /// A counter of a user's processes.
    ///
    /// # Errors
    /// `fastsocket stat` does not work.
    pub fn counter(&self, uid: u32, name: &str) -> Result<u64> {
        let mut c = Command::new(artifacts::cli());
        c.uid(uid).gid(uid).env(ENV_SOCKET, self.socket()).args(["stat", "--json"]);
        let said: serde_json::Value = serde_json::from_slice(&c.output()?.stdout)?;
        Ok(said["totals"][name].as_u64().unwrap_or(0))
    }

    /// Has the monitor seen the end of all listeners? (The monitor writes its file of listeners
    /// later than it makes the pins.)
    fn has_no_zones(&self) -> bool {
        let mut c = Command::new(artifacts::cli());
        c.env(ENV_SOCKET, self.socket()).args(["stat", "--zones", "--json"]);
        let said = c.output().ok().and_then(|o| serde_json::from_slice::<serde_json::Value>(&o.stdout).ok());
        said.is_some_and(|v| v["groups"].as_array().is_some_and(Vec::is_empty))
    }

    /// A command for a program of user `uid`, with or without the library.
    pub fn command(&self, uid: u32, program: impl AsRef<std::ffi::OsStr>, preloaded: bool) -> Command {
        let mut command = Command::new(program);
        command.current_dir(&self.dir).uid(uid).gid(uid).env("PYTHONUNBUFFERED", "1");
        if preloaded {
            command.env("LD_PRELOAD", artifacts::library()).env(ENV_SOCKET, self.socket());
        }
        command
    }

    /// Makes a directory of the servers' user for a server's files.
    pub(crate) fn home(&self, name: &str, preloaded: bool) -> Result<PathBuf> {
        let home = self.dir.join(if preloaded { "ours" } else { "stock" }).join(name);
        std::fs::create_dir_all(&home)?;
        std::os::unix::fs::chown(&home, Some(SERVERS), Some(SERVERS))?;
        Ok(home)
    }

    /// Starts the servers with these names.
    ///
    /// # Errors
    /// A server does not start.
    pub fn servers(&self, names: &[String], preloaded: bool) -> Result<Vec<Victim>> {
        let found = |name| find_program(name).with_context(|| format!("{name} is not installed"));
        let server = |kind, name, port, args: &[&str], program: &Path| -> Result<Victim> {
            let mut command = self.command(SERVERS, program, preloaded);
            command.args(args).current_dir(self.home(name, preloaded)?);
            let mut proc = Proc::spawn(&self.dir, if preloaded { name } else { "stock" }, command);
            let up = net::wait_until(START, || !proc.running() || net::kernel_sockets(port, "0A") > 0);
            if up.is_err() || !proc.running() {
                bail!("{name} does not listen: {}{}", proc.stdout(), proc.stderr());
            }
            Ok(Victim { kind, name, port, proc, preloaded })
        };
        names
            .iter()
            .map(|name| {
                let port = net::free_port();
                let at = port.to_string();
                let echo = helper("echo_server.py").display().to_string();
                match name.as_str() {
                    "nginx" => {
                        let home = self.home("nginx", preloaded)?.display().to_string();
                        let conf = nginx(Path::new(&home), port)?;
                        server("http", "nginx", port, &["-p", &home, "-c", &conf], &found("nginx")?)
                    }
                    "redis" => {
                        let args = ["--port", &at, "--bind", "127.0.0.1", "--save", "", "--protected-mode", "no"];
                        server("redis", "redis", port, &args, &found("redis-server")?)
                    }
                    "threaded" => server("echo", "threaded", port, &[&echo, "threaded", &at], Path::new(PYTHON)),
                    "fork" => server("echo", "fork", port, &[&echo, "fork", &at], Path::new(PYTHON)),
                    "epoll" => server("echo", "epoll", port, &[&echo, "epoll", &at], Path::new(PYTHON)),
                    other => bail!("no server {other}"),
                }
            })
            .collect()
    }
}

/// Writes a configuration for nginx, and returns its path.
fn nginx(dir: &Path, port: u16) -> Result<String> {
    std::fs::create_dir_all(dir.join("www"))?;
    std::fs::write(dir.join("www/1000"), crate::honest::page())?;
    let d = dir.display();
    let text = format!(
        "daemon off;\nworker_processes 2;\npid {d}/pid;\nerror_log {d}/error.log;\nevents {{ worker_connections 4096; }}\n\
         http {{ access_log off; keepalive_requests 1000000;\n client_body_temp_path {d}/b; proxy_temp_path {d}/p;\n\
         fastcgi_temp_path {d}/f; uwsgi_temp_path {d}/u; scgi_temp_path {d}/s;\n\
         server {{ listen 127.0.0.1:{port}; root {d}/www; }} }}\n"
    );
    std::fs::write(dir.join("conf"), text)?;
    Ok(dir.join("conf").display().to_string())
}

impl Victim {
    /// CPU time of the server and its children in seconds, including children that have ended.
    pub fn cpu(&self) -> f64 {
        cpu_of(self.proc.pid())
    }

    /// Resident memory of the server and its children, in MiB.
    pub fn memory(&self) -> u64 {
        tree(self.proc.pid()).iter().map(|pid| resident(*pid)).sum()
    }
}

pub fn resident(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/statm")).unwrap_or_default();
    (text.split(' ').nth(1).and_then(|n| n.parse::<u64>().ok()).unwrap_or(0) * 4096) >> 20
}

pub fn children(pid: u32) -> Vec<u32> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    text.split_whitespace().filter_map(|n| n.parse().ok()).collect()
}

pub fn tree(pid: u32) -> Vec<u32> {
    std::iter::once(pid).chain(children(pid).into_iter().flat_map(tree)).collect()
}

pub fn cpu_of(pid: u32) -> f64 {
    let ticks = |pid: &u32| {
        let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let rest = text.rsplit(") ").next().unwrap_or_default().to_owned();
        let field = |n: usize| rest.split(' ').nth(n).and_then(|w| w.parse::<u64>().ok()).unwrap_or(0);
        // utime, stime, cutime, cstime
        (11..15).map(field).sum::<u64>()
    };
    tree(pid).iter().map(ticks).sum::<u64>() as f64 / 100.0
}
