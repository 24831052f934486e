//! The demo server as its users see it.

use fsocket_testkit::{net, Proc};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::process::Command;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(10);

struct Server {
    proc: Proc,
    port: u16,
    _dir: tempfile::TempDir,
}

/// Starts it on a free port and waits until `sockets` listen.
fn start_with(args: &[&str], sockets: usize) -> Server {
    let port = net::free_port();
    let dir = tempfile::tempdir().expect("directory");
    let mut command = Command::new(env!("CARGO_BIN_EXE_fastsocket-demo"));
    command.args(["-a", &format!("127.0.0.1:{port}")]).args(args);
    let mut proc = Proc::spawn(dir.path(), "fastsocket-demo", command);
    proc.wait_stdout("listening on", LIMIT);
    net::wait_until(LIMIT, || net::kernel_sockets(port, "0A") == sockets).expect("listen sockets");
    Server { proc, port, _dir: dir }
}

fn start(args: &[&str]) -> Server {
    start_with(args, 1)
}

impl Server {
    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).expect("connect");
        stream.set_read_timeout(Some(LIMIT)).expect("timeout");
        stream
    }

    /// Sends the bytes and reads to the end.
    fn exchange(&self, request: &str) -> String {
        let mut stream = self.connect();
        stream.write_all(request.as_bytes()).expect("write");
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).expect("read");
        String::from_utf8(answer).expect("text")
    }

    fn workers(&self) -> Vec<i32> {
        let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", self.proc.pid()));
        children.expect("children").split_whitespace().map(|pid| pid.parse().expect("pid")).collect()
    }

    /// Ends it and gives back what it counted.
    fn totals(self) -> String {
        self.proc.signal(libc::SIGTERM);
        let said = self.proc.finish(LIMIT).success().stdout;
        said.lines().last().expect("totals").to_owned()
    }
}

const GET: &str = "GET / HTTP/1.1\r\nHost: x\r\n\r\n";

/// Head and body of each of several answers that follow one another.
fn answers(text: &str) -> Vec<(String, String)> {
    let mut rest = text;
    let mut found = Vec::new();
    while !rest.is_empty() {
        let end = rest.find("\r\n\r\n").expect("head") + 4;
        let head = &rest[..end];
        let length = head.split("Content-Length: ").nth(1).and_then(|t| t.split("\r\n").next()).expect("length");
        let length: usize = length.parse().expect("number");
        found.push((head.to_owned(), rest[end..end + length].to_owned()));
        rest = &rest[end + length..];
    }
    found
}

#[test]
fn direct_mode_answers_and_closes() {
    let server = start(&["-w", "2", "-s", "100"]);
    for _ in 0..20 {
        let all = answers(&server.exchange(GET));
        assert_eq!(all.len(), 1);
        assert!(
            all[0].0.starts_with("HTTP/1.1 200 OK\r\n") && all[0].0.contains("Connection: close\r\n"),
            "{}",
            all[0].0
        );
        assert_eq!(all[0].1, "x".repeat(100));
    }
    let totals = server.totals();
    assert!(totals.contains("accepted 20 requests 20") && !totals.contains("error"), "{totals}");
}

