//! A host of the test's own: a temporary directory and a private monitor.

use crate::netns::NetHost;
use crate::{artifacts, net, process::Proc, stock_mode, Finished, Snapshot};
use fsocket_proto::paths::ENV_SOCKET;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Whether a program runs with the library (`Accel`) or without it (`Stock`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Stock,
    Accel,
}
pub use Side::{Accel, Stock};

/// Time limit for a server to start listening.
const START: Duration = Duration::from_secs(60);
/// The monitor's configuration file, in the host's directory.
const SETTINGS: &str = "fastsocketd.toml";

pub struct Host {
    monitor: Option<Proc>,
    dir: tempfile::TempDir,
    /// Directory for the output of programs; it is kept if the test fails.
    logs: PathBuf,
    /// The host made of a network namespace in which everything runs. `None`: the namespace of
    /// this process.
    place: Option<NetHost>,
    /// Whether the monitor keeps its state for the next monitor.
    keeps: bool,
    /// Whether the monitor serves all users, as the system's does.
    system: bool,
    /// Whether the monitor looks for policies of this machine.
    looks: bool,
}

/// Setting that stops the monitor from looking: this machine may have a firewall or Docker, which
/// do not concern the test.
const DO_NOT_LOOK: &str = "[[rule]]\naction = \"allow\"\n";

impl Host {
    /// Makes a temporary directory and, outside of stock mode, starts a monitor in it.
    #[track_caller]
    pub fn new() -> Host {
        let mut host = Host::make(None);
        host.start_unless_stock();
        host
    }

    /// As [`Host::new`], but the monitor can be restarted and its state kept.
    #[track_caller]
    pub fn keeping() -> Host {
        let mut host = Host::make(None);
        host.keeps = true;
        host.start_unless_stock();
        host
    }

    /// As [`Host::keeping`], in a host made of a network namespace.
    #[track_caller]
    pub fn keeping_on(place: &NetHost) -> Host {
        let mut host = Host::make(Some(place.clone()));
        host.keeps = true;
        host.start_unless_stock();
        host
    }

    /// As [`Host::new`], in a host made of a network namespace: the monitor and every command run
    /// there.
    #[track_caller]
    pub fn on(place: &NetHost) -> Host {
        let mut host = Host::make(Some(place.clone()));
        host.start_unless_stock();
        host
    }

    /// As [`Host::new`] or [`Host::on`], with a configuration file for the monitor.
    #[track_caller]
    pub fn configured(place: Option<&NetHost>, settings: &str) -> Host {
        let mut host = Host::make(place.cloned());
        host.file(SETTINGS, settings);
        host.start_unless_stock();
        host
    }

    /// As [`Host::on`], with a monitor that looks for policies which may refuse a connection
    /// there.
    #[track_caller]
    pub fn under_policy(place: &NetHost) -> Host {
        let mut host = Host::make(Some(place.clone()));
        host.looks = true;
        host.start_unless_stock();
        host
    }

    /// As [`Host::new`], with a monitor that serves all users, as the system's does.
    #[track_caller]
    pub fn for_all_users(settings: &str) -> Host {
        Host::for_all_users_with(settings, |_| ())
    }

    /// As [`Host::for_all_users`]; `special` changes the monitor's command, such as its
    /// capabilities.
    #[track_caller]
    pub fn for_all_users_with(settings: &str, special: impl FnOnce(&mut Command)) -> Host {
        Host::system(None, settings, special)
    }

    /// As [`Host::for_all_users`] in a host made of a network namespace.
    #[track_caller]
    pub fn for_all_users_on(place: &NetHost, settings: &str) -> Host {
        Host::system(Some(place.clone()), settings, |_| ())
    }

    #[track_caller]
    fn system(place: Option<NetHost>, settings: &str, special: impl FnOnce(&mut Command)) -> Host {
        let mut host = Host::make(place);
        (host.system, host.looks) = (true, settings.contains("[[rule]]"));
        set_mode(&host.dir.path().join("monitor"), 0o755);
        host.file(SETTINGS, settings);
        host.start_unless_stock_with(special);
        host
    }

    /// Makes a temporary directory. The test starts the monitor later.
    #[track_caller]
    pub fn stopped() -> Host {
        Host::make(None)
    }

    /// As [`Host::stopped`], for programs that run without the library.
    #[track_caller]
    pub fn without_monitor(place: &NetHost) -> Host {
        Host::make(Some(place.clone()))
    }

