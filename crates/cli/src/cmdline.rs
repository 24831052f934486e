//! Arguments of the commands.

use clap::Args;
use fsocket_client::locate::Pieces;
use fsocket_tune::CpuSet;
use std::ffi::OsString;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

/// The environment variables of library and commands, as in [`fsocket_proto::paths`].
pub const ENVIRONMENT: &str = "\
Environment:
  FASTSOCKET_SOCKET   the monitor's socket [default: the system's, else a private one]
  FASTSOCKET_DISABLE  parts that are off, as --no-shm, --no-zones, --no-balance: shm,zones,balance
  FASTSOCKET_PIN      as --pin
  FASTSOCKET_UPGRADE  calls on a kernel connection before it may move to shared memory; 0: never
  FASTSOCKET_PATIENCE milliseconds that a program waits for a busy monitor before it uses the kernel [default: 250]
  FASTSOCKET_SUMMARY  as --summary: the number of the process that prints in any case
  FASTSOCKET_LIBRARY, FASTSOCKET_MONITOR  as --library, --monitor
  FASTSOCKET_CONFIG, FASTSOCKET_LOG  the monitor's: see fastsocketd(8)";

/// Check whether this machine has what is needed
#[derive(Debug, Args)]
pub struct Doctor {
    #[command(flatten)]
    pub pieces: Pieces,
    /// Check also whether this program can be accelerated
    #[arg(long, value_name = "FILE")]
    pub program: Option<PathBuf>,
}

/// Run a program with accelerated sockets (both ends of a connection must run this way)
///
/// If a part of Fastsocket is missing, or the program cannot load the library (static, Go), one
/// warning says so and the program runs on stock sockets.
///
/// Exit status: the program's; 125 if fastsocket itself fails, 126 if the
/// program cannot be executed, 127 if it is not found.
#[derive(Debug, Args)]
#[command(after_long_help = ENVIRONMENT)]
pub struct Run {
    /// No shared memory: every connection uses the kernel
    #[arg(long)]
    pub no_shm: bool,
    /// No local listen sockets: workers share the one that the program made
    #[arg(long)]
    pub no_zones: bool,
    /// No connection stealing: a worker takes from its own queue and the shared one only
    #[arg(long)]
    pub no_balance: bool,
    /// Unix sockets stay on the kernel
    #[arg(long)]
    pub no_unix: bool,
    /// Whether workers are pinned to the CPU of their zone: `auto` (if the program has not pinned
    /// them and there is a CPU for each), `never`, or `require` (no zone for workers that the
    /// program has not pinned)
    #[arg(long, value_enum, default_value_t = PinMode::Never)]
    pub pin: PinMode,
    /// Fail with status 125 if the program would run on stock sockets
    #[arg(long)]
    pub require: bool,
    /// Print one line when the program exits: its connections over shared memory, over the kernel, and why.
    /// Its child programs print a line, too, if they had connections. None is printed where a signal ends
    /// the program, or a system call of its own
    #[arg(long)]
    pub summary: bool,
    /// Print the library and the monitor in use
    #[arg(short, long)]
    pub verbose: bool,
    #[command(flatten)]
    pub pieces: Pieces,
    /// The program and its arguments
    #[arg(required = true, num_args = 1.., trailing_var_arg = true, value_name = "PROGRAM")]
    pub program: Vec<OsString>,
}

/// `--pin`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum PinMode {
    Auto,
    Never,
    Require,
}

impl PinMode {
    /// The value of the environment variable that tells the library of this mode.
    pub fn word(self) -> &'static str {
        match self {
            PinMode::Auto => "auto",
            PinMode::Never => "never",
            PinMode::Require => "require",
        }
    }
}

#[derive(Debug, Args)]
pub struct Stat {
    /// Local listen sockets: accepts and selections by zone (CPU)
    #[arg(long)]
    pub zones: bool,
    /// With --zones: set those counters to zero after showing them
    #[arg(long, requires = "zones")]
    pub reset: bool,
    /// With --zones: queues, steals and flow groups ten times a second, as JSON; drawn beside
    /// it, in the same name with .svg
    #[arg(long, value_name = "FILE.json", requires = "zones", conflicts_with = "reset")]
    pub timeline: Option<PathBuf>,
    /// Duration of the timeline
    #[arg(long, value_name = "SECONDS", default_value_t = 10.0, requires = "timeline")]
    pub seconds: f64,
    /// JSON output
    #[arg(long)]
    pub json: bool,
    /// With --json: also which processes use the kernel now, and why, as the text has it (reads /proc)
    #[arg(long, requires = "json")]
    pub kernel: bool,
    /// Also counters that are zero
    #[arg(long)]
    pub all: bool,
    /// Print again after each such pause
    #[arg(long, value_name = "SECONDS", conflicts_with_all = ["reset", "timeline", "locality", "locks"],
        value_parser = clap::value_parser!(u64).range(1..))]
    pub watch: Option<u64>,
    /// Share of packets that are handled on the CPU where the application runs, measured now
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "5", conflicts_with = "locks")]
    pub locality: Option<f64>,
    /// With --locality: only this process and its descendants; may be repeated
    #[arg(long, value_name = "PID", requires = "locality")]
    pub pid: Vec<u32>,
    /// With --locality: only programs of this name; may be repeated
    #[arg(long, value_name = "NAME", requires = "locality")]
    pub comm: Vec<String>,
    /// Contended locks of the kernel, measured now
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "5")]
    pub locks: Option<f64>,
}

