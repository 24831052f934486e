//! Clients that come at a fixed rate: one thread, one epoll instance, on CPU 0 and before
//! everything else there, as if they were on another machine.

use anyhow::{Context, Result};
use fsocket_testkit::netns::NetHost;
use fsocket_testkit::Proc;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Connections under way at most; what comes beyond is lost.
const MOST: usize = 8192;

/// What became of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
enum End {
    After(Duration),
    /// Given up.
    TimedOut,
    /// Reset, refused, cut off.
    Failed(String),
    /// The client could not begin it: no port, or too many under way.
    NotBegun,
}

/// Requests by when they were begun.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    all: Vec<(Duration, End)>,
}

impl Outcome {
    /// Those begun between two times since the start.
    pub fn between(&self, from: Duration, to: Duration) -> Outcome {
        Outcome { all: self.all.iter().filter(|(at, _)| (from..to).contains(at)).cloned().collect() }
    }

    /// Milliseconds; who was not answered waited longer than anybody.
    pub fn percentile(&self, share: f64) -> Option<f64> {
        let ms = |end: &End| match end {
            End::After(latency) => latency.as_secs_f64() * 1000.0,
            _ => f64::INFINITY,
        };
        let mut v: Vec<f64> = self.all.iter().map(|(_, end)| ms(end)).collect();
        v.sort_by(f64::total_cmp);
        v.get(((v.len() as f64 * share) as usize).min(v.len().saturating_sub(1))).copied()
    }

    /// All, timed out, failed, not begun.
    pub fn counts(&self) -> [usize; 4] {
        let n = |end: End| self.all.iter().filter(|(_, e)| *e == end).count();
        let failed = self.causes().values().sum();
        [self.all.len(), n(End::TimedOut), failed, n(End::NotBegun)]
    }

    /// Of those that failed.
    pub fn causes(&self) -> BTreeMap<String, usize> {
        let mut sum = BTreeMap::new();
        for (_, end) in &self.all {
            if let End::Failed(cause) = end {
                *sum.entry(cause.clone()).or_default() += 1;
            }
        }
        sum
    }
}

/// Said by clients that are a program of their own, when they begin.
pub const HERE: &str = "clients come";

pub enum Client {
    /// In another network namespace.
    Thread(Arc<AtomicBool>, JoinHandle<Outcome>),
    /// With the library, or on its side of the comparison.
    Program(Proc),
}

impl Client {
    pub fn start(place: &NetHost, to: SocketAddr, rate: f64, timeout: Duration) -> Client {
        let stop = Arc::new(AtomicBool::new(false));
        let (place, theirs) = (place.clone(), stop.clone());
        let thread = std::thread::spawn(move || {
            place.enter().expect("setns");
            super::cpu::urgent_here(0).expect("CPU 0, and a real-time priority");
            drive(to, rate, timeout, &theirs)
        });
        Client::Thread(stop, thread)
    }

    pub fn stop(self) -> Result<Outcome> {
        match self {
            Client::Thread(stop, thread) => {
                stop.store(true, Ordering::Relaxed);
                Ok(thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            }
            Client::Program(program) => {
                program.signal(libc::SIGTERM);
                let said = program.finish(Duration::from_secs(60)).success().stdout;
                let all = said.lines().filter(|line| *line != HERE).map(End::parse);
                Ok(Outcome { all: all.collect::<Option<_>>().context("what clients said")? })
            }
        }
    }
}

static STOP: AtomicBool = AtomicBool::new(false);

extern "C" fn stop(_: i32) {
    STOP.store(true, Ordering::Relaxed);
}

/// To be the clients, until SIGTERM: what became of each request is written to stdout. Not
/// before everything else: what is between them and the server is their own work.
pub fn serve(to: SocketAddr, rate: f64, timeout: Duration) {
    // SAFETY: a handler that only stores.
    unsafe { libc::signal(libc::SIGTERM, stop as extern "C" fn(i32) as libc::sighandler_t) };
    super::cpu::here(0).expect("CPU 0");
    println!("{HERE}");
    let outcome = drive(to, rate, timeout, &STOP);
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    for (at, end) in &outcome.all {
        writeln!(out, "{} {end}", at.as_nanos()).expect("stdout");
    }
}

impl std::fmt::Display for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            End::After(took) => write!(f, "{}", took.as_nanos()),
            End::TimedOut => f.write_str("late"),
            End::Failed(cause) => write!(f, "failed {cause}"),
            End::NotBegun => f.write_str("none"),
        }
    }
}

impl End {
    fn failed(e: &std::io::Error) -> End {
        End::Failed(e.kind().to_string())
    }
    fn cut_off() -> End {
        End::Failed("cut off".to_owned())
    }
    /// A line of [`serve`].
    fn parse(line: &str) -> Option<(Duration, End)> {
        let (at, end) = line.split_once(' ')?;
        let end = match end {
            "late" => End::TimedOut,
            "none" => End::NotBegun,
            _ => match end.strip_prefix("failed ") {
                Some(cause) => End::Failed(cause.to_owned()),
                None => End::After(Duration::from_nanos(end.parse().ok()?)),
            },
        };
        Some((Duration::from_nanos(at.parse().ok()?), end))
    }
}

struct Request {
    stream: TcpStream,
    begun: Instant,
    sent: bool,
    got: usize,
}

