//! The part of HTTP/1.1 that a scraper needs: one request for each connection, and its answer. No
//! function here blocks.

use rustix::event::PollFlags;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

/// Longest request, in bytes.
const LONGEST: usize = 8192;
/// How long a connection may last.
const PATIENCE: Duration = Duration::from_secs(5);

#[derive(Debug, PartialEq, Eq)]
pub struct Request {
    pub method: String,
    /// The path, without the query behind a question mark.
    pub path: String,
}

pub struct Answer {
    pub status: &'static str,
    pub content_type: &'static str,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn text(status: &'static str, text: &str) -> Answer {
        Answer { status, content_type: "text/plain; charset=utf-8", body: text.into() }
    }
}

/// The next thing that a connection needs.
#[derive(Debug, PartialEq, Eq)]
pub enum Step {
    /// It waits for the scraper.
    Waits,
    /// It needs an answer to this request.
    Asks(Request),
    Done,
}

enum State {
    Reads(Vec<u8>),
    /// Bytes still to be sent.
    Writes(Vec<u8>),
    /// Everything is sent. The scraper must close first: if this side closed with unread bytes,
    /// the kernel would send a reset, and the scraper could lose the answer.
    Drains,
}

pub struct Connection {
    stream: TcpStream,
    state: State,
    is_head: bool,
    pub deadline: Instant,
}

impl Connection {
    /// `None`: the socket cannot be set to non-blocking mode.
    pub fn new(stream: TcpStream) -> Option<Connection> {
        stream.set_nonblocking(true).ok()?;
        let deadline = Instant::now() + PATIENCE;
        Some(Connection { stream, state: State::Reads(Vec::new()), is_head: false, deadline })
    }

    pub fn stream(&self) -> &TcpStream {
        &self.stream
    }

    pub fn interest(&self) -> PollFlags {
        match self.state {
            State::Writes(_) => PollFlags::OUT,
            State::Reads(_) | State::Drains => PollFlags::IN,
        }
    }

    /// Proceeds as far as possible without waiting.
    pub fn step(&mut self, now: Instant) -> Step {
        if now >= self.deadline {
            return Step::Done;
        }
        match &mut self.state {
            State::Reads(bytes) => match read(&mut self.stream, bytes, LONGEST) {
                Got::Whole => match parse(bytes) {
                    Some(request) => {
                        self.is_head = request.method == "HEAD";
                        Step::Asks(request)
                    }
                    None => self.refuse("400 Bad Request"),
                },
                Got::Nothing => Step::Waits,
                Got::TooMuch => self.refuse("431 Request Header Fields Too Large"),
                Got::End => Step::Done,
            },
            State::Writes(rest) => match write(&mut self.stream, rest) {
                Ok(()) if rest.is_empty() => {
                    let _ = self.stream.shutdown(Shutdown::Write);
                    self.state = State::Drains;
                    self.step(now)
                }
                Ok(()) => Step::Waits,
                Err(()) => Step::Done,
            },
            State::Drains => match read(&mut self.stream, &mut Vec::new(), LONGEST) {
                Got::Nothing | Got::Whole | Got::TooMuch => Step::Waits,
                Got::End => Step::Done,
            },
        }
    }

    fn refuse(&mut self, status: &'static str) -> Step {
        self.answer(&Answer::text(status, "\n"));
        self.step(Instant::now())
    }

    /// Sets the answer. The next steps send it.
    pub fn answer(&mut self, answer: &Answer) {
        let Answer { status, content_type, body } = answer;
        let length = body.len();
        let mut bytes = format!(
            "HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
        )
        .into_bytes();
        if !self.is_head {
            bytes.extend_from_slice(body);
        }
        self.state = State::Writes(bytes);
    }
}

enum Got {
    /// Incomplete so far.
    Nothing,
    /// A complete request.
    Whole,
    TooMuch,
    End,
}

fn read(stream: &mut TcpStream, into: &mut Vec<u8>, most: usize) -> Got {
    let mut part = [0; 2048];
    loop {
        let seen = into.len();
        match stream.read(&mut part) {
            Ok(0) => return Got::End,
            Ok(n) => into.extend_from_slice(&part[..n]),
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) if e.kind() == ErrorKind::WouldBlock => return Got::Nothing,
            Err(_) => return Got::End,
        }
        if into.len() > most {
            return Got::TooMuch;
        }
        // (An empty line ends the request: the scraper need not close its side to get an answer.
        // Bytes that were searched before are skipped.)
        if is_whole(&into[seen.saturating_sub(3)..]) {
            return Got::Whole;
        }
    }
}

fn write(stream: &mut TcpStream, rest: &mut Vec<u8>) -> Result<(), ()> {
    while !rest.is_empty() {
        match stream.write(rest) {
            Ok(n) => drop(rest.drain(..n)),
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(()),
            Err(_) => return Err(()),
        }
    }
    Ok(())
}

fn is_whole(bytes: &[u8]) -> bool {
    bytes.windows(4).any(|w| w == b"\r\n\r\n") || bytes.windows(2).any(|w| w == b"\n\n")
}

fn parse(bytes: &[u8]) -> Option<Request> {
    let line = std::str::from_utf8(bytes.split(|b| *b == b'\n').next()?).ok()?.trim_end();
    let mut words = line.split(' ');
    let (method, target, version) = (words.next()?, words.next()?, words.next()?);
    if words.next().is_some() || !version.starts_with("HTTP/1.") || method.is_empty() || !target.starts_with('/') {
        return None;
    }
    let path = target.split('?').next()?;
    Some(Request { method: method.to_owned(), path: path.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests() {
        let of = |text: &str| parse(text.as_bytes()).map(|r| (r.method, r.path));
        let get = |path: &str| Some(("GET".to_owned(), path.to_owned()));
        assert_eq!(of("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"), get("/metrics"));
        assert_eq!(of("GET /metrics?x=1 HTTP/1.0\n\n"), get("/metrics"));
        for bad in ["", "GET", "GET /", "GET / HTTP/2", "GET http://x/ HTTP/1.1", "GET / HTTP/1.1 x", " / HTTP/1.1"] {
            assert_eq!(of(bad), None, "{bad}");
        }
        assert!(!is_whole(b"GET / HTTP/1.1\r\n") && is_whole(b"GET / HTTP/1.1\r\n\r\n"));
    }
}