/// Bring incoming packets to the CPU where their application runs
///
/// That is Receive Flow Deliver. Without a device: what is steered. Needs root and a running monitor;
/// lasts until --off, or until the monitor ends.
#[derive(Debug, Args)]
pub struct Steer {
    /// Network device, in this network namespace
    pub device: Option<String>,
    /// rfd (opened connections, by source port), flow-groups (also accepted ones, by the client's
    /// port), connect-cpu (opened connections, also without the library), recv-cpu (where the
    /// application last read), or the file of a BPF object
    #[arg(long, default_value = "rfd")]
    pub policy: String,
    /// Recognize accepted connections by the socket table, not by well-known ports
    #[arg(long)]
    pub precise: bool,
    /// CPUs that take part, as 0-3,8 [default: all that the monitor may use]
    #[arg(long, value_name = "LIST")]
    pub cpus: Option<CpuSet>,
    /// Rules in the card, rules with its RSS table, native or generic XDP, or the kernel's RPS with RFS [default: the
    /// first of these that works]
    #[arg(long, value_parser = ["ntuple", "rss", "native", "generic", "rps"])]
    pub mode: Option<String>,
    /// Stop steering and restore the device
    #[arg(long, requires = "device", conflicts_with_all = ["policy", "precise", "cpus", "mode"])]
    pub off: bool,
    /// JSON output
    #[arg(long)]
    pub json: bool,
}

/// Why a process, or a listener, is accelerated or not
///
/// Exit status: 0 accelerated, or ready for it; 1 not; 2 there is no such process or listener, or it
/// belongs to somebody else.
#[derive(Debug, Args)]
pub struct Explain {
    /// A process, or a listener
    #[arg(value_name = "PID|HOST:PORT", value_parser = parse_target)]
    pub target: Target,
    /// JSON output
    #[arg(long)]
    pub json: bool,
}

/// The subject that `explain` explains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    Process(i32),
    Listener(Option<IpAddr>, u16),
}

/// A process number, or the address of a listener: `127.0.0.1:80`, `[::1]:80`, `localhost:80`, `:80`.
pub fn parse_target(text: &str) -> Result<Target, String> {
    if let Some(pid) = text.parse().ok().filter(|pid| *pid > 0) {
        return Ok(Target::Process(pid));
    }
    if let Ok(address) = text.parse::<SocketAddr>() {
        return Ok(Target::Listener(Some(address.ip()), address.port()));
    }
    let wrong = || format!("{text:?} is neither a process nor HOST:PORT");
    let (host, port) = text.rsplit_once(':').ok_or_else(wrong)?;
    let port = port.parse().map_err(|_| wrong())?;
    if matches!(host, "" | "*") {
        return Ok(Target::Listener(None, port));
    }
    let mut found = std::net::ToSocketAddrs::to_socket_addrs(&(host, port)).map_err(|e| format!("{host}: {e}"))?;
    found.next().map(|a| Target::Listener(Some(a.ip()), port)).ok_or_else(wrong)
}

/// Have systemd units run with the library
///
/// They do from their next start on, and share memory with each other although they run as different
/// users. Each gets a drop-in (UNIT.d/fastsocket.conf); the policy is in
/// /etc/fastsocket/fastsocketd.d/enabled-units.toml.
#[derive(Debug, Args)]
pub struct Enable {
    /// Services, with or without `.service`
    #[arg(required = true, value_name = "UNIT")]
    pub units: Vec<String>,
    /// Root of the file system that is changed
    #[arg(long, value_name = "DIR", default_value = "/")]
    pub root: PathBuf,
    /// The preloaded library [default: as of `fastsocket run`]
    #[arg(long, value_name = "PATH", env = "FASTSOCKET_LIBRARY")]
    pub library: Option<PathBuf>,
}

/// Undo `fastsocket enable`
#[derive(Debug, Args)]
pub struct Disable {
    /// Services, with or without `.service`
    #[arg(required_unless_present = "all", value_name = "UNIT")]
    pub units: Vec<String>,
    /// All that are enabled
    #[arg(long, conflicts_with = "units")]
    pub all: bool,
    /// Root of the file system that is changed
    #[arg(long, value_name = "DIR", default_value = "/")]
    pub root: PathBuf,
}

/// Write manual pages and completions
#[derive(Debug, Args)]
pub struct Pages {
    pub directory: PathBuf,
}
