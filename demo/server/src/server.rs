//! The parent: listen sockets, workers, statistics, signals.

use crate::stats::Stats;
use crate::worker::{self, Config};
use crate::{http, sys, Args};
use std::fs::{File, OpenOptions};
use std::io::{self, Error, Write};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

const SIGNALS: &[libc::c_int] = &[libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGCHLD, libc::SIGQUIT];

/// If a worker dies sooner than this after its start, its replacement starts later.
const RESPAWN: Duration = Duration::from_millis(200);

/// Told to finish what is open and to end. A process's own; in a thread, all's.
static DRAIN: AtomicBool = AtomicBool::new(false);

extern "C" fn drain(_: libc::c_int) {
    DRAIN.store(true, Ordering::Relaxed);
}

/// A worker process.
struct Worker {
    pid: libc::pid_t,
    started: Instant,
    /// When to start its successor, if it died.
    due: Option<Instant>,
}

struct Server<'a> {
    args: &'a Args,
    config: Arc<Config>,
    stats: Stats,
    cpus: Vec<Option<usize>>,
    /// Shared by all workers; empty with --reuseport.
    listeners: Arc<Vec<OwnedFd>>,
    workers: Vec<Worker>,
    log: Log,
}

pub fn run(args: &Args) -> io::Result<()> {
    sys::raise_descriptor_limit();
    let allowed = sys::allowed_cpus();
    let count = args.workers.map_or(allowed.len(), usize::from);
    let cpus: Vec<Option<usize>> = (0..count).map(|i| (!args.no_pin).then(|| allowed[i % allowed.len()])).collect();
    let log = Log::open(args)?;
    let body = vec![b'x'; args.size as usize];
    let config = Arc::new(Config {
        answers: [
            http::answer("200 OK", &body, false),
            http::answer("200 OK", &body, true),
            http::answer("502 Bad Gateway", b"bad gateway\n", false),
        ],
        backends: args.backends.clone(),
        keepalive: args.keepalive,
        timeout: args.timeout,
        locality: args.locality,
        verbose: args.verbose,
        // One worker alone needs no protection from the herd.
        exclusive: !args.reuseport && count > 1,
    });
    // With --reuseport too: an address that cannot be had must be an error
    // here, not in every worker for ever.
    let mut listeners = listen(args)?;
    if args.reuseport {
        // Connections to a socket that nobody accepts from would wait for ever.
        listeners.clear();
    }
    let listeners = Arc::new(listeners);
    if args.daemon {
        sys::daemonize()?;
    }
    sys::block_signals(SIGNALS, true);
    let stats = Stats::new(cpus.clone())?;
    let mut server = Server { args, config, stats, cpus, listeners, workers: Vec::new(), log };
    for index in 0..count {
        let worker = server.start(index)?;
        server.workers.push(worker);
    }
    server.log.say(&format!("fastsocket-demo: {count} worker(s), {}\n", describe(args)))?;
    let result = server.serve();
    server.stop();
    server.log.say(&server.stats.totals(args.json))?;
    result
}

fn describe(args: &Args) -> String {
    let list = |all: &[std::net::SocketAddr]| all.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
    let mode = match args.backends.is_empty() {
        true => format!("{} bytes an answer", args.size),
        false => format!("proxy for {}", list(&args.backends)),
    };
    let reuseport = if args.reuseport { ", SO_REUSEPORT" } else { "" };
    format!("listening on {}{reuseport}, {mode}", list(&args.addresses))
}

fn listen(args: &Args) -> io::Result<Vec<OwnedFd>> {
    let one = |address: &std::net::SocketAddr| {
        sys::listen(address, args.backlog, args.reuseport)
            .map_err(|e| Error::new(e.kind(), format!("cannot listen on {address}: {e}")))
    };
    args.addresses.iter().map(one).collect()
}