#[test]
fn keepalive_serves_pieces_and_pipelines() {
    let server = start(&["-w", "1", "-k"]);
    let mut stream = server.connect();
    // Byte by byte, then many at once, more than fit into a buffer.
    for byte in GET.bytes() {
        stream.write_all(&[byte]).expect("write");
    }
    let requests = 20_000;
    let mut writer = stream.try_clone().expect("clone");
    let sender = std::thread::spawn(move || {
        writer.write_all(GET.repeat(requests).as_bytes()).expect("write");
        writer.write_all(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n").expect("write");
    });
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("read");
    sender.join().expect("sender");
    assert_eq!(answers(&text).len(), requests + 2);
    let totals = server.totals();
    assert!(totals.contains("accepted 1 requests 20002"), "{totals}");
}

#[test]
fn a_slow_reader_gets_a_large_answer_whole() {
    let server = start(&["-w", "1", "-s", "8000000"]);
    let mut stream = server.connect();
    stream.write_all(GET.as_bytes()).expect("write");
    std::thread::sleep(Duration::from_millis(300));
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("read");
    assert_eq!(answers(&text)[0].1.len(), 8_000_000);
}

#[test]
fn proxy_mode_takes_backends_in_turn() {
    let backends = [start(&["-w", "1", "-s", "1000"]), start(&["-w", "1", "-s", "2000000"])];
    let address: Vec<String> = backends.iter().map(|b| format!("127.0.0.1:{}", b.port)).collect();
    let proxy = start(&["-w", "1", "-x", &address[0], "-x", &address[1]]);
    let mut lengths: Vec<usize> = (0..10).map(|_| answers(&proxy.exchange(GET))[0].1.len()).collect();
    lengths.sort_unstable();
    assert_eq!(lengths, [[1000; 5], [2_000_000; 5]].concat());
    let totals = proxy.totals();
    assert!(totals.contains("requests 10") && totals.contains("connected 10") && !totals.contains("error"), "{totals}");
}

#[test]
fn a_proxy_keeps_connections_on_both_sides() {
    let backend = start(&["-w", "1", "-k"]);
    let proxy = start(&["-w", "1", "-k", "-x", &format!("127.0.0.1:{}", backend.port)]);
    let text = proxy.exchange(&(GET.repeat(50) + "GET / HTTP/1.1\r\nConnection: close\r\n\r\n"));
    assert_eq!(answers(&text).len(), 51);
    let totals = proxy.totals();
    assert!(totals.contains("requests 51") && totals.contains("connected 1") && !totals.contains("error"), "{totals}");
    let totals = backend.totals();
    assert!(totals.contains("accepted 1 requests 51"), "{totals}");
}

#[test]
fn a_missing_backend_is_a_bad_gateway() {
    let proxy = start(&["-w", "1", "-x", &format!("127.0.0.1:{}", net::free_port())]);
    assert!(proxy.exchange(GET).starts_with("HTTP/1.1 502 "));
    let totals = proxy.totals();
    assert!(totals.contains("backend_errors 1"), "{totals}");
}

#[test]
fn reuseport_gives_each_worker_a_socket_and_threads_share_a_process() {
    let server = start_with(&["-w", "3", "-r"], 3);
    assert_eq!(server.workers().len(), 3);
    assert_eq!(answers(&server.exchange(GET)).len(), 1);
    let server = start_with(&["-w", "3", "-r", "--threads"], 3);
    assert_eq!(server.workers().len(), 0);
    assert_eq!(answers(&server.exchange(GET)).len(), 1);
    assert!(server.totals().contains("requests 1"));
}

#[test]
fn several_addresses_and_ipv6() {
    let other = net::free_port();
    let server = start(&["-w", "2", "-a", &format!("[::1]:{other}")]);
    assert_eq!(answers(&server.exchange(GET)).len(), 1);
    let mut stream = TcpStream::connect(("::1", other)).expect("connect");
    stream.write_all(GET.as_bytes()).expect("write");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("read");
    assert_eq!(answers(&text).len(), 1);
}

#[test]
fn a_killed_worker_is_replaced_and_a_renewal_fails_no_request() {
    let server = start(&["-w", "2"]);
    let before = server.workers();
    // SAFETY: a plain system call; the parent has not reaped it.
    unsafe { libc::kill(before[0], libc::SIGKILL) };
    net::wait_until(LIMIT, || {
        let now = server.workers();
        now.len() == 2 && !now.contains(&before[0])
    })
    .expect("another worker");
    for _ in 0..5 {
        let before = server.workers();
        server.proc.signal(libc::SIGHUP);
        for _ in 0..100 {
            assert_eq!(answers(&server.exchange(GET)).len(), 1);
        }
        net::wait_until(LIMIT, || {
            let now = server.workers();
            now.len() == 2 && now.iter().all(|pid| !before.contains(pid))
        })
        .expect("all workers are new");
    }
    assert!(server.totals().contains("requests 500"));
}

#[test]
fn statistics_every_second_as_text_and_json() {
    for (args, word) in
        [(&["-w", "2"][..], "requests/s"), (&["-w", "2", "--json"], "{\"second\":1,\"total\":{\"accepted\":")]
    {
        let mut server = start(args);
        server.exchange(GET);
        server.proc.wait_stdout(word, LIMIT);
    }
}

#[test]
fn bad_input_is_refused_with_a_message() {
    let port = net::free_port().to_string();
    let _taken = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, port.parse().expect("port"))).expect("listen");
    let taken = format!("127.0.0.1:{port}");
    let cases: &[(&[&str], &str)] = &[
        (&[], "--address"),
        (&["-a", "nonsense"], "ADDR:PORT"),
        (&["-a", "127.0.0.1:1", "-w", "0"], "0"),
        (&["-a", &taken], "in use"),
        (&["-a", &taken, "-r"], "in use"),
        (&["-a", "127.0.0.1:0", "-o", "/nonexistent/log"], "/nonexistent/log"),
    ];
    for (args, message) in cases {
        let output = Command::new(env!("CARGO_BIN_EXE_fastsocket-demo")).args(*args).output().expect("run");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(message), "{args:?}: {said}");
    }
}