    #[track_caller]
    fn make(place: Option<NetHost>) -> Host {
        let dir = tempfile::Builder::new().prefix("fastsocket-test-").tempdir().expect("temporary directory");
        // Servers that drop their privileges must still be able to read their files.
        set_mode(dir.path(), 0o755);
        let logs = dir.path().join("logs");
        std::fs::create_dir(&logs).expect("log directory");
        std::fs::create_dir(dir.path().join("monitor")).expect("monitor directory");
        set_mode(&dir.path().join("monitor"), 0o700);
        Host { monitor: None, dir, logs, place, keeps: false, system: false, looks: false }
    }

    #[track_caller]
    fn start_unless_stock(&mut self) {
        self.start_unless_stock_with(|_| ());
    }

    #[track_caller]
    fn start_unless_stock_with(&mut self, special: impl FnOnce(&mut Command)) {
        if !stock_mode() {
            self.start_monitor_with(special);
        } else {
            eprintln!("FASTSOCKET_TEST_MODE=stock: kernel sockets, no path assertions");
        }
    }

    #[track_caller]
    pub fn start_monitor(&mut self) {
        self.start_monitor_with(|_| ());
    }

    /// Starts the monitor; `special` changes its command, such as its environment.
    #[track_caller]
    pub fn start_monitor_with(&mut self, special: impl FnOnce(&mut Command)) {
        let mut command = Command::new(artifacts::monitor());
        command.arg("--socket").arg(self.socket());
        if !self.system {
            command.args(["--private", "--linger", "600"]);
            // Run it as the system monitor, with a broker and a front.
            if std::env::var_os("FASTSOCKET_TEST_SPLIT").is_some() {
                command.arg("--split");
            }
        }
        if self.keeps {
            command.arg("--keep").arg(self.dir.path().join("monitor"));
        }
        let settings = std::fs::read_to_string(self.path().join(SETTINGS)).unwrap_or_default();
        if !self.looks && !settings.contains(DO_NOT_LOOK) {
            self.file(SETTINGS, format!("{settings}\n{DO_NOT_LOOK}"));
        }
        if self.path().join(SETTINGS).exists() {
            command.arg("--config").arg(self.path().join(SETTINGS));
        }
        self.place(&mut command);
        special(&mut command);
        let mut monitor = Proc::spawn(&self.logs, "fastsocketd", command);
        let socket = self.socket();
        let system = self.system;
        let up = net::wait_until(START, || {
            // After an upgrade an old monitor may have this socket, so wait for the message of the
            // new one.
            let says = !system || monitor.stderr().contains("(ABI ");
            !monitor.running() || says && net::is_seqpacket(&socket)
        });
        assert!(up.is_ok() && monitor.running(), "the monitor did not start: {}", monitor.stderr());
        self.monitor = Some(monitor);
        // The monitor listens before it can serve. A program waits only briefly for its answer
        // (`fallback.no_monitor`), so wait here.
        self.ask("stat");
    }

    pub fn monitor(&mut self) -> Option<&mut Proc> {
        self.monitor.as_mut()
    }

    /// Kills the monitor with SIGKILL.
    pub fn kill_monitor(&mut self) {
        self.monitor = None;
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    pub fn logs(&self) -> &Path {
        &self.logs
    }

    /// Path of the monitor's socket.
    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("monitor").join("monitor.sock")
    }

