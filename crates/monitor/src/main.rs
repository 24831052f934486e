//! Options, logging and signals of `fastsocketd`.

mod options;
mod retire;
mod signals;

use clap::Parser;
use fsocket_monitor::broker::confine;
use fsocket_monitor::broker::split::{self, Half};
use fsocket_monitor::broker::Broker;
use fsocket_monitor::endpoint::lock;
use fsocket_monitor::{Config, Endpoint, Monitor, StartError};
use options::Options;
use rustix::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use signals::Signals;
use std::cell::RefCell;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// How long a retired monitor waits for programs to announce themselves. Programs connect to it
/// only when needed.
const RETIRED_LINGER: Duration = Duration::from_secs(30);

/// Exit status for "could not even begin", as env(1) and timeout(1) use it.
const CANNOT_START: u8 = 125;

fn main() -> ExitCode {
    let options = match Options::try_parse() {
        Ok(options) => options,
        Err(e) => {
            let _ = e.print();
            return if e.use_stderr() { CANNOT_START.into() } else { ExitCode::SUCCESS };
        }
    };
    if options.abi {
        println!("{}", fsocket_abi::VERSION);
        return ExitCode::SUCCESS;
    }
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
    if options.end_retired {
        let ended = lock::end_all_retired(&options.socket)?;
        println!("{ended}");
        return Ok(ExitCode::SUCCESS);
    }
    let Some(config) = configuration(&options)? else { return Ok(ExitCode::SUCCESS) };
    let socket = options.socket.clone();
    // (A retired monitor serves no metrics: the address belongs to the monitor that took its
    // place.)
    let metrics = options.metrics.filter(|_| !config.retired).map(fsocket_monitor::metrics::bind).transpose()?;
    // Signals are blocked before this process makes anything that it must remove at its end.
    let mut signals = Signals::block(&options)?;
    let given = match config.retired {
        true => Some(retired(&config)?),
        false => given(&config)?,
    };
    let endpoint = match given {
        Some(endpoint) => Ok(endpoint),
        None => Endpoint::publish(&config),
    };
    let endpoint = match endpoint {
        Ok(endpoint) => endpoint,
        // Two `fastsocket run` started at once: the monitor of the other one serves this program,
        // too.
        Err(StartError::AlreadyRunning(_)) if options.private => return Ok(ExitCode::SUCCESS),
        Err(e) => return Err(e.into()),
    };
    endpoint.sign(config.retired);
    signals.pass_on(endpoint.fd.try_clone()?, endpoint.own_name());
    let mut monitor = if config.private && !options.split || !split::is_due() {
        let (is_private, config_retired) = (config.private, config.retired);
        let broker = Broker::here(endpoint.fd.as_fd(), config.keep.as_deref(), config.socket.parent());
        // (Only here another thread may ask for the ports in use: a front is confined and cannot.)
        let monitor = Monitor::on(config, endpoint, broker)?.asks_for_ports_beside();
        if !is_private {
            announce(&socket, config_retired);
        }
        monitor
    } else {
        match split::split(endpoint)? {
            Half::Broker(service) => {
                drop(metrics);
                // (Clients that connect before the front serves wait in the backlog.)
                if !config.private {
                    announce(&config.socket, config.retired);
                }
                let stop = signals.watch()?;
                let signals = RefCell::new(signals);
                let ends = || signals.borrow_mut().end(stop.as_fd(), false);
                let code = service.run(&config, stop.as_fd(), ends, || signals.borrow_mut().go_on_if_asked())?;
                return Ok(ExitCode::from(u8::try_from(code).unwrap_or(1)));
            }
            Half::Front { endpoint, broker } => {
                signals.is_of_front();
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

/// The monitor's configuration. `None`: the configuration was only to be checked.
fn configuration(options: &Options) -> anyhow::Result<Option<Config>> {
    let mut settings = fsocket_monitor::settings::read(options.config.as_deref());
    if let (true, Err(e)) = (options.retired && !options.check, &settings) {
        // The configuration is for the monitor that took this one's place, and this one may not
        // understand it. Without it, different users share no memory.
        tracing::warn!("without a configuration: {e:#}");
        settings = Ok(Default::default());
    }
    let settings = settings?;
    let balance = settings.balance.knobs()?;
    if options.check {
        return Ok(None);
    }
    let linger = match options.retired {
        true => RETIRED_LINGER,
        false => Duration::try_from_secs_f64(options.linger).map_err(|e| anyhow::anyhow!("--linger: {e}"))?,
    };
    let beside = || options.socket.parent().map(PathBuf::from);
    let keep = options.keep.clone().or_else(|| if options.private { None } else { beside() });
    Ok(Some(Config {
        keep,
        socket: options.socket.clone(),
        private: options.private,
        retired: options.retired,
        linger,
        mode: options.mode.unwrap_or(if options.private { 0o600 } else { 0o666 }),
        descriptors: u64::MAX,
        memory: fsocket_monitor::shares::memory(),
        balance,
        rules: settings.rules,
        programs: settings.programs,
        links: settings.hosts.linked(),
        hosts: settings.hosts.announced().filter(|_| !options.private),
    }))
}

/// Capabilities that the monitor can use, by number.
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

/// Tells the service manager, and in one line of the log, that clients can connect. Not for a
/// private monitor: the service manager in its environment belongs to the program that has started
/// it.
fn announce(socket: &Path, retired: bool) {
    let capabilities = confine::capabilities();
    let names: Vec<_> =
        CAPABILITIES.iter().filter(|(n, _)| capabilities & 1 << n != 0).map(|(_, name)| *name).collect();
    let names = if names.is_empty() { "none".to_owned() } else { names.join(" ") };
    let version = env!("CARGO_PKG_VERSION");
    let (abi, socket) = (fsocket_abi::VERSION, socket.display());
    // (Errors are ignored: nobody may be reading standard error.)
    let stays = if retired { "; stays for programs that run" } else { "" };
    let _ = writeln!(std::io::stderr(), "fastsocketd {version} (ABI {abi}): {socket}; capabilities: {names}{stays}");
    if let Err(e) = sd_notify::notify(true, &[sd_notify::NotifyState::Ready]) {
        let _ = writeln!(std::io::stderr(), "fastsocketd: the service manager cannot be told: {e}");
    }
}

/// Sets up logging of warnings, or of more. If standard error leads to the journal, log lines go
/// there with their fields (`journalctl -o verbose`).
fn log(verbose: u8, private: bool) {
    use tracing::Level;
    use tracing_subscriber::filter::Targets;
    use tracing_subscriber::prelude::*;
    let named = std::env::var("FASTSOCKET_LOG").ok().and_then(|text| text.parse::<Targets>().ok());
    // (A private monitor is started along with a program, and nobody reads its log.)
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

/// Whether `fd` is the stream to the journal that the service manager has named (`DEVICE:INODE` in
/// JOURNAL_STREAM).
fn leads_to_journal(fd: BorrowedFd<'_>) -> bool {
    let named = std::env::var("JOURNAL_STREAM").unwrap_or_default();
    rustix::fs::fstat(fd).is_ok_and(|st| named == format!("{}:{}", st.st_dev, st.st_ino))
}

/// The socket that a service manager has made (sd_listen_fds(3)), or that this process made before
/// it executed itself again.
fn given(config: &Config) -> anyhow::Result<Option<Endpoint>> {
    let own = std::env::var_os("LISTEN_FDNAMES").is_some_and(|names| names == retire::OWN);
    let Some(fd) = sd_notify::listen_fds()?.next() else { return Ok(None) };
    // SAFETY: the descriptor was passed to this process, and nothing else here owns it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    Ok(Some(Endpoint::given(fd, config, own)?))
}

/// The socket of the former monitor, with which a retired monitor goes on.
fn retired(config: &Config) -> anyhow::Result<Endpoint> {
    let fd = retire::inherited().ok_or_else(|| anyhow::anyhow!("--retired is not for hands"))?;
    retire::take_name();
    Ok(Endpoint::given(fd, config, true)?)
}
