//! Options, logging and signals of `fastsocketd`.

use clap::Parser;
use fsocket_monitor::broker::confine;
use fsocket_monitor::broker::split::{self, Half};
use fsocket_monitor::{Config, Endpoint, Monitor, StartError};
use rustix::fd::{AsFd, FromRawFd, OwnedFd};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// Exit status for "could not even begin", as of env(1) and timeout(1).
const CANNOT_START: u8 = 125;

/// Monitor of the shared-memory path of Fastsocket.
#[derive(Parser)]
#[command(name = "fastsocketd", version)]
struct Options {
    /// Path of the socket where clients find the monitor
    #[arg(long, value_name = "PATH", default_value = fsocket_proto::paths::SYSTEM_SOCKET)]
    socket: PathBuf,
    /// Serve only this user and root, and exit when nobody needs it
    #[arg(long)]
    private: bool,
    /// With --private: exit this long after the last process went
    #[arg(long, value_name = "SECONDS", default_value_t = 5.0)]
    linger: f64,
    /// Remove the directory of the socket at exit
    #[arg(long, hide = true)]
    scratch: bool,
    /// Two processes with --private, too
    #[arg(long, hide = true)]
    split: bool,
    /// Permissions of the socket, octal [default: 0666; with --private 0600]
    #[arg(long, value_parser = parse_mode)]
    mode: Option<u32>,
    /// Directory for what a restarted monitor takes over, with pins in /sys/fs/bpf
    /// [default: that of the socket; with --private nothing is kept]
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
    /// Configuration file; it need not exist if it is not named here
    #[arg(long, value_name = "FILE", env = "FASTSOCKET_CONFIG")]
    config: Option<PathBuf>,
    /// Read the configuration file, say what is wrong with it, and exit
    #[arg(long)]
    check: bool,
    /// Log to standard error; twice for more. FASTSOCKET_LOG sets a filter
    #[arg(short, long, action = clap::ArgAction::Count)]
    verbose: u8,
}

fn parse_mode(text: &str) -> Result<u32, String> {
    match u32::from_str_radix(text, 8) {
        Ok(mode) if mode <= 0o777 => Ok(mode),
        _ => Err("not an octal mode up to 0777".into()),
    }
}

fn main() -> ExitCode {
    let options = match Options::try_parse() {
        Ok(options) => options,
        Err(e) => {
            let _ = e.print();
            return if e.use_stderr() { CANNOT_START.into() } else { ExitCode::SUCCESS };
        }
    };
    log(options.verbose);
    match serve(options) {
        Ok(code) => code,
        Err(e) => {
            eprintln!("fastsocketd: {e:#}");
            CANNOT_START.into()
        }
    }
}

fn serve(options: Options) -> anyhow::Result<ExitCode> {
    let settings = fsocket_monitor::settings::read(options.config.as_deref())?;
    let balance = settings.balance.knobs()?;
    if options.check {
        return Ok(ExitCode::SUCCESS);
    }
    let linger = Duration::try_from_secs_f64(options.linger).map_err(|e| anyhow::anyhow!("--linger: {e}"))?;
    let beside = || options.socket.parent().map(PathBuf::from);
    let keep = options.keep.or_else(|| if options.private { None } else { beside() });
    let socket = options.socket.clone();
    let scratch = socket.parent().filter(|_| options.scratch);
    let config = Config {
        keep,
        socket: options.socket,
        private: options.private,
        linger,
        mode: options.mode.unwrap_or(if options.private { 0o600 } else { 0o666 }),
        balance,
        rules: settings.rules,
    };
    // Blocked before anything exists that would have to be removed.
    block_stop_signals()?;
    let started = if config.private && !options.split || !split::is_due() {
        Monitor::start(config)
    } else {
        match split::split(Endpoint::publish(&config)?)? {
            Half::Broker(service) => {
                let code = service.run(&config, stop_signals()?.as_fd())?;
                return Ok(ExitCode::from(u8::try_from(code).unwrap_or(1)));
            }
            Half::Front { endpoint, broker } => {
                let monitor = Monitor::on(config, endpoint, broker)?;
                confine::close()?;
                Ok(monitor)
            }
        }
    };
    let stop = stop_signals()?;
    let monitor = match started {
        Ok(monitor) => monitor,
        // Two `fastsocket run` at once: the other one's serves us as well.
        Err(StartError::AlreadyRunning(_)) if options.private => return Ok(ExitCode::SUCCESS),
        Err(e) => return Err(e.into()),
    };
    let result = monitor.run(stop.as_fd());
    if let Some(directory) = scratch {
        let _ = std::fs::remove_file(fsocket_monitor::endpoint::lock_file(&socket));
        let _ = std::fs::remove_dir(directory);
    }
    result?;
    Ok(ExitCode::SUCCESS)
}

fn log(verbose: u8) {
    use tracing_subscriber::EnvFilter;
    if verbose == 0 {
        return;
    }
    let level = ["info", "debug", "trace"][usize::from(verbose.min(3)) - 1];
    let filter = EnvFilter::try_from_env("FASTSOCKET_LOG").unwrap_or_else(|_| EnvFilter::new(level));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
}

/// SIGTERM and SIGINT.
fn of_stop() -> libc::sigset_t {
    // SAFETY: zero is a valid sigset_t; sigemptyset initialises it anyway, and it is valid for all three calls.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, libc::SIGTERM);
        libc::sigaddset(&raw mut set, libc::SIGINT);
        set
    }
}

fn block_stop_signals() -> std::io::Result<()> {
    let set = of_stop();
    // SAFETY: the set is valid for the call.
    if unsafe { libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) } != 0 {
        return Err(std::io::Error::last_os_error());
    }
    Ok(())
}

/// A descriptor that becomes readable on those, of this process.
fn stop_signals() -> std::io::Result<OwnedFd> {
    let set = of_stop();
    // SAFETY: the set is valid for the call; the descriptor that it returns is ours alone.
    unsafe {
        let fd = libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
        if fd < 0 {
            return Err(std::io::Error::last_os_error());
        }
        Ok(OwnedFd::from_raw_fd(fd))
    }
}
