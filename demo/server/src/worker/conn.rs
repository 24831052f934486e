//! One client connection, and in proxy mode its connection to a backend.
//!
//! Edge-triggered: [`Conn::advance`] goes on until a system call would block.

use super::Context;
use crate::stats::add;
use crate::worker::Answer;
use crate::{http, sys};
use std::io::Error;
use std::os::fd::OwnedFd;

/// The events of a client, until an answer does not fit into its buffer.
pub const INPUT: libc::c_int = libc::EPOLLIN | libc::EPOLLRDHUP | libc::EPOLLET;
const BOTH: libc::c_int = INPUT | libc::EPOLLOUT;

/// After a step: another one, an event, or the end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Next {
    Again,
    Wait,
    Close,
}

enum State {
    /// Reading a request.
    Request,
    /// Writing an answer of our own.
    Answer { which: Answer, sent: usize },
    /// Waiting for the connection to the backend.
    Connecting,
    /// Writing the request to the backend.
    Forward { sent: usize },
    /// Passing the backend's answer on.
    Relay(Relay),
}

/// How far a backend's answer has been passed on.
#[derive(Default)]
struct Relay {
    /// Beginning of the answer, while its head is not complete.
    head: Vec<u8>,
    head_done: bool,
    /// Bytes of the body still to come; `None`: until the backend closes.
    left: Option<u64>,
    /// The backend keeps its connection.
    keep: bool,
    /// Read from the backend, but the client had no room.
    pending: Vec<u8>,
    /// Something reached the client: too late for another answer.
    passed: bool,
}

pub struct Conn {
    pub client: OwnedFd,
    /// When something happened last, in seconds.
    pub last: u32,
    backend: Option<OwnedFd>,
    /// The backend's connection has served a request before.
    used: bool,
    /// Tokens of the client and of the backend.
    tokens: [u64; 2],
    state: State,
    /// Received and not yet answered.
    request: Vec<u8>,
    /// Length of the first request in there, once complete.
    head: usize,
    /// The client is watched for room, too.
    watches_output: bool,
}

impl Conn {
    pub fn new(client: OwnedFd, tokens: [u64; 2], now: u32) -> Conn {
        Conn {
            client,
            last: now,
            backend: None,
            used: false,
            tokens,
            state: State::Request,
            request: Vec::new(),
            head: 0,
            watches_output: false,
        }
    }

    /// Does what can be done after an event of the client's or the backend's.
    pub fn advance(&mut self, context: &mut Context, mut of_backend: bool) -> Next {
        loop {
            let next = match self.state {
                State::Request if of_backend => {
                    // A backend that was not asked only ever closes.
                    self.drop_backend(context);
                    Next::Wait
                }
                State::Request => self.read_request(context),
                State::Answer { which, sent } => self.write_answer(context, which, sent),
                State::Connecting if of_backend => self.connected(context),
                State::Connecting => Next::Wait,
                State::Forward { sent } => self.forward(context, sent),
                State::Relay(_) => self.relay(context),
            };
            if next != Next::Again {
                return next;
            }
            // The next request is the client's, whose event may be gone by.
            if matches!(self.state, State::Request) {
                of_backend = false;
            }
        }
    }

    /// Counts on which CPU the latest packets came in, if that is wanted.
    pub fn account(&mut self, context: &Context) {
        if context.config.locality {
            add(&context.counters.passive, 1);
            add(&context.counters.passive_local, sys::is_local(&self.client).into());
        }
        self.drop_backend(context);
    }

    fn drop_backend(&mut self, context: &Context) {
        if let Some(backend) = self.backend.take().filter(|_| context.config.locality) {
            add(&context.counters.active, 1);
            add(&context.counters.active_local, sys::is_local(&backend).into());
        }
    }

    fn client_failed(&self, context: &Context, what: &str, error: Option<Error>) -> Next {
        add(&context.counters.client_errors, 1);
        context.complain(what, &error.unwrap_or_else(|| Error::other("ended too early")));
        Next::Close
    }