    /// Writes a file that all users may read.
    pub fn file(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path().join(name);
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent).expect("directory");
            set_mode(parent, 0o755);
        }
        std::fs::write(&path, content).expect("file");
        set_mode(&path, 0o644);
        path
    }

    /// A command on either side. It gets the environment that `fastsocket run` would give it.
    pub fn command(&self, side: Side, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        command.current_dir(self.path());
        self.place(&mut command);
        command.env_remove("LD_PRELOAD").env_remove(ENV_SOCKET).env("PYTHONUNBUFFERED", "1");
        if side == Accel && !stock_mode() {
            command.env("LD_PRELOAD", artifacts::library()).env(ENV_SOCKET, self.socket());
        }
        command
    }

    /// Starts a server and waits until it listens. If it has the library, also waits until the
    /// monitor (if one runs) knows the listener.
    #[track_caller]
    pub fn server(
        &self,
        side: Side,
        name: &str,
        port: u16,
        program: impl AsRef<std::ffi::OsStr>,
        args: &[&str],
    ) -> Proc {
        let mut command = self.command(side, program);
        command.args(args);
        let mut server = Proc::spawn(&self.logs, name, command);
        let known = || side == Stock || stock_mode() || self.monitor.is_none() || self.knows(port);
        let listens = net::wait_until(START, || !server.running() || (self.kernel_sockets(port, "0A") > 0 && known()));
        assert!(
            listens.is_ok() && server.running(),
            "{name} does not listen on {port} (running: {}, kernel: {}, known to the monitor: {})\n{}\n{}",
            server.running(),
            self.kernel_sockets(port, "0A"),
            known(),
            server.stdout(),
            server.stderr()
        );
        server
    }

    /// Runs a program to its end.
    #[track_caller]
    pub fn run(
        &self,
        side: Side,
        name: &str,
        limit: u64,
        program: impl AsRef<std::ffi::OsStr>,
        args: &[&str],
    ) -> Finished {
        self.start(side, name, program, args).finish(Duration::from_secs(limit))
    }

    /// Starts a program in the background.
    #[track_caller]
    pub fn start(&self, side: Side, name: &str, program: impl AsRef<std::ffi::OsStr>, args: &[&str]) -> Proc {
        let mut command = self.command(side, program);
        command.args(args);
        Proc::spawn(&self.logs, name, command)
    }

    fn place(&self, command: &mut Command) {
        if let Some(place) = &self.place {
            place.place(command);
        }
    }

    /// [`net::kernel_sockets`] in the network namespace of this host.
    pub fn kernel_sockets(&self, port: u16, state: &str) -> usize {
        match &self.place {
            Some(place) => place.within(|| net::kernel_sockets(port, state)),
            None => net::kernel_sockets(port, state),
        }
    }

    /// Whether the monitor knows a listener on this port.
    pub fn knows(&self, port: u16) -> bool {
        let suffix = format!(":{port}");
        self.snapshot().report.is_some_and(|r| r.listeners.iter().any(|l| l.local.ends_with(&suffix)))
    }

    /// The present counters.
    #[track_caller]
    pub fn snapshot(&self) -> Snapshot {
        if stock_mode() {
            return Snapshot::default();
        }
        // `stat` prints the counters and `ss` the rest of the report.
        let mut all = self.ask("stat");
        if let (Some(all), serde_json::Value::Object(more)) = (all.as_object_mut(), self.ask("ss")) {
            all.extend(more);
        }
        let report = serde_json::from_value(all).unwrap_or_else(|e| panic!("report: {e}"));
        Snapshot { report: Some(report) }
    }
}

impl Host {
    /// The output of `fastsocket stat --zones`, with an additional field `counters` that sums over
    /// all processes.
    #[track_caller]
    pub fn zones(&self) -> serde_json::Value {
        let mut zones = self.ask_with("stat", &["--zones"]);
        zones["counters"] = self.ask("stat")["totals"].take();
        zones
    }

    /// The output of `fastsocket VERB --json`.
    #[track_caller]
    fn ask(&self, verb: &str) -> serde_json::Value {
        self.ask_with(verb, &[])
    }

    #[track_caller]
    fn ask_with(&self, verb: &str, more: &[&str]) -> serde_json::Value {
        let mut command = Command::new(artifacts::cli());
        command.env(ENV_SOCKET, self.socket()).env_remove("LD_PRELOAD").args([verb, "--json"]).args(more);
        let output = Proc::spawn(&self.logs, verb, command).finish(Duration::from_secs(60)).success().stdout;
        serde_json::from_str(&output).unwrap_or_else(|e| panic!("{verb} --json: {e}\n{output}"))
    }
}

impl Default for Host {
    fn default() -> Self {
        Host::new()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if let Some(monitor) = self.monitor.as_mut().filter(|_| self.keeps) {
            // At SIGTERM the monitor removes what it has pinned.
            monitor.signal(libc::SIGTERM);
            let _ = net::wait_until(START, || !monitor.running());
        }
        if self.monitor.as_mut().is_some_and(|m| self.system && m.running()) {
            // This monitor keeps its pinned programs for the next one, unless their listeners have
            // ended. Wait until these are gone.
            let files = std::fs::read_dir(self.dir.path().join("monitor")).into_iter().flatten().flatten();
            let kept = files.map(|f| f.path()).filter(|f| f.to_string_lossy().contains("/zones-")).collect::<Vec<_>>();
            let is_empty = |text: String| text.contains("\"groups\":[]");
            let none = || kept.iter().all(|file| std::fs::read_to_string(file).map_or(true, is_empty));
            let _ = net::wait_until(START, none).inspect_err(|e| eprintln!("pins are left: {e}"));
        }
        if std::thread::panicking() && std::env::var_os("FASTSOCKET_TEST_KEEP").is_some() {
            let kept = self.dir.path().with_extension("kept");
            if std::fs::rename(self.dir.path(), &kept).is_ok() {
                eprintln!("kept: {}", kept.display());
            }
        }
    }
}

fn set_mode(path: &Path, mode: u32) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).expect("permissions");
}
