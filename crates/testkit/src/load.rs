//! Puts a load of short connections on a server, and counts failed requests by their causes.
//!
//! Each concurrent request has a thread that makes blocking calls, so that the tool itself is
//! simple. It is not made for high rates (use wrk), but judges every single request while servers
//! are killed and reloaded.

use crate::netns::NetHost;
use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Time limit for connecting, for sending, and for each read.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A request, the number of concurrent ones, and the expected answer.
#[derive(Clone, Debug)]
pub struct Plan {
    pub address: SocketAddr,
    pub concurrency: usize,
    /// A whole request. The server must close after its answer.
    pub request: String,
    /// The expected body of the answer.
    pub body: Vec<u8>,
}

impl Plan {
    /// `GET path`, whose answer must be `body`.
    pub fn get(address: SocketAddr, path: &str, body: &[u8], concurrency: usize) -> Plan {
        let request = format!("GET {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n");
        Plan { address, concurrency, request, body: body.to_vec() }
    }
}

/// The results of the requests.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Number of requests with a complete and correct answer.
    pub answered: u64,
    /// Number of failed requests, by the step and the way it ended, such as `receive: reset`.
    pub failed: BTreeMap<String, u64>,
    /// Number of answered requests for which connecting took longer than 900 ms. The SYN or its
    /// answer was then dropped, and sent again a second later.
    pub retried: u64,
    /// Time of the longest answered request.
    pub slowest: Duration,
    pub elapsed: Duration,
}

impl Outcome {
    /// Number of failed requests.
    pub fn failures(&self) -> u64 {
        self.failed.values().sum()
    }

    fn merge(&mut self, other: Outcome) {
        self.answered += other.answered;
        self.retried += other.retried;
        self.slowest = self.slowest.max(other.slowest);
        self.elapsed = self.elapsed.max(other.elapsed);
        for (cause, count) in other.failed {
            *self.failed.entry(cause).or_default() += count;
        }
    }
}

/// A load that runs until it is stopped, or dropped.
pub struct Load {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Outcome>>,
}

impl Load {
    /// Starts a load in a host, or in this process's own network. Each of the concurrent threads
    /// makes `requests`; `None`: until stopped.
    pub fn start(plan: &Plan, place: Option<&NetHost>, requests: Option<u64>) -> Load {
        let stop = Arc::new(AtomicBool::new(false));
        let start = |_| {
            let (plan, place, stop) = (plan.clone(), place.cloned(), stop.clone());
            std::thread::spawn(move || {
                if let Some(place) = place {
                    place.enter().expect("setns");
                }
                drive(&plan, requests, &stop)
            })
        };
        Load { threads: (0..plan.concurrency).map(start).collect(), stop: stop.clone() }
    }

    /// Lets current requests end, stops, and adds up the results.
    pub fn stop(mut self) -> Outcome {
        self.stop.store(true, Ordering::Relaxed);
        self.join()
    }

    /// Waits until each thread has made its `requests`.
    pub fn finish(mut self) -> Outcome {
        self.join()
    }