    /// Another answer if there was none yet, else the end.
    fn backend_failed(&mut self, context: &Context, what: &str, error: Option<Error>) -> Next {
        add(&context.counters.backend_errors, 1);
        context.complain(what, &error.unwrap_or_else(|| Error::other("ended too early")));
        self.drop_backend(context);
        if matches!(&self.state, State::Relay(relay) if relay.passed) {
            return Next::Close;
        }
        self.state = State::Answer { which: Answer::BadGateway, sent: 0 };
        Next::Again
    }

    fn read_request(&mut self, context: &mut Context) -> Next {
        loop {
            if let Some(length) = http::head_length(&self.request) {
                self.head = length;
                return self.dispatch(context);
            }
            if self.request.len() >= http::MAX_HEAD {
                return self.client_failed(context, "request", Some(Error::other("too long")));
            }
            match sys::read(&self.client, &mut context.buffer) {
                Ok(None) => return Next::Wait,
                Ok(Some(0)) if self.request.is_empty() => return Next::Close,
                Ok(Some(0)) => return self.client_failed(context, "request", None),
                Ok(Some(n)) => self.request.extend_from_slice(&context.buffer[..n]),
                Err(e) => return self.client_failed(context, "request", Some(e)),
            }
        }
    }

    fn keepalive(&self, context: &Context) -> bool {
        context.config.keepalive && http::wants_keepalive(&self.request[..self.head])
    }

    fn dispatch(&mut self, context: &mut Context) -> Next {
        if context.config.backends.is_empty() {
            let which = if self.keepalive(context) { Answer::Kept } else { Answer::Closed };
            self.state = State::Answer { which, sent: 0 };
            return Next::Again;
        }
        if self.backend.is_some() {
            self.state = State::Forward { sent: 0 };
            return Next::Again;
        }
        self.connect(context)
    }

    fn connect(&mut self, context: &mut Context) -> Next {
        self.used = false;
        let result = sys::connect(&context.backend())
            .and_then(|backend| context.epoll.add(&backend, BOTH, self.tokens[1]).map(|()| backend));
        match result {
            Ok(backend) => {
                self.backend = Some(backend);
                self.state = State::Connecting;
                Next::Wait
            }
            Err(e) => self.backend_failed(context, "connect", Some(e)),
        }
    }

    fn connected(&mut self, context: &Context) -> Next {
        let Some(backend) = &self.backend else { return Next::Close };
        match sys::connect_result(backend) {
            Ok(()) => {
                add(&context.counters.connected, 1);
                self.state = State::Forward { sent: 0 };
                Next::Again
            }
            Err(e) => self.backend_failed(context, "connect", Some(e)),
        }
    }

    fn forward(&mut self, context: &mut Context, sent: usize) -> Next {
        let Some(backend) = &self.backend else { return Next::Close };
        match sys::write(backend, &self.request[sent..self.head]) {
            Ok(None) => Next::Wait,
            Ok(Some(n)) if sent + n < self.head => {
                self.state = State::Forward { sent: sent + n };
                Next::Again
            }
            Ok(Some(_)) => {
                self.state = State::Relay(Relay::default());
                Next::Again
            }
            // The backend closed an idle connection, which is no error.
            Err(_) if self.used => {
                self.drop_backend(context);
                self.connect(context)
            }
            Err(e) => self.backend_failed(context, "forward", Some(e)),
        }
    }

