//! `fastsocket-bench end`: a server or a client process of `bench shapes`. It makes plain libc calls, as other
//! programs do. `LD_PRELOAD` alone decides whether the library or the kernel handles them.
//!
//! Long: both ends of a measurement, which change together.

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{self, BufRead, Read};
use std::os::fd::RawFd;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

/// The way a server serves its connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Server {
    /// A process for each, forked, blocking
    Process,
    /// A thread for each, blocking
    Thread,
    /// All in one epoll loop
    Loop,
    /// A process for each, forked, with non-blocking reads and epoll
    ForkEpoll,
    /// Two processes, each with an epoll loop
    Pool,
}

/// The way the clients of all connections run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Clients {
    /// A process for each
    Processes,
    /// One process, a thread for each
    Threads,
    /// One process, all in one epoll loop
    Loop,
}

#[derive(Debug, Args)]
pub struct End {
    #[arg(long, conflicts_with = "clients")]
    server: Option<Server>,
    #[arg(long)]
    clients: Option<Clients>,
    #[arg(long, default_value_t = 0)]
    port: u16,
    /// Connections of this process
    #[arg(long, default_value_t = 1)]
    conns: usize,
    /// Turns of [`work`] in each request
    #[arg(long, default_value_t = 0)]
    work: u64,
    /// Bytes of a request
    #[arg(long, default_value_t = 64)]
    request: usize,
    /// Bytes of an answer
    #[arg(long, default_value_t = 64)]
    answer: usize,
    /// Requests that a client sends at once
    #[arg(long, default_value_t = 1)]
    pipeline: usize,
    /// Microseconds for which a client sleeps before each request
    #[arg(long, default_value_t = 0)]
    think: u64,
    /// A connection for each request
    #[arg(long)]
    short: bool,
    #[arg(long, default_value_t = 1.0)]
    secs: f64,
}

/// The line that a client process prints when the time is over.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Done {
    pub requests: u64,
    /// Histogram of latencies: bucket ([`bucket`]) to number of requests.
    pub latency: BTreeMap<u32, u64>,
}

impl Done {
    pub fn add(&mut self, other: &Done) {
        self.requests += other.requests;
        for (bucket, n) in &other.latency {
            *self.latency.entry(*bucket).or_default() += n;
        }
    }
    /// Records that `n` requests were answered `ns` after they were sent.
    fn note(&mut self, n: usize, ns: u64) {
        self.requests += n as u64;
        *self.latency.entry(bucket(ns)).or_default() += n as u64;
    }
    /// The quantile `q` of the latencies, in nanoseconds.
    pub fn quantile(&self, q: f64) -> f64 {
        let (mut left, total) = (0.0, self.requests as f64);
        for (bucket, n) in &self.latency {
            left += *n as f64;
            if left >= total * q {
                return 2f64.powf((*bucket as f64 + 0.5) / 16.0);
            }
        }
        0.0
    }
}

/// Histogram bucket of a latency: 16 buckets for each doubling.
fn bucket(ns: u64) -> u32 {
    ((ns.max(1) as f64).log2() * 16.0) as u32
}

/// Computes for `turns` turns. Unlike a loop with a deadline, it does the same work if it is interrupted.
#[inline(never)]
pub fn work(turns: u64) -> u64 {
    let mut x = turns | 1;
    for _ in 0..turns {
        x = std::hint::black_box(x.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407));
    }
    x
}

pub fn run(args: &End) -> i32 {
    let r = match (args.server, args.clients) {
        (Some(kind), _) => serve(kind, args),
        (_, Some(kind)) => load(kind, args),
        _ => Err(io::ErrorKind::InvalidInput.into()),
    };
    match r {
        Ok(()) => 0,
        Err(e) => {
            eprintln!("fastsocket-bench end: {e}");
            1
        }
    }
}

fn check(r: i64) -> io::Result<i64> {
    if r < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(r)
    }
}

fn address(port: u16) -> libc::sockaddr_in {
    libc::sockaddr_in {
        sin_family: libc::AF_INET as u16,
        sin_port: port.to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes([127, 0, 0, 1]) },
        sin_zero: [0; 8],
    }
}

