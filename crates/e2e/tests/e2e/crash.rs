//! SIGKILL ends a server, a client or the monitor while it works.

use fsocket_e2e as e2e;
use fsocket_sys as sys;
use fsocket_testkit::host::{Accel, Side, Stock};
use fsocket_testkit::{helper, net, stock_mode, Host, Proc, PYTHON};
use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);

/// `tests/apps/hold.py` and the file that tells it what to do.
struct Held {
    proc: Proc,
    control: PathBuf,
}

impl Held {
    #[track_caller]
    fn start(host: &Host, port: u16) -> Held {
        let control = host.file("control", "");
        let path = helper("hold.py").display().to_string();
        let args = [path.as_str(), &port.to_string(), &control.display().to_string()];
        let mut proc = host.start(Accel, "hold", PYTHON, &args);
        proc.wait_stdout("established", LIMIT);
        Held { proc, control }
    }

    fn tell(&mut self, command: &str) {
        let mut file = OpenOptions::new().append(true).open(&self.control).expect("control file");
        writeln!(file, "{command}").expect("control file");
    }

    #[track_caller]
    fn expect(&mut self, command: &str, answer: &str) {
        self.tell(command);
        self.proc.wait_stdout(answer, LIMIT);
    }
}

#[test]
fn killed_server_ends_the_clients_connection() {
    let host = Host::new();
    let (server, port) = e2e::echo_server(&host, Accel, "threaded", "127.0.0.1");
    let before = host.snapshot();
    let mut client = Held::start(&host, port);
    host.snapshot().since(&before).assert_shm(1);
    client.tell("wait");
    std::thread::sleep(Duration::from_millis(100));
    drop(server); // SIGKILL
    let end = net::wait_until(LIMIT, || {
        let said = client.proc.stdout();
        said.contains("EOF") || said.contains("ECONNRESET") || said.contains("TIMEOUT")
    });
    assert!(end.is_ok() && !client.proc.stdout().contains("TIMEOUT"), "client saw: {}", client.proc.stdout());
    client.expect("exit", "bye");
}

#[test]
fn killed_client_ends_the_servers_connection() {
    let host = Host::new();
    let port = net::free_port();
    let path = helper("crash/accept_and_wait.py").display().to_string();
    let server = host.server(Accel, "accept", port, PYTHON, &[&path, &port.to_string()]);
    let before = host.snapshot();
    let client = Held::start(&host, port);
    host.snapshot().since(&before).assert_shm(1);
    drop(client.proc); // SIGKILL
    let done = server.finish(LIMIT).success();
    assert_eq!(done.stdout.trim(), "EOF", "what a killed TCP client leaves");
}

#[test]
fn killed_monitor_leaves_connections_and_new_ones_use_the_kernel() {
    let mut host = Host::new();
    let (_server, port) = e2e::echo_server(&host, Accel, "epoll", "127.0.0.1");
    let before = host.snapshot();
    let mut client = Held::start(&host, port);
    host.snapshot().since(&before).assert_shm(1);
    host.kill_monitor();
    client.expect("echo", "echoed");
    client.expect("new", "new ok");
    // A program that starts now finds no monitor.
    let args = ["seq", &port.to_string(), "--connections", "3", "--bytes", "100000"];
    e2e::python(&host, Accel, 60, "echo_client.py", &args);
    client.expect("exit", "bye");
}

/// Without a monitor the path cannot be switched, so `dup2` to standard input must fail. Otherwise
/// the duplicate would be an unconnected socket, which stdio and the next program would read.
#[test]
fn without_a_monitor_a_connection_does_not_become_standard_input() {
    for (killed, said) in [(false, "stdin"), (true, "EBUSY EMFILE")] {
        let mut host = Host::new();
        let (_server, port) = e2e::echo_server(&host, Accel, "epoll", "127.0.0.1");
        let before = host.snapshot();
        let mut client = Held::start(&host, port);
        host.snapshot().since(&before).assert_shm(1);
        if killed {
            host.kill_monitor();
        }
        client.expect("stdin", if stock_mode() { "stdin" } else { said });
        client.expect("exit", "bye");
    }
}

