//! Clients that start requests at a fixed rate. One thread with one epoll instance runs all clients on CPU 0. Over the
//! network it has real-time priority there, as if the clients were on another machine.

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

/// Maximum number of open connections. Requests beyond that are not begun, and count as lost.
const MOST: usize = 8192;

/// The result of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
enum End {
    After(Duration),
    /// The client gave up after its time limit.
    TimedOut,
    /// The connection was reset, refused or cut off.
    Failed(String),
    /// The client could not begin the request: there was no free port, or [`MOST`] connections were open.
    NotBegun,
}

/// Results of requests, each with the time when the request was due (counted from the start).
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    all: Vec<(Duration, End)>,
}

impl Outcome {
    /// The requests that were due between two times (counted from the start).
    pub fn between(&self, from: Duration, to: Duration) -> Outcome {
        Outcome { all: self.all.iter().filter(|(at, _)| (from..to).contains(at)).cloned().collect() }
    }

    /// A percentile of the latencies, in milliseconds. A request without an answer counts as infinitely slow.
    pub fn percentile(&self, share: f64) -> Option<f64> {
        let ms = |end: &End| match end {
            End::After(latency) => latency.as_secs_f64() * 1000.0,
            _ => f64::INFINITY,
        };
        let mut v: Vec<f64> = self.all.iter().map(|(_, end)| ms(end)).collect();
        v.sort_by(f64::total_cmp);
        v.get(((v.len() as f64 * share) as usize).min(v.len().saturating_sub(1))).copied()
    }

    /// Numbers of requests: all, timed out, failed, not begun.
    pub fn counts(&self) -> [usize; 4] {
        let n = |end: End| self.all.iter().filter(|(_, e)| *e == end).count();
        let failed = self.causes().values().sum();
        [self.all.len(), n(End::TimedOut), failed, n(End::NotBegun)]
    }

    /// The causes of failed requests, with their numbers.
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

/// The first line of output of a client process. It says that the process has begun.
pub const HERE: &str = "clients come";

pub enum Client {
    /// A thread of this process, in another network namespace.
    Thread(Arc<AtomicBool>, JoinHandle<Outcome>),
    /// A process on the server's host, with the library unless stock is measured.
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

/// Runs the clients until SIGTERM, and writes the result of each request to stdout. The clients have no real-time
/// priority, because the transport between them and the server is their own CPU work.
pub fn serve(to: SocketAddr, rate: f64, timeout: Duration) {
    // SAFETY: the handler only stores to an atomic.
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
    /// Parses a line that [`serve`] wrote.
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
    // SAFETY: the call takes no pointers.
    let ep = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
    assert!(ep >= 0, "epoll");
    // SAFETY: the descriptor is new, and nothing else owns it.
    let ep = unsafe { std::os::fd::OwnedFd::from_raw_fd(ep) };
    let started = Instant::now();
    let mut all = Vec::new();
    let mut open: HashMap<i32, Request> = HashMap::new();
    // Open requests in the order in which they began, to find those that have waited too long.
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
            // The latency counts from the time when the request was due, so that a client that runs late hides no
            // delay.
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
        // SAFETY: `events` is writable for its length, and `ts` lives through the call.
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
            // The descriptor number may belong to a newer request by now.
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
    // SAFETY: `ev` lives through the call.
    unsafe { libc::epoll_ctl(ep.as_raw_fd(), op, fd, &mut ev) == 0 }
}

/// Removes the socket from the epoll instance before it is closed. A child process that is being started may hold
/// the socket for a moment, so the close alone would not remove it. Its descriptor number is soon used again.
fn forget(ep: &impl AsRawFd, r: Option<Request>) {
    if let Some(r) = r {
        watch(ep, libc::EPOLL_CTL_DEL, r.stream.as_raw_fd(), 0);
    }
}

fn begin(ep: &impl AsRawFd, to: SocketAddr) -> Option<TcpStream> {
    let SocketAddr::V4(to) = to else { return None };
    let kind = libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: the call takes no pointers.
    let fd = unsafe { libc::socket(libc::AF_INET, kind, 0) };
    if fd < 0 {
        return None;
    }
    // SAFETY: the descriptor is new, and nothing else owns it.
    let stream = unsafe { TcpStream::from_raw_fd(fd) };
    let addr = libc::sockaddr_in {
        sin_family: libc::AF_INET as u16,
        sin_port: to.port().to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from(*to.ip()).to_be() },
        sin_zero: [0; 8],
    };
    // SAFETY: `addr` is readable for the given length.
    let r = unsafe { libc::connect(fd, (&raw const addr).cast(), size_of_val(&addr) as u32) };
    let begun = r == 0 || std::io::Error::last_os_error().raw_os_error() == Some(libc::EINPROGRESS);
    (begun && watch(ep, libc::EPOLL_CTL_ADD, fd, libc::EPOLLOUT)).then_some(stream)
}

/// Sends the request, or reads the answer. None: the request goes on.
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