const ADDRESS: u32 = size_of::<libc::sockaddr_in>() as u32;

fn socket() -> io::Result<RawFd> {
    // SAFETY: the call takes no pointers.
    Ok(check(unsafe { libc::socket(libc::AF_INET, libc::SOCK_STREAM, 0) }.into())? as RawFd)
}

fn no_delay(fd: RawFd) {
    let one = 1i32;
    // SAFETY: `one` lives through the call.
    unsafe { libc::setsockopt(fd, libc::IPPROTO_TCP, libc::TCP_NODELAY, (&raw const one).cast(), 4) };
}

fn non_blocking(fd: RawFd) {
    // SAFETY: the call takes no pointers.
    unsafe { libc::fcntl(fd, libc::F_SETFL, libc::O_NONBLOCK) };
}

fn connect(port: u16) -> io::Result<RawFd> {
    let (fd, at) = (socket()?, address(port));
    // SAFETY: the address lives through the call.
    check(unsafe { libc::connect(fd, (&raw const at).cast(), ADDRESS) }.into())?;
    no_delay(fd);
    Ok(fd)
}

fn accept(listener: RawFd) -> io::Result<RawFd> {
    let none = std::ptr::null_mut();
    // SAFETY: null pointers are allowed; they mean that the peer's address is not wanted.
    let fd = check(unsafe { libc::accept(listener, none, std::ptr::null_mut()) }.into())? as RawFd;
    no_delay(fd);
    Ok(fd)
}

/// None: the call would block.
fn receive(fd: RawFd, buffer: &mut [u8]) -> io::Result<Option<usize>> {
    // SAFETY: `buffer` is writable for its length.
    let n = unsafe { libc::read(fd, buffer.as_mut_ptr().cast(), buffer.len()) };
    match check(n as i64) {
        Ok(n) => Ok(Some(n as usize)),
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(e) => Err(e),
    }
}

/// Sends all of `bytes`. On a non-blocking socket it waits for room.
fn send(fd: RawFd, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        // SAFETY: `bytes` is readable for its length.
        let n = unsafe { libc::send(fd, bytes.as_ptr().cast(), bytes.len(), libc::MSG_NOSIGNAL) };
        match check(n as i64) {
            Ok(n) => bytes = &bytes[n as usize..],
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                let mut p = libc::pollfd { fd, events: libc::POLLOUT, revents: 0 };
                // SAFETY: `p` is one pollfd, and lives through the call.
                check(unsafe { libc::poll(&mut p, 1, -1) }.into())?;
            }
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

struct Epoll(RawFd);

impl Epoll {
    fn new() -> io::Result<Self> {
        // SAFETY: the call takes no pointers.
        Ok(Epoll(check(unsafe { libc::epoll_create1(0) }.into())? as RawFd))
    }
    fn add(&self, fd: RawFd) -> io::Result<()> {
        let mut ev = libc::epoll_event { events: libc::EPOLLIN as u32, u64: fd as u64 };
        // SAFETY: `ev` lives through the call.
        check(unsafe { libc::epoll_ctl(self.0, libc::EPOLL_CTL_ADD, fd, &mut ev) }.into()).map(drop)
    }
    /// Descriptors that are readable.
    fn wait<'a>(&self, evs: &'a mut [libc::epoll_event; 64], ms: i32) -> io::Result<impl Iterator<Item = RawFd> + 'a> {
        // SAFETY: `evs` has 64 entries.
        let n = check(unsafe { libc::epoll_wait(self.0, evs.as_mut_ptr(), 64, ms) }.into())?;
        Ok(evs[..n as usize].iter().map(|e| e.u64 as RawFd))
    }
}

const NO_EVENT: libc::epoll_event = libc::epoll_event { events: 0, u64: 0 };

/// A connection, and the number of bytes of the next request that have arrived.
struct Served {
    fd: RawFd,
    got: usize,
}

impl Served {
    /// Reads once, and answers each complete request. False: the client has closed the connection.
    fn turn(&mut self, args: &End, buffer: &mut [u8], answer: &[u8]) -> io::Result<bool> {
        match receive(self.fd, &mut buffer[..args.request])? {
            None => return Ok(true),
            Some(0) => return Ok(false),
            Some(n) => self.got += n,
        }
        while self.got >= args.request {
            self.got -= args.request;
            work(args.work);
            send(self.fd, answer)?;
        }
        Ok(true)
    }
}