/// Without a monitor the library divides each sleep into pieces. The kernel does not restart a
/// call whose sleep was divided.
#[test]
fn a_signal_restarts_calls_with_a_monitor_and_without() {
    let mut host = Host::new();
    let (_server, port) = e2e::echo_server(&host, Accel, "epoll", "127.0.0.1");
    let before = host.snapshot();
    let mut client = Held::start(&host, port);
    host.snapshot().since(&before).assert_shm(1);
    client.expect("signal", "restarted");
    host.kill_monitor();
    client.expect("echo", "echoed");
    client.tell("signal");
    let twice = net::wait_until(LIMIT, || client.proc.stdout().matches("restarted").count() == 2);
    assert!(twice.is_ok(), "{}{}", client.proc.stdout(), client.proc.stderr());
    client.expect("exit", "bye");
}

#[test]
fn killed_monitor_then_killed_server_ends_the_clients_connection() {
    let mut host = Host::new();
    let (server, port) = e2e::echo_server(&host, Accel, "epoll", "127.0.0.1");
    let before = host.snapshot();
    let mut client = Held::start(&host, port);
    host.snapshot().since(&before).assert_shm(1);
    host.kill_monitor();
    drop(server); // SIGKILL
    client.expect("wait", "EOF");
}

/// The client already sleeps in `recv` when the monitor and the server die, and nothing else wakes
/// it.
#[test]
fn who_sleeps_when_the_monitor_is_killed_learns_of_the_killed_server() {
    let mut host = Host::new();
    let (server, port) = e2e::echo_server(&host, Accel, "epoll", "127.0.0.1");
    let before = host.snapshot();
    let mut client = Held::start(&host, port);
    host.snapshot().since(&before).assert_shm(1);
    client.tell("sleep");
    std::thread::sleep(Duration::from_millis(500));
    host.kill_monitor();
    std::thread::sleep(Duration::from_millis(500));
    drop(server); // SIGKILL
    let limit = Duration::from_secs(5);
    let end = net::wait_until(limit, || ["EOF", "ECONNRESET"].iter().any(|end| client.proc.stdout().contains(end)));
    assert!(end.is_ok(), "client saw: {}", client.proc.stdout());
    client.expect("exit", "bye");
}

/// Without a monitor only the kernel can report that a process has ended. A machine that takes the CPUs away for some time
/// delays the report once, and sleeps in pieces delay it each time.
#[test]
fn without_a_monitor_sleepers_are_told_of_a_killed_peer_at_once() {
    let late: Vec<String> = (0..5).map_while(|_| late_report_of_a_killed_peer()).collect();
    assert!(late.len() < 5, "{late:?}");
}

/// A call that was told later than kernel TCP, if there is one.
fn late_report_of_a_killed_peer() -> Option<String> {
    let mut host = Host::new();
    let (server, port) = e2e::echo_server(&host, Accel, "epoll", "127.0.0.1");
    let path = helper("crash/told.py").display().to_string();
    let three = |how: Side, call: &'static str| {
        [call; 3].map(|call| {
            let mut p = host.start(how, call, PYTHON, &[&path, &port.to_string(), call]);
            p.wait_stdout("established", LIMIT);
            p
        })
    };
    // The limit is what kernel TCP needs on this machine, which may be busy.
    let stock = three(Stock, "recv");
    let before = host.snapshot();
    let ours = ["recv", "timeout", "poll", "select", "epoll"].map(|call| (call, three(Accel, call)));
    host.snapshot().since(&before).assert_shm(15);
    std::thread::sleep(Duration::from_millis(500));
    host.kill_monitor();
    // Wait so long that sleeps in pieces have reached long pieces.
    std::thread::sleep(Duration::from_millis(1600));
    let killed = sys::now_ns();
    drop(server); // SIGKILL
    let told = |p: &Proc| -> Option<u64> {
        let said = p.stdout();
        let mut words = said.lines().find_map(|l| l.strip_prefix("told "))?.split(' ');
        let at = words.next()?.parse().ok()?;
        ["EOF", "ECONNRESET"].contains(&words.next()?).then_some(at)
    };
    let clients = || stock.iter().chain(ours.iter().flat_map(|(_, three)| three));
    let all = net::wait_until(LIMIT, || clients().all(|p| told(p).is_some()));
    assert!(all.is_ok(), "not told: {:?}", clients().map(Proc::stdout).collect::<Vec<_>>());
    let ms = |three: &[Proc; 3]| {
        let mut ms = three.each_ref().map(|p| told(p).map_or(u64::MAX, |at| (at - killed) / 1_000_000));
        ms.sort_unstable();
        ms
    };
    // With sleeps in pieces, about 400 ms of a piece would be left.
    let stock = ms(&stock);
    let times = ours.iter().map(|(call, three)| (call, ms(three)));
    times
        .filter(|(_, ms)| ms[0] >= stock[2].max(250))
        .map(|late| format!("{late:?} ms, kernel TCP {stock:?} ms"))
        .next()
}

