//! Options, logging and signals of `fastsocketd`.

mod options;
mod signals;

use clap::Parser;
use fsocket_monitor::broker::confine;
use fsocket_monitor::broker::split::{self, Half};
use fsocket_monitor::broker::Broker;
use fsocket_monitor::{Config, Endpoint, Monitor, StartError};
use options::Options;
use rustix::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use signals::Signals;
use std::cell::RefCell;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// Exit status for "could not even begin", as of env(1) and timeout(1).
const CANNOT_START: u8 = 125;

fn main() -> ExitCode {
    let options = match Options::try_parse() {
        Ok(options) => options,
        Err(e) => {
            let _ = e.print();
            return if e.use_stderr() { CANNOT_START.into() } else { ExitCode::SUCCESS };
        }
    };
    log(options.verbose, options.private);
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
    let config = Config {
        keep,
        socket: options.socket,
        private: options.private,
        linger,
        mode: options.mode.unwrap_or(if options.private { 0o600 } else { 0o666 }),
        descriptors: u64::MAX,
        memory: fsocket_monitor::shares::memory(),
        balance,
        rules: settings.rules,
        programs: settings.programs,
        links: settings.hosts.linked(),
        hosts: settings.hosts.announced().filter(|_| !options.private),
    };
    let metrics = options.metrics.map(fsocket_monitor::metrics::bind).transpose()?;
    // Blocked before anything exists that would have to be removed.
    let mut signals = Signals::block(options.config)?;
    let endpoint = match given(&config.socket)? {
        Some(endpoint) => Ok(endpoint),
        None => Endpoint::publish(&config),
    };
    let endpoint = match endpoint {
        Ok(endpoint) => endpoint,
        // Two `fastsocket run` at once: the other one's serves us as well.
        Err(StartError::AlreadyRunning(_)) if options.private => return Ok(ExitCode::SUCCESS),
        Err(e) => return Err(e.into()),
    };
    signals.pass_on(endpoint.fd.try_clone()?, endpoint.has_name());
    let mut monitor = if config.private && !options.split || !split::is_due() {
        let is_private = config.private;
        let broker = Broker::here(endpoint.fd.as_fd(), config.keep.as_deref(), config.socket.parent());
        // (A front is confined, and begins no thread.)
        let monitor = Monitor::on(config, endpoint, broker)?.asks_for_ports_beside();
        if !is_private {
            announce(&socket);
        }
        monitor
    } else {
        match split::split(endpoint)? {
            Half::Broker(service) => {
                drop(metrics);
                // (Clients that come before the front serves wait in the backlog.)
                if !config.private {
                    announce(&config.socket);
                }
                let stop = signals.watch()?;
                let signals = RefCell::new(signals);
                let ends = || signals.borrow_mut().end(stop.as_fd(), false);
                let code = service.run(&config, stop.as_fd(), ends, || signals.borrow().begin_again_if_asked())?;
                return Ok(ExitCode::from(u8::try_from(code).unwrap_or(1)));
            }
            Half::Front { endpoint, broker } => {
                let monitor = Monitor::on(config, endpoint, broker)?;
                confine::close()?;
                monitor
            }
        }
    };
    let stop = signals.watch()?;
    if let Some(listener) = metrics {
        monitor.serve_metrics(listener)?;
    }
    monitor.run(stop.as_fd(), || signals.end(stop.as_fd(), true))?;
    Ok(ExitCode::SUCCESS)
}

/// Capabilities that the monitor has a use for, by number.
const CAPABILITIES: [(u32, &str); 8] = [
    (6, "setgid"),
    (7, "setuid"),
    (10, "net_bind_service"),
    (12, "net_admin"),
    (19, "sys_ptrace"),
    (21, "sys_admin"),
    (38, "perfmon"),
    (39, "bpf"),
];

/// Says that clients can come: to the service manager, and in one line of the log. Not for a private
/// monitor: the service manager is then that of the program which has started it.
fn announce(socket: &Path) {
    let capabilities = confine::capabilities();
    let names: Vec<_> =
        CAPABILITIES.iter().filter(|(n, _)| capabilities & 1 << n != 0).map(|(_, name)| *name).collect();
    let names = if names.is_empty() { "none".to_owned() } else { names.join(" ") };
    let version = env!("CARGO_PKG_VERSION");
    let (abi, socket) = (fsocket_abi::VERSION, socket.display());
    // (Nobody may read it.)
    let _ = writeln!(std::io::stderr(), "fastsocketd {version} (ABI {abi}): {socket}; capabilities: {names}");
    if let Err(e) = sd_notify::notify(true, &[sd_notify::NotifyState::Ready]) {
        let _ = writeln!(std::io::stderr(), "fastsocketd: the service manager cannot be told: {e}");
    }
}

/// Warnings, or more. To the journal with its fields (`journalctl -o verbose`) where standard error leads there.
fn log(verbose: u8, private: bool) {
    use tracing::Level;
    use tracing_subscriber::filter::Targets;
    use tracing_subscriber::prelude::*;
    let named = std::env::var("FASTSOCKET_LOG").ok().and_then(|text| text.parse::<Targets>().ok());
    // (A private one has nobody who reads, and starts with a program.)
    if private && verbose == 0 && named.is_none() {
        return;
    }
    let level = [Level::WARN, Level::INFO, Level::DEBUG, Level::TRACE][usize::from(verbose.min(3))];
    let wanted = named.unwrap_or_else(|| Targets::new().with_default(level));
    let all = tracing_subscriber::registry().with(wanted).with(fsocket_monitor::logs::Limit::default());
    let journal = leads_to_journal(std::io::stderr().as_fd()).then(tracing_journald::layer);
    match journal {
        Some(Ok(journal)) => all.with(journal.with_syslog_identifier("fastsocketd".into())).init(),
        _ => {
            let text = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
            all.with(text.with_ansi(std::io::stderr().is_terminal())).init();
        }
    }
}

/// Is it the stream to the journal that the service manager has named (`DEVICE:INODE` in JOURNAL_STREAM)?
fn leads_to_journal(fd: BorrowedFd<'_>) -> bool {
    let named = std::env::var("JOURNAL_STREAM").unwrap_or_default();
    rustix::fs::fstat(fd).is_ok_and(|st| named == format!("{}:{}", st.st_dev, st.st_ino))
}

/// The socket that a service manager has made (sd_listen_fds(3)), or this process before it began again.
fn given(path: &Path) -> anyhow::Result<Option<Endpoint>> {
    let own = std::env::var_os("LISTEN_FDNAMES").is_some_and(|names| names == signals::OWN);
    let Some(fd) = sd_notify::listen_fds()?.next() else { return Ok(None) };
    // SAFETY: passed to this process, and nobody else here knows it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    Ok(Some(Endpoint::given(fd, path, own)?))
}