    fn join(&mut self) -> Outcome {
        let mut sum = Outcome::default();
        for thread in self.threads.drain(..) {
            sum.merge(thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        sum
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn drive(plan: &Plan, requests: Option<u64>, stop: &AtomicBool) -> Outcome {
    let mut outcome = Outcome::default();
    let mut answer = Vec::new();
    let started = Instant::now();
    let mut left = requests.unwrap_or(u64::MAX);
    while left > 0 && !stop.load(Ordering::Relaxed) {
        left -= 1;
        let began = Instant::now();
        match one(plan, &mut answer) {
            Ok(connecting) => {
                outcome.answered += 1;
                outcome.retried += u64::from(connecting > Duration::from_millis(900));
                outcome.slowest = outcome.slowest.max(began.elapsed());
            }
            Err(cause) => *outcome.failed.entry(cause).or_default() += 1,
        }
    }
    outcome.elapsed = started.elapsed();
    outcome
}

/// Makes one request. Returns the time that connecting took, or the cause of the failure.
fn one(plan: &Plan, answer: &mut Vec<u8>) -> Result<Duration, String> {
    let began = Instant::now();
    let mut stream = TcpStream::connect_timeout(&plan.address, TIMEOUT).map_err(|e| cause("connect", &e))?;
    let connecting = began.elapsed();
    let timeouts = stream.set_read_timeout(Some(TIMEOUT)).and(stream.set_write_timeout(Some(TIMEOUT)));
    timeouts.map_err(|e| cause("options", &e))?;
    stream.write_all(plan.request.as_bytes()).map_err(|e| cause("send", &e))?;
    answer.clear();
    stream.read_to_end(answer).map_err(|e| cause("receive", &e))?;
    let Some(head) = answer.windows(4).position(|four| four == b"\r\n\r\n") else {
        return Err(if answer.is_empty() { "receive: closed without an answer" } else { "receive: cut off" }.to_owned());
    };
    if !answer.starts_with(b"HTTP/1.1 200 ") {
        return Err(format!("answer: {}", String::from_utf8_lossy(&answer[..answer.len().min(12)])));
    }
    let body = &answer[head + 4..];
    if body == plan.body {
        Ok(connecting)
    } else if plan.body.starts_with(body) {
        Err("receive: cut off".to_owned())
    } else {
        Err("answer: other bytes".to_owned())
    }
}

fn cause(step: &str, error: &std::io::Error) -> String {
    let what = match error.kind() {
        ErrorKind::ConnectionRefused => "refused".to_owned(),
        ErrorKind::ConnectionReset => "reset".to_owned(),
        ErrorKind::BrokenPipe => "broken pipe".to_owned(),
        ErrorKind::TimedOut | ErrorKind::WouldBlock => "timeout".to_owned(),
        _ => error.to_string(),
    };
    format!("{step}: {what}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    /// Answers each connection with the next one of `answers`, then ends.
    fn server(answers: Vec<&'static str>) -> (SocketAddr, JoinHandle<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("listen");
        let address = listener.local_addr().expect("address");
        let thread = std::thread::spawn(move || {
            for answer in answers {
                let (mut stream, _) = listener.accept().expect("accept");
                if answer == "reset" {
                    // Let unread bytes arrive, which turn the close into a reset.
                    std::thread::sleep(Duration::from_millis(50));
                    continue;
                }
                let mut request = [0; 1024];
                assert!(stream.read(&mut request).expect("request") > 0);
                stream.write_all(answer.as_bytes()).expect("answer");
            }
        });
        (address, thread)
    }

    #[test]
    fn every_failure_has_its_cause() {
        const GOOD: &str = "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc";
        let cases = [
            (GOOD, ""),
            ("", "receive: closed without an answer"),
            ("reset", "receive: reset"),
            ("HTTP/1.1 200 OK\r\n\r\nab", "receive: cut off"),
            ("HTTP/1.1 200 OK\r\n\r\nabd", "answer: other bytes"),
            ("HTTP/1.1 502 Bad\r\n\r\nabc", "answer: HTTP/1.1 502"),
        ];
        let (address, thread) = server(cases.iter().map(|case| case.0).collect());
        for (answer, expected) in cases {
            let outcome = Load::start(&Plan::get(address, "/", b"abc", 1), None, Some(1)).finish();
            let failed: Vec<&String> = outcome.failed.keys().collect();
            if expected.is_empty() {
                assert!(outcome.answered == 1 && failed.is_empty(), "{answer:?}: {failed:?}");
            } else {
                assert!(outcome.answered == 0 && failed == [expected], "{answer:?}: {failed:?}");
            }
        }
        thread.join().expect("server");
        let outcome = Load::start(&Plan::get(address, "/", b"abc", 2), None, Some(3)).finish();
        assert_eq!(outcome.failed, BTreeMap::from([("connect: refused".to_owned(), 6)]));
    }
}