fn serve(kind: Server, args: &End) -> io::Result<()> {
    let listener = socket()?;
    let mut at = address(0);
    let mut len = ADDRESS;
    // SAFETY: the addresses live through the calls and have the given sizes. (Ignoring SIGCHLD reaps children.)
    unsafe {
        libc::signal(libc::SIGCHLD, libc::SIG_IGN);
        check(libc::bind(listener, (&raw const at).cast(), ADDRESS).into())?;
        check(libc::listen(listener, 1024).into())?;
        check(libc::getsockname(listener, (&raw mut at).cast(), &mut len).into())?;
    }
    println!("{}", u16::from_be(at.sin_port));
    match kind {
        Server::Loop => return serve_loop(listener, args),
        Server::Pool => {
            // SAFETY: this process has one thread.
            unsafe { libc::fork() };
            return serve_loop(listener, args);
        }
        _ => {}
    }
    std::thread::scope(|scope| loop {
        let fd = accept(listener)?;
        if kind == Server::Thread {
            scope.spawn(move || serve_blocking(fd, args));
            continue;
        }
        // SAFETY: this process has one thread.
        if unsafe { libc::fork() } == 0 {
            // SAFETY: this is the child's copy of the descriptor, which the child does not use again.
            unsafe { libc::close(listener) };
            let r = if kind == Server::Process { serve_blocking(fd, args) } else { serve_alone(fd, args) };
            std::process::exit(r.is_err().into());
        }
        // SAFETY: the child has its own copy, and this process does not use the descriptor again.
        unsafe { libc::close(fd) };
    })
}

fn serve_blocking(fd: RawFd, args: &End) -> io::Result<()> {
    let (mut buffer, answer) = (vec![0; args.request], vec![b'a'; args.answer]);
    let mut served = Served { fd, got: 0 };
    while served.turn(args, &mut buffer, &answer)? {}
    Ok(())
}

fn serve_alone(fd: RawFd, args: &End) -> io::Result<()> {
    let (mut buffer, answer) = (vec![0; args.request], vec![b'a'; args.answer]);
    non_blocking(fd);
    let epoll = Epoll::new()?;
    epoll.add(fd)?;
    let mut served = Served { fd, got: 0 };
    let mut evs = [NO_EVENT; 64];
    loop {
        // As in many programs: read from the socket first, and wait afterwards.
        if !served.turn(args, &mut buffer, &answer)? {
            return Ok(());
        }
        let _ = epoll.wait(&mut evs, -1)?.count();
    }
}

fn serve_loop(listener: RawFd, args: &End) -> io::Result<()> {
    let (mut buffer, answer) = (vec![0; args.request], vec![b'a'; args.answer]);
    non_blocking(listener);
    let epoll = Epoll::new()?;
    epoll.add(listener)?;
    let mut all: BTreeMap<RawFd, Served> = BTreeMap::new();
    let mut evs = [NO_EVENT; 64];
    loop {
        for fd in epoll.wait(&mut evs, -1)? {
            if fd == listener {
                let Ok(new) = accept(listener) else { continue };
                non_blocking(new);
                epoll.add(new)?;
                all.insert(new, Served { fd: new, got: 0 });
            } else if let Some(served) = all.get_mut(&fd) {
                if !served.turn(args, &mut buffer, &answer).unwrap_or(false) {
                    all.remove(&fd);
                    // SAFETY: this process owns the descriptor, and does not use it again.
                    unsafe { libc::close(fd) };
                }
            }
        }
    }
}

