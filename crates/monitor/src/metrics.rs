//! `--metrics ADDR`: serves metrics over HTTP, from a thread of its own.
//!
//! The thread talks to scrapers. It asks the event loop for a report over a control socket of its
//! own, as `fastsocket stat` does. Slow or hostile scrapers take at most one part in [`SHARE`] of
//! the event loop's time. They delay other scrapers by no more than that.

mod http;

use crate::clients::Client;
use crate::context::Context;
use crate::endpoint::StartError;
use crate::foreign::ForeignFd;
use crate::wire::{self, Received};
use fsocket_proto::report::Report;
use fsocket_proto::{answer, request, Msg};
use http::{Answer, Connection, Step};
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::fd::{AsFd, OwnedFd};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use std::net::{SocketAddr, TcpListener};
use std::time::{Duration, Instant};

/// Scrapers served at a time. One more takes the place of the oldest connection, so scrapers that
/// neither send nor read keep no other out.
const MOST: usize = 64;
/// After a connection could not be accepted (for example, no descriptor was free), the thread
/// tries again after this time.
const PAUSE: Duration = Duration::from_millis(200);
/// A report is reused for this many times as long as the event loop took to make it.
const SHARE: u32 = 20;
/// Longest time for which a report is reused.
const FRESH: Duration = Duration::from_secs(1);
/// How long the thread waits for the event loop's answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// Binds the address. This is done early, before the monitor makes anything that it would have to
/// remove.
///
/// # Errors
/// [`StartError::Metrics`]: for example, the address is in use, or does not belong to this host.
pub fn bind(address: SocketAddr) -> Result<TcpListener, StartError> {
    let bound = TcpListener::bind(address).and_then(|l| l.set_nonblocking(true).map(|()| l));
    bound.map_err(|source| StartError::Metrics { address, source })
}

/// Serves metrics until this monitor ends.
///
/// # Errors
/// Those of the system calls.
pub(crate) fn serve(ctx: &mut Context, listener: TcpListener) -> std::io::Result<()> {
    let (ours, theirs) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    let family = ctx.new_family();
    // The thread is a client with user root: its reports have the sums of all users. They list no
    // single process.
    ctx.clients.add(Client::new(ForeignFd::new(ours, 0), 0, std::process::id(), family))?;
    let server = Server { listener, line: theirs, seq: 0, connections: Vec::new(), last: None, accepts_at: None };
    std::thread::Builder::new().name("metrics".into()).spawn(move || server.run())?;
    Ok(())
}

struct Server {
    listener: TcpListener,
    /// The socket to the event loop.
    line: OwnedFd,
    seq: u32,
    connections: Vec<Connection>,
    /// The last text, and until when it may be reused.
    last: Option<(Instant, Vec<u8>)>,
    /// When to accept again; `None`: now.
    accepts_at: Option<Instant>,
}

impl Server {
    /// Runs until the event loop has ended.
    fn run(mut self) {
        while self.wait().is_some() {
            if self.accepts_at.is_none() {
                self.accept();
            }
            let now = Instant::now();
            let mut connections = std::mem::take(&mut self.connections);
            connections.retain_mut(|c| {
                let mut step = c.step(now);
                if let Step::Asks(request) = step {
                    c.answer(&self.answer(&request));
                    step = c.step(now);
                }
                step == Step::Waits
            });
            self.connections = connections;
        }
    }

    /// Sleeps until there is something to do. `None`: the event loop has ended.
    fn wait(&mut self) -> Option<()> {
        let mut fds = vec![PollFd::new(&self.line, PollFlags::IN)];
        fds.extend(self.connections.iter().map(|c| PollFd::new(c.stream(), c.interest())));
        self.accepts_at = self.accepts_at.filter(|at| *at > Instant::now());
        if self.accepts_at.is_none() {
            fds.push(PollFd::new(&self.listener, PollFlags::IN));
        }
        let next = self.connections.iter().map(|c| c.deadline).chain(self.accepts_at).min();
        let timeout = next.map(|at| timespec(at.saturating_duration_since(Instant::now())));
        // If a signal interrupts the call, no event is set.
        let _ = poll(&mut fds, timeout.as_ref());
        let line = fds[0].revents();
        drop(fds);
        if line.is_empty() {
            return Some(());
        }
        match wire::receive(self.line.as_fd()) {
            // An answer that came too late for its request.
            Received::Message(..) | Received::Cut(_) | Received::Nothing | Received::Later => Some(()),
            Received::End | Received::Malformed => None,
        }
    }

    fn accept(&mut self) {
        // (Fewer than [`MOST`], so that a connection accepted here is served before newer ones can
        // push it out.)
        for _ in 0..MOST / 2 {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    // Drop the oldest connections, which are the first ones.
                    self.connections.drain(..(self.connections.len() + 1).saturating_sub(MOST));
                    self.connections.extend(Connection::new(stream));
                }
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => return,
                Err(_) => {
                    self.accepts_at = Some(Instant::now() + PAUSE);
                    return;
                }
            }
        }
    }

    fn answer(&mut self, request: &http::Request) -> Answer {
        match (request.method.as_str(), request.path.as_str()) {
            ("GET" | "HEAD", "/metrics") => match self.text() {
                Some(text) => Answer { status: "200 OK", content_type: fsocket_metrics::CONTENT_TYPE, body: text },
                None => Answer::text("503 Service Unavailable", "the monitor does not answer\n"),
            },
            ("GET" | "HEAD", "/") => Answer::text("200 OK", "fastsocketd: /metrics\n"),
            ("GET" | "HEAD", _) => Answer::text("404 Not Found", "only /metrics exists\n"),
            _ => Answer::text("405 Method Not Allowed", "GET or HEAD\n"),
        }
    }

    fn text(&mut self) -> Option<Vec<u8>> {
        let asked = Instant::now();
        if self.last.as_ref().is_none_or(|(until, _)| *until <= asked) {
            let report = self.report()?;
            let until = Instant::now() + (asked.elapsed() * SHARE).min(FRESH);
            self.last = Some((until, fsocket_metrics::text(Some(&report)).into_bytes()));
        }
        self.last.as_ref().map(|(_, text)| text.clone())
    }

    fn report(&mut self) -> Option<Report> {
        self.seq = self.seq.wrapping_add(1);
        let ask = Msg::from(request::Report { reset: false, brief: true }).numbered(self.seq);
        wire::send(self.line.as_fd(), &ask, None).ok()?;
        let end = Instant::now() + PATIENCE;
        loop {
            let left = end.checked_duration_since(Instant::now())?;
            let _ = poll(&mut [PollFd::new(&self.line, PollFlags::IN)], Some(&timespec(left)));
            match wire::receive(self.line.as_fd()) {
                Received::Message(msg, fd) if msg.answers(&ask) && msg.refusal().is_none() => {
                    let answer = msg.read::<answer::Report>().ok()?;
                    let mut text = vec![0; usize::try_from(answer.length).ok()?];
                    let file = std::fs::File::from(fd?);
                    std::os::unix::fs::FileExt::read_exact_at(&file, &mut text, 0).ok()?;
                    return serde_json::from_slice(&text).ok();
                }
                Received::Message(msg, _) if !msg.answers(&ask) => {}
                Received::Nothing | Received::Later => {}
                _ => return None,
            }
        }
    }
}

fn timespec(time: Duration) -> Timespec {
    Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() }
}
