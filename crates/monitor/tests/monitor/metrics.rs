//! Tests of `fastsocketd --metrics` with the real program. As root it is two processes, and the
//! front is confined.

use crate::support::*;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

struct Served {
    monitor: Child,
    address: SocketAddr,
    _dir: tempfile::TempDir,
}

fn command(address: SocketAddr) -> (Command, PathBuf, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("d/s");
    let mut command = Command::new(env!("CARGO_BIN_EXE_fastsocketd"));
    command.arg("--socket").arg(&socket).arg("--metrics").arg(address.to_string());
    (command, socket, dir)
}

impl Served {
    fn start() -> Served {
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let (mut command, socket, dir) = command(address);
        let monitor = command.stderr(Stdio::null()).spawn().unwrap();
        wait_until("it listens", || socket.exists());
        Served { monitor, address, _dir: dir }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    fn ask(&self, request: &str) -> String {
        let mut stream = self.connect();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    fn scrape(&self) -> String {
        self.ask("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let pid = rustix::process::Pid::from_child(&self.monitor);
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        let _ = self.monitor.wait();
    }
}

#[test]
fn a_scrape() {
    let s = Served::start();
    let answer = s.scrape();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n") && head.contains(fsocket_metrics::CONTENT_TYPE), "{head}");
    assert!(head.contains(&format!("Content-Length: {}\r\n", body.len())), "{head}");
    assert!(body.contains("fastsocket_up 1\n") && body.ends_with("# EOF\n"), "{body}");
    assert!(body.contains(&format!("version=\"{}\"", env!("CARGO_PKG_VERSION"))), "{body}");
    let only_head = s.ask("HEAD /metrics HTTP/1.1\r\n\r\n");
    assert!(only_head.starts_with("HTTP/1.1 200 OK\r\n") && only_head.ends_with("\r\n\r\n"), "{only_head}");
}

#[test]
fn what_is_no_scrape() {
    let s = Served::start();
    for (request, status) in [
        ("GET /nothing HTTP/1.1\r\n\r\n", "404"),
        ("POST /metrics HTTP/1.1\r\n\r\n", "405"),
        ("nonsense\r\n\r\n", "400"),
        ("\u{0}\u{1}\n\n", "400"),
        (&format!("GET /{} HTTP/1.1\r\n\r\n", "x".repeat(9000)), "431"),
    ] {
        let answer = s.ask(request);
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{request:.20}: {answer}");
    }
    assert!(s.scrape().contains("fastsocket_up 1\n"));
}

/// A scrape works even beside many connections that send nothing.
#[test]
fn scrapers_that_say_nothing() {
    let s = Served::start();
    let silent: Vec<TcpStream> = (0..100).map(|_| s.connect()).collect();
    assert!(s.scrape().contains("fastsocket_up 1\n"));
    for one in [&silent[0], &silent[99]] {
        assert_eq!(one.try_clone().unwrap().read_to_end(&mut Vec::new()).unwrap(), 0, "it is turned away");
    }
    assert!(s.scrape().contains("fastsocket_up 1\n"));
}

#[test]
fn an_address_in_use_is_125_and_leaves_nothing() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let (mut command, socket, _dir) = command(address);
    let done = command.output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr);
    assert_eq!(done.status.code(), Some(125), "{said}");
    let once = format!("fastsocketd: cannot serve metrics at {address}: Address already in use (os error 98)\n");
    assert_eq!(said, once);
    assert!(!socket.parent().unwrap().exists());
}