/// Opens all connections, prints OPEN, and waits for a line of input. Then it measures, prints [`Done`], and waits
/// for the end of its input.
fn load(kind: Clients, args: &End) -> io::Result<()> {
    let fds = (0..args.conns).map(|_| connect(args.port)).collect::<io::Result<Vec<_>>>()?;
    println!("OPEN");
    let mut input = io::stdin().lock();
    let go = |input: &mut io::StdinLock<'_>| input.read_line(&mut String::new()).map(drop);
    let limit = Duration::from_secs_f64(args.secs);
    let mut done = Done::default();
    if kind == Clients::Threads {
        let gate = Arc::new(Barrier::new(fds.len() + 1));
        let threads: Vec<_> = fds
            .iter()
            .map(|&fd| {
                let (gate, asked) = (gate.clone(), Asked::of(args));
                std::thread::spawn(move || {
                    gate.wait();
                    ask(fd, &asked, limit)
                })
            })
            .collect();
        go(&mut input)?;
        gate.wait();
        for t in threads {
            done.add(&t.join().map_err(|_| io::Error::other("a thread panicked"))??);
        }
    } else {
        go(&mut input)?;
        done = match kind {
            Clients::Loop => ask_loop(&fds, args, limit)?,
            _ => ask(fds[0], &Asked::of(args), limit)?,
        };
    }
    println!("{}", serde_json::to_string(&done)?);
    input.read_to_end(&mut Vec::new())?;
    Ok(())
}

/// The request that a client sends again and again.
struct Asked {
    port: u16,
    /// Requests sent at once.
    pipeline: usize,
    /// Bytes of these requests, and of their answers.
    bytes: (usize, usize),
    /// Turns of [`work`] that the client computes for these requests.
    turns: u64,
    think: Duration,
    short: bool,
}

impl Asked {
    fn of(args: &End) -> Self {
        let n = args.pipeline;
        Asked {
            port: args.port,
            pipeline: n,
            bytes: (n * args.request, n * args.answer),
            turns: n as u64 * args.work,
            think: Duration::from_micros(args.think),
            short: args.short,
        }
    }
}

fn ask(mut fd: RawFd, asked: &Asked, limit: Duration) -> io::Result<Done> {
    let (question, mut buffer) = (vec![b'q'; asked.bytes.0], vec![0; asked.bytes.1]);
    let mut done = Done::default();
    let started = Instant::now();
    let mut last = started;
    while last - started < limit {
        if !asked.think.is_zero() {
            std::thread::sleep(asked.think);
            last = Instant::now();
        }
        send(fd, &question)?;
        let mut got = 0;
        while got < buffer.len() {
            match receive(fd, &mut buffer[got..])? {
                Some(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                n => got += n.unwrap_or(0),
            }
        }
        if asked.short {
            // SAFETY: this process owns the descriptor, and does not use it again.
            unsafe { libc::close(fd) };
            fd = connect(asked.port)?;
        }
        work(asked.turns);
        let now = Instant::now();
        done.note(asked.pipeline, (now - last).as_nanos() as u64);
        last = now;
    }
    Ok(done)
}

fn ask_loop(fds: &[RawFd], args: &End, limit: Duration) -> io::Result<Done> {
    let asked = Asked::of(args);
    let (question, mut buffer) = (vec![b'q'; asked.bytes.0], vec![0; asked.bytes.1]);
    let epoll = Epoll::new()?;
    let mut done = Done::default();
    let started = Instant::now();
    let mut open: BTreeMap<RawFd, (usize, Instant)> = BTreeMap::new();
    for &fd in fds {
        non_blocking(fd);
        epoll.add(fd)?;
        send(fd, &question)?;
        open.insert(fd, (0, started));
    }
    let mut evs = [NO_EVENT; 64];
    let mut now = started;
    while now - started < limit {
        for fd in epoll.wait(&mut evs, 1000)? {
            let Some((got, since)) = open.get_mut(&fd) else { continue };
            match receive(fd, &mut buffer[..asked.bytes.1 - *got])? {
                Some(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                n => *got += n.unwrap_or(0),
            }
            if *got == asked.bytes.1 {
                work(asked.turns);
                now = Instant::now();
                done.note(asked.pipeline, (now - *since).as_nanos() as u64);
                (*got, *since) = (0, now);
                send(fd, &question)?;
            }
        }
        now = Instant::now();
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_found_again() {
        let mut d = Done::default();
        (1..=1000).for_each(|n| d.note(1, n * 1000));
        assert!((d.quantile(0.5) / 500_000.0 - 1.0).abs() < 0.05);
        assert!((d.quantile(0.99) / 990_000.0 - 1.0).abs() < 0.05);
    }
}