    fn relay(&mut self, context: &mut Context) -> Next {
        let (State::Relay(relay), Some(backend)) = (&mut self.state, &self.backend) else { return Next::Close };
        if !relay.pending.is_empty() {
            match sys::write(&self.client, &relay.pending) {
                Ok(None) => return self.watch_output(context),
                Ok(Some(n)) => {
                    add(&context.counters.bytes, n as u64);
                    relay.pending.drain(..n);
                    return Next::Again;
                }
                Err(e) => return self.client_failed(context, "answer", Some(e)),
            }
        }
        if relay.head_done && relay.left == Some(0) {
            let keep = relay.keep;
            return self.answered(context, keep);
        }
        let n = match sys::read(backend, &mut context.buffer) {
            Ok(None) => return Next::Wait,
            Ok(Some(0)) if relay.head_done && relay.left.is_none() => return self.answered(context, false),
            Ok(Some(0)) => return self.backend_failed(context, "answer", None),
            Ok(Some(n)) => n,
            Err(e) => return self.backend_failed(context, "answer", Some(e)),
        };
        if !relay.feed(&context.buffer[..n]) {
            return self.backend_failed(context, "answer", Some(Error::other("not HTTP")));
        }
        // Straight on to the client, usually.
        let sent = match sys::write(&self.client, &context.buffer[..n]) {
            Ok(sent) => sent.unwrap_or(0),
            Err(e) => return self.client_failed(context, "answer", Some(e)),
        };
        relay.passed = true;
        relay.pending.extend_from_slice(&context.buffer[sent..n]);
        add(&context.counters.bytes, sent as u64);
        Next::Again
    }

    fn write_answer(&mut self, context: &Context, which: Answer, sent: usize) -> Next {
        let answer = &context.config.answers[which as usize];
        match sys::write(&self.client, &answer[sent..]) {
            Ok(None) => self.watch_output(context),
            Ok(Some(n)) => {
                add(&context.counters.bytes, n as u64);
                if sent + n < answer.len() {
                    self.state = State::Answer { which, sent: sent + n };
                    return Next::Again;
                }
                match which {
                    Answer::BadGateway => Next::Close,
                    _ => self.answered(context, which == Answer::Kept),
                }
            }
            Err(e) => self.client_failed(context, "answer", Some(e)),
        }
    }

    /// The answer is with the client's kernel.
    fn answered(&mut self, context: &Context, keep: bool) -> Next {
        add(&context.counters.requests, 1);
        if !keep || !self.keepalive(context) {
            return Next::Close;
        }
        self.request.drain(..self.head);
        self.head = 0;
        self.used = true;
        self.state = State::Request;
        Next::Again
    }

    fn watch_output(&mut self, context: &Context) -> Next {
        if self.watches_output {
            return Next::Wait;
        }
        self.watches_output = true;
        match context.epoll.modify(&self.client, BOTH, self.tokens[0]) {
            Ok(()) => Next::Wait,
            Err(e) => self.client_failed(context, "epoll", Some(e)),
        }
    }
}

impl Relay {
    /// Follows the answer to its end. False if it is none, or longer than it said.
    fn feed(&mut self, bytes: &[u8]) -> bool {
        let body = if self.head_done {
            bytes.len()
        } else {
            self.head.extend_from_slice(bytes);
            let Some(length) = http::head_length(&self.head) else { return self.head.len() < http::MAX_HEAD };
            let body = self.head.len() - length;
            self.head.truncate(length);
            self.head_done = true;
            self.left = http::body_length(&self.head);
            self.keep = self.left.is_some() && http::wants_keepalive(&self.head);
            body
        };
        match &mut self.left {
            None => true,
            Some(left) => match left.checked_sub(body as u64) {
                Some(rest) => {
                    *left = rest;
                    true
                }
                None => false,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_followed_in_any_pieces() {
        let answer = http::answer("200 OK", b"0123456789", true);
        for cut in 1..answer.len() {
            let mut relay = Relay::default();
            assert!(relay.feed(&answer[..cut]));
            assert!(relay.left != Some(0) || !relay.head_done, "not complete after {cut}");
            assert!(relay.feed(&answer[cut..]));
            assert!(relay.head_done && relay.left == Some(0) && relay.keep);
            assert!(!relay.feed(b"x"), "longer than it said");
        }
    }

    #[test]
    fn what_is_no_answer_is_refused() {
        let mut relay = Relay::default();
        assert!(!relay.feed(&[b'x'; http::MAX_HEAD]));
    }
}
