//! `fastsocket-agent`: carries connections between programs of this host and of others (ADR 60).
//!
//! The agent acts as the peer of each program. For each connection it has a stand-in, a kernel
//! connection of its own that moves to shared memory together with the program's end. The agent
//! reads the program's ring and sends the bytes to the agent of the other host. That agent writes
//! them into the ring of the program there. The agent runs with the library, like any program.

mod carrier;
mod carriers;
mod hooked;
mod line;
mod link;
mod loops;
mod mirror;
mod opening;
mod peer;
mod stand_in;
mod state;

use anyhow::Context as _;
use clap::Parser;
use fsocket_proto::paths;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

/// Carries connections between programs of this host and of others. To be started by fastsocket-run(1)
#[derive(Parser)]
#[command(name = "fastsocket-agent", version)]
struct Options {
    /// Path of the monitor's socket
    #[arg(long, value_name = "PATH", env = paths::ENV_SOCKET, default_value = paths::SYSTEM_SOCKET)]
    socket: PathBuf,
    /// Log more than warnings to standard error
    #[arg(short, long, action = clap::ArgAction::Count)]
    verbose: u8,
}

/// Log levels: the first one is used without `--verbose`, the others with one or more.
const LEVELS: [tracing::Level; 4] =
    [tracing::Level::WARN, tracing::Level::INFO, tracing::Level::DEBUG, tracing::Level::TRACE];

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    // The library reads this variable when it starts. With it, a stand-in moves to shared memory
    // at once.
    const AT_ONCE: (&str, &str) = ("FASTSOCKET_UPGRADE", "1");
    if std::env::var(AT_ONCE.0).as_deref() != Ok(AT_ONCE.1) {
        let again = Command::new("/proc/self/exe").args(std::env::args_os().skip(1)).env(AT_ONCE.0, AT_ONCE.1).exec();
        return Err(again).context("cannot begin again");
    }
    let level = LEVELS[usize::from(options.verbose.min(3))];
    use tracing_subscriber::filter::Targets;
    use tracing_subscriber::prelude::*;
    let named = std::env::var("FASTSOCKET_LOG").ok().and_then(|text| text.parse::<Targets>().ok());
    let wanted = named.unwrap_or_else(|| Targets::new().with_default(level));
    let colours = std::io::IsTerminal::is_terminal(&std::io::stderr());
    let text = tracing_subscriber::fmt::layer().with_ansi(colours).with_writer(std::io::stderr);
    tracing_subscriber::registry().with(wanted).with(text).init();
    let has_library = std::fs::read_to_string("/proc/self/maps").is_ok_and(|maps| maps.contains("libfsocket"));
    anyhow::ensure!(has_library, "the library is not loaded: fastsocket run fastsocket-agent");
    // Each connection needs two descriptors.
    use rustix::process::{getrlimit, setrlimit, Resource, Rlimit};
    let most = getrlimit(Resource::Nofile).maximum;
    let _ = setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most });
    state::Agent::new(&options.socket)?.run()
}