/// Number of open sockets of a process, including those that it keeps for the next connection.
fn sockets(pid: u32) -> usize {
    let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("descriptors");
    let links = fds.filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok());
    links.filter(|to| to.to_string_lossy().starts_with("socket:")).count()
}

#[test]
fn killed_monitor_then_killed_clients_are_noticed_by_servers() {
    for kind in ["epoll", "poll", "select", "asyncio"] {
        let mut host = Host::new();
        let (server, port) = e2e::echo_server(&host, Accel, kind, "127.0.0.1");
        let mut first = Held::start(&host, port);
        let open = sockets(server.pid());
        let before = host.snapshot();
        let second = Held::start(&host, port);
        host.snapshot().since(&before).assert_shm(1);
        assert!(sockets(server.pid()) > open, "{kind}: the second connection");
        host.kill_monitor();
        drop(second.proc); // SIGKILL
        let closed = net::wait_until(LIMIT, || sockets(server.pid()) <= open);
        assert!(closed.is_ok(), "{kind}: {} sockets instead of {open}", sockets(server.pid()));
        // The other client must still be served.
        first.expect("echo", "echoed");
        first.expect("exit", "bye");
    }
}

/// A forked relative holds the connection as well, so the connection goes on until both processes
/// are gone.
#[test]
fn killed_monitor_then_killed_fork_group() {
    let mut host = Host::new();
    let (server, port) = e2e::echo_server(&host, Accel, "epoll", "127.0.0.1");
    let path = helper("crash/fork_group.py").display().to_string();
    let before = host.snapshot();
    let mut parent = host.start(Accel, "fork_group", PYTHON, &[&path, &port.to_string()]);
    parent.wait_stdout("child ", LIMIT);
    host.snapshot().since(&before).assert_shm(1);
    let child: i32 = parent.stdout().trim().rsplit(' ').next().and_then(|w| w.parse().ok()).expect("a number");
    let open = sockets(server.pid());
    host.kill_monitor();
    parent.signal(libc::SIGKILL);
    let talked = net::wait_until(LIMIT, || !parent.running() && parent.stdout().contains("the child still talks"));
    assert!(talked.is_ok(), "{}{}", parent.stdout(), parent.stderr());
    // SAFETY: `kill` takes no pointers, and the number is that of a grandchild that still runs.
    unsafe { libc::kill(child, libc::SIGKILL) };
    let closed = net::wait_until(LIMIT, || sockets(server.pid()) < open);
    assert!(closed.is_ok(), "{} sockets, {open} before", sockets(server.pid()));
}

#[test]
fn a_server_started_without_a_monitor_works() {
    let mut host = Host::new();
    host.kill_monitor();
    let port = net::free_port();
    let path = helper("echo_server.py").display().to_string();
    let _server = host.start(Accel, "echo", PYTHON, &[&path, "epoll", &port.to_string()]);
    net::wait_for_port(port, LIMIT).expect("server");
    let args = ["asyncio", &port.to_string(), "--connections", "5", "--bytes", "100000"];
    e2e::python(&host, Accel, 60, "echo_client.py", &args);
}

#[test]
fn killed_worker_of_a_forked_server_keeps_the_listener() {
    if stock_mode() {
        eprintln!("PATH NOT ASSERTED: stock mode");
    }
    fsocket_testkit::need!("nginx");
    let host = Host::new();
    let (nginx, port) = e2e::nginx(&host, Accel);
    let workers = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", nginx.pid())).expect("children");
    let worker: i32 = workers.split_whitespace().next().and_then(|w| w.parse().ok()).expect("a worker");
    let before = host.snapshot();
    // SAFETY: `kill` takes no pointers, and the number is that of a grandchild that still runs.
    unsafe { libc::kill(worker, libc::SIGKILL) };
    for _ in 0..20 {
        e2e::curl_compare(&host, Accel, &format!("http://127.0.0.1:{port}/1000"), &host.path().join("www/1000"), &[]);
    }
    host.snapshot().since(&before).assert_shm(20);
}

#[test]
fn what_waits_for_a_killed_worker_is_served_by_another() {
    let host = Host::new();
    let before = host.snapshot();
    let path = helper("crash/queued.py").display().to_string();
    let said = host.run(Accel, "queued", 60, PYTHON, &[&path]).success().stdout;
    assert_eq!(said.trim(), "40 served by the one that is left");
    host.snapshot().since(&before).assert_shm(41);
}