fn drive(to: SocketAddr, rate: f64, timeout: Duration, stop: &AtomicBool) -> Outcome {
    // SAFETY: no memory is involved.
    let ep = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
    assert!(ep >= 0, "epoll");
    // SAFETY: just made, ours alone.
    let ep = unsafe { std::os::fd::OwnedFd::from_raw_fd(ep) };
    let started = Instant::now();
    let mut all = Vec::new();
    let mut open: HashMap<i32, Request> = HashMap::new();
    // In the order of their beginning, to find those that have waited too long.
    let mut order: VecDeque<(Instant, i32)> = VecDeque::new();
    let mut next = 0u64;
    loop {
        let stopped = stop.load(Ordering::Relaxed);
        if stopped && open.is_empty() {
            return Outcome { all };
        }
        let due = |n: u64| started + Duration::from_secs_f64(n as f64 / rate);
        while !stopped && due(next) <= Instant::now() {
            next += 1;
            // Since when it should have begun: a client that is held up hides nothing.
            let begun = due(next - 1);
            match (open.len() < MOST).then(|| begin(&ep, to)).flatten() {
                Some(stream) => {
                    let fd = stream.as_raw_fd();
                    order.push_back((begun, fd));
                    open.insert(fd, Request { stream, begun, sent: false, got: 0 });
                }
                None => all.push((begun - started, End::NotBegun)),
            }
        }
        let wait =
            if stopped { Duration::from_millis(20) } else { due(next).saturating_duration_since(Instant::now()) };
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 256];
        let ts = libc::timespec { tv_sec: 0, tv_nsec: i64::from(wait.min(Duration::from_millis(20)).subsec_nanos()) };
        // SAFETY: an array of that many events, and a timespec.
        let n = unsafe {
            libc::syscall(libc::SYS_epoll_pwait2, ep.as_raw_fd(), events.as_mut_ptr(), events.len(), &ts, 0, 0)
        };
        for e in &events[..n.max(0) as usize] {
            let fd = e.u64 as i32;
            let Some(r) = open.get_mut(&fd) else { continue };
            if let Some(end) = step(&ep, r) {
                all.push((r.begun - started, end));
                forget(&ep, open.remove(&fd));
            }
        }
        while order.front().is_some_and(|(begun, _)| begun.elapsed() > timeout) {
            let Some((begun, fd)) = order.pop_front() else { break };
            // The number may be another's by now.
            if open.get(&fd).is_some_and(|r| r.begun == begun) {
                forget(&ep, open.remove(&fd));
                all.push((begun - started, End::TimedOut));
            }
        }
        while order.front().is_some_and(|(begun, fd)| open.get(fd).is_none_or(|r| r.begun != *begun)) {
            order.pop_front();
        }
    }
}

fn watch(ep: &impl AsRawFd, op: i32, fd: i32, events: i32) -> bool {
    let mut ev = libc::epoll_event { events: events as u32, u64: fd as u64 };
    // SAFETY: one event.
    unsafe { libc::epoll_ctl(ep.as_raw_fd(), op, fd, &mut ev) == 0 }
}

/// Out of the instance before it is closed: a child that is being started may hold the
/// socket for a moment, and its number is soon another's.
fn forget(ep: &impl AsRawFd, r: Option<Request>) {
    if let Some(r) = r {
        watch(ep, libc::EPOLL_CTL_DEL, r.stream.as_raw_fd(), 0);
    }
}

fn begin(ep: &impl AsRawFd, to: SocketAddr) -> Option<TcpStream> {
    let SocketAddr::V4(to) = to else { return None };
    let kind = libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: no memory is involved.
    let fd = unsafe { libc::socket(libc::AF_INET, kind, 0) };
    if fd < 0 {
        return None;
    }
    // SAFETY: just made, ours alone.
    let stream = unsafe { TcpStream::from_raw_fd(fd) };
    let addr = libc::sockaddr_in {
        sin_family: libc::AF_INET as u16,
        sin_port: to.port().to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from(*to.ip()).to_be() },
        sin_zero: [0; 8],
    };
    // SAFETY: an address of that size.
    let r = unsafe { libc::connect(fd, (&raw const addr).cast(), size_of_val(&addr) as u32) };
    let begun = r == 0 || std::io::Error::last_os_error().raw_os_error() == Some(libc::EINPROGRESS);
    (begun && watch(ep, libc::EPOLL_CTL_ADD, fd, libc::EPOLLOUT)).then_some(stream)
}

/// None: it goes on.
fn step(ep: &impl AsRawFd, r: &mut Request) -> Option<End> {
    if !r.sent {
        if let Err(e) = r.stream.write_all(b"GET /64 HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n") {
            return Some(End::failed(&e));
        }
        r.sent = true;
        let watched = watch(ep, libc::EPOLL_CTL_MOD, r.stream.as_raw_fd(), libc::EPOLLIN);
        return (!watched).then_some(End::cut_off());
    }
    let mut buf = [0u8; 2048];
    loop {
        match r.stream.read(&mut buf) {
            Ok(0) if r.got > super::BODY => return Some(End::After(r.begun.elapsed())),
            Ok(0) => return Some(End::cut_off()),
            Ok(n) => r.got += n,
            Err(e) if e.kind() == ErrorKind::WouldBlock => return None,
            Err(e) => return Some(End::failed(&e)),
        }
    }
}