impl Server<'_> {
    /// Starts a worker. With threads, the worker is one and its pid is 0.
    fn start(&self, index: usize) -> io::Result<Worker> {
        let started = Instant::now();
        if self.args.threads {
            let (own, shared, config) = (self.own_listeners()?, self.listeners.clone(), self.config.clone());
            let (counters, cpu) = (self.stats.worker(index), self.cpus[index]);
            std::thread::Builder::new().name(format!("worker-{index}")).spawn(move || {
                let listeners = if own.is_empty() { &shared } else { &own };
                work(&config, listeners, counters, cpu);
            })?;
            return Ok(Worker { pid: 0, started, due: None });
        }
        if let Some(pid) = sys::fork()? {
            return Ok(Worker { pid, started, due: None });
        }
        sys::on_signal(libc::SIGQUIT, drain);
        // An interrupt from a terminal reaches the parent, too, which sees to us.
        sys::block_signals(&[libc::SIGTERM, libc::SIGQUIT, libc::SIGCHLD, libc::SIGHUP], false);
        let own = match self.own_listeners() {
            Ok(own) => own,
            Err(e) => {
                eprintln!("fastsocket-demo: {e}");
                std::process::exit(1);
            }
        };
        let listeners = if own.is_empty() { &self.listeners } else { &own };
        work(&self.config, listeners, self.stats.worker(index), self.cpus[index]);
        std::process::exit(0)
    }

    fn own_listeners(&self) -> io::Result<Vec<OwnedFd>> {
        if self.args.reuseport {
            listen(self.args)
        } else {
            Ok(Vec::new())
        }
    }

    /// Until told to end.
    fn serve(&mut self) -> io::Result<()> {
        let mut next = Instant::now() + Duration::from_secs(1);
        loop {
            let due = self.workers.iter().filter_map(|w| w.due).fold(next, Instant::min);
            let signal = sys::wait_signal(SIGNALS, due.saturating_duration_since(Instant::now()));
            match signal {
                Some(libc::SIGTERM | libc::SIGINT | libc::SIGQUIT) => return Ok(()),
                Some(libc::SIGHUP) if !self.args.threads => self.renew()?,
                Some(libc::SIGCHLD) => self.reap()?,
                _ => {}
            }
            self.replace()?;
            if Instant::now() >= next {
                next += Duration::from_secs(1);
                let text = self.stats.tick(self.args.json);
                if !self.args.quiet {
                    self.log.say(&text)?;
                }
            }
        }
    }

    /// New workers first, then the old ones finish: nobody listens never.
    fn renew(&mut self) -> io::Result<()> {
        for index in 0..self.workers.len() {
            let new = self.start(index)?;
            let old = std::mem::replace(&mut self.workers[index], new);
            if old.due.is_none() {
                sys::kill(old.pid, libc::SIGQUIT);
            }
        }
        Ok(())
    }

    /// Notes who died. Workers that finished after a renewal are nobody's.
    fn reap(&mut self) -> io::Result<()> {
        while let Some((pid, status)) = sys::reap() {
            if let Some(worker) = self.workers.iter_mut().find(|w| w.pid == pid) {
                worker.due = Some((worker.started + RESPAWN).max(Instant::now()));
                eprintln!("fastsocket-demo: worker {pid} ended (wait status {status:#x}), another one takes its place");
            }
        }
        Ok(())
    }

    fn replace(&mut self) -> io::Result<()> {
        for index in 0..self.workers.len() {
            if self.workers[index].due.is_some_and(|due| due <= Instant::now()) {
                self.workers[index] = self.start(index)?;
            }
        }
        Ok(())
    }

    /// Ends the workers and waits for them, not for ever.
    fn stop(&mut self) {
        if self.args.threads {
            return;
        }
        for worker in self.workers.iter().filter(|w| w.due.is_none()) {
            sys::kill(worker.pid, libc::SIGTERM);
        }
        let mut left = self.workers.iter().filter(|w| w.due.is_none()).count();
        let limit = Instant::now() + Duration::from_secs(5);
        while left > 0 && Instant::now() < limit {
            match sys::reap() {
                Some((pid, _)) if self.workers.iter().any(|w| w.pid == pid) => left -= 1,
                Some(_) => {}
                None => {
                    sys::wait_signal(&[libc::SIGCHLD], Duration::from_millis(10));
                }
            }
        }
    }
}

fn work(config: &Config, listeners: &[OwnedFd], counters: &'static crate::stats::Counters, cpu: Option<usize>) {
    if let Some(Err(e)) = cpu.map(sys::pin) {
        eprintln!("fastsocket-demo: cannot pin a worker: {e}");
    }
    if let Err(e) = worker::run(config, listeners, counters, &DRAIN) {
        eprintln!("fastsocket-demo: worker: {e}");
        std::process::exit(1);
    }
}

/// Where statistics go.
enum Log {
    File(File),
    Output,
}

impl Log {
    fn open(args: &Args) -> io::Result<Log> {
        let Some(path) = &args.output else { return Ok(Log::Output) };
        let file = OpenOptions::new().append(true).create(true).open(path);
        file.map(Log::File).map_err(|e| Error::new(e.kind(), format!("{}: {e}", path.display())))
    }

    fn say(&mut self, text: &str) -> io::Result<()> {
        match self {
            Log::File(file) => file.write_all(text.as_bytes()),
            Log::Output => {
                let mut out = io::stdout().lock();
                // A reader that is gone is no reason to stop serving.
                let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
                Ok(())
            }
        }
    }
}
