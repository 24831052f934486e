//! Connection stealing: if a worker does not accept, its connections must not wait while another
//! worker is idle, whatever call it waits in. Clients run without the library, so that every
//! connection uses the kernel.

use fsocket_e2e::busy::{patient, signal, stolen, Server, Stopped};
use fsocket_e2e::need_two_cpus;
use fsocket_e2e::zones::counter;
use fsocket_testkit::host::Side::Accel;
use fsocket_testkit::{net, stock_mode, Host, Proc};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// The call in which workers wait, and the features that are switched off.
const WAYS: [(&str, &str); 10] = [
    ("epoll", "shm"),
    ("edge", "shm"),
    ("exclusive", "shm"),
    ("poll", "shm"),
    ("select", "shm"),
    ("thread-epoll", "shm"),
    ("thread-edge", "shm"),
    ("thread-exclusive", "shm"),
    // With shared memory on, so that SYN queues exist as well.
    ("epoll", ""),
    ("poll", ""),
];

#[test]
fn who_waits_behind_a_sleeping_worker_is_served_by_another() {
    need_two_cpus!();
    two_at_once(&WAYS, |&(mode, off)| is_served_by_another(mode, off));
}

/// Runs the cases in two halves side by side, because each case mostly waits.
fn two_at_once<T: Sync>(cases: &[T], test: impl Fn(&T) + Sync) {
    std::thread::scope(|s| {
        for half in cases.chunks(cases.len().div_ceil(2)) {
            s.spawn(|| half.iter().for_each(&test));
        }
    });
}

fn is_served_by_another(mode: &str, off: &str) {
    let host = patient();
    let server = Server::start(&host, mode, 512, &[("FASTSOCKET_DISABLE", off)]);
    let busy = server.worker(0);
    let sleeper = server.say(0, "sleep 2");
    let sleeps = Instant::now();
    std::thread::sleep(Duration::from_millis(100));
    // Connections arrive in turn in the queue of a worker that certainly sleeps. Each of them must
    // wake another sleeping worker.
    let mut n = 0;
    while n < 20 && sleeps.elapsed() < Duration::from_millis(1400) {
        let c = server.say(0, "who");
        if stock_mode() {
            server.told(&c);
            n += 1;
            continue;
        }
        let by = server.told(&c);
        assert_ne!(by, busy, "{mode}, without {off:?}: connection {n}: {:#}", host.zones());
        n += 1;
    }
    let asleep = server.told(&sleeper);
    assert!(stock_mode() || asleep == busy, "{mode}");
    if stock_mode() {
        return eprintln!("PATH NOT ASSERTED: stock mode");
    }
    let zones = host.zones();
    assert!(n >= 3 && stolen(&zones) >= n, "{mode}: {n}, {zones:#}");
    let counted = if mode.starts_with("thread") { "accept_remote" } else { "accept_stolen" };
    assert!(counter(&zones, counted) >= n, "{mode}: {n}, {zones:#}");
}

/// Workers in `poll` and `select` serve before they come back, so nobody has patience with them, however much is set.
#[test]
fn nobody_waits_for_one_who_serves_inline() {
    need_two_cpus!();
    two_at_once(&["poll", "select"], |mode| {
        let host = Host::configured(None, "[balance]\npatience_us = 10000000\nmigrate = false\n");
        let server = Server::start(&host, mode, 512, &[("FASTSOCKET_DISABLE", "shm")]);
        server.worker(0);
        // (On a busy machine the other worker may take this connection, too.)
        let sleeper = server.say(0, "sleep 2");
        std::thread::sleep(Duration::from_millis(100));
        let c = server.say(0, "who");
        let (by, asleep) = (server.told(&c), server.told(&sleeper));
        assert!(stock_mode() || by != asleep, "{mode}: {:#}", host.zones());
        assert!(stock_mode() || stolen(&host.zones()) > 0, "{mode}: {:#}", host.zones());
    });
}

/// If workers have SO_REUSEPORT sockets of their own, the kernel wakes only the owner of the
/// socket. The monitor wakes another worker if it finds the connection waiting twice in a row.
#[test]
fn who_waits_at_a_sleeping_workers_own_socket_is_served_by_another() {
    need_two_cpus!();
    if stock_mode() {
        return eprintln!("PATH NOT ASSERTED: stock mode");
    }
    two_at_once(&["own-epoll", "own-edge", "own-exclusive", "thread-own-epoll"], |mode| {
        let host = patient();
        let server = Server::start(&host, mode, 512, &[]);
        let busy = server.worker(0);
        let sleeper = server.say(0, "sleep 3");
        std::thread::sleep(Duration::from_millis(100));
        for n in 0..2 {
            let many: Vec<TcpStream> = (0..10).map(|_| server.say(0, "who")).collect();
            for c in &many {
                assert_ne!(server.told(c), busy, "{mode}: connection {n}");
            }
        }
        assert_eq!(server.told(&sleeper), busy, "{mode}");
        assert!(stolen(&host.zones()) >= 20, "{mode}: {:#}", host.zones());
    });
}

#[test]
fn a_killed_workers_own_sockets_connections_are_served() {
    need_two_cpus!();
    if stock_mode() {
        return eprintln!("PATH NOT ASSERTED: stock mode");
    }
    let host = patient();
    let server = Server::start(&host, "own-epoll", 512, &[]);
    let Stopped { workers: [victim, other], waiting: [waiting, _] } = server.stopped([40, 0]);
    signal(victim, libc::SIGKILL);
    signal(other, libc::SIGCONT);
    for (n, c) in waiting.iter().enumerate() {
        assert_eq!(server.told(c).0, other, "connection {n}");
    }
    assert_eq!(server.worker(0).0, other);
    let alone = || net::kernel_sockets(server.port, "0A") == 1;
    net::wait_until(Duration::from_secs(60), alone).expect("the dead one's socket is closed");
}

#[test]
fn nobody_steals_while_the_own_worker_waits() {
    need_two_cpus!();
    for mode in ["epoll", "exclusive", "thread-epoll"] {
        let host = patient();
        let server = Server::start(&host, mode, 512, &[]);
        let own = server.worker(0);
        for n in 0..200 {
            let by = server.worker(0);
            assert!(stock_mode() || by == own, "{mode}: connection {n}");
        }
        if !stock_mode() {
            assert_eq!(stolen(&host.zones()), 0, "{mode}");
        }
    }
}

#[test]
fn switched_off() {
    need_two_cpus!();
    let host = Host::new();
    let server = Server::start(&host, "epoll", 512, &[("FASTSOCKET_DISABLE", "shm,balance")]);
    let busy = server.worker(0);
    let sleeper = server.say(0, "sleep 1");
    std::thread::sleep(Duration::from_millis(100));
    let c = server.say(0, "who");
    let by = server.told(&c);
    server.told(&sleeper);
    if stock_mode() {
        return eprintln!("PATH NOT ASSERTED: stock mode");
    }
    assert_eq!(by, busy, "it waits for its own worker");
    let zones = host.zones();
    assert_eq!(counter(&zones, "accept_stolen"), 0);
    assert!(zones["groups"][0]["balance"].is_null(), "{zones:#}");
    drop(server.process);
}

/// A client with the library. All its connections use shared memory.
const SHM_CLIENT: &str = r#"
import socket, sys, time
address = ("127.0.0.1", int(sys.argv[1]))
def say(words):
    s = socket.create_connection(address, 5)
    s.settimeout(10)
    s.sendall(words.encode())
    return s
def told(s):
    text = b""
    while not text.endswith(b"\n"):
        got = s.recv(100)
        assert got, text
        text += got
    s.close()
    return text.split()[0].decode()
sleeper = say("sleep 2")
time.sleep(0.1)
worst, by = 0.0, set()
for _ in range(20):
    began = time.monotonic()
    by.add(told(say("who")))
    worst = max(worst, time.monotonic() - began)
# Ten at once, while nobody waits anywhere.
many = [say("who") for _ in range(10)]
by |= {told(s) for s in many}
print(f"{worst:.3f}", told(sleeper), *by)
"#;

#[test]
fn over_shared_memory_nobody_waits_behind_a_sleeping_worker_either() {
    need_two_cpus!();
    for mode in ["epoll", "edge", "poll", "block"] {
        let host = Host::new();
        let port = net::free_port();
        let script = fsocket_testkit::helper("busy_server.py").display().to_string();
        let mut command = host.command(Accel, fsocket_testkit::PYTHON);
        command.args([&script, mode, &port.to_string(), "2", "64"]);
        let _server = Proc::spawn(host.logs(), mode, command);
        net::wait_until(Duration::from_secs(60), || net::kernel_sockets(port, "0A") > 0).expect("it listens");
        let before = host.snapshot();
        let args = ["-c", SHM_CLIENT, &port.to_string()];
        let done = host.run(Accel, "client", 60, fsocket_testkit::PYTHON, &args).success().stdout;
        let words: Vec<&str> = done.split_whitespace().collect();
        let (worst, sleeper, by) = (words[0].parse::<f64>().expect("seconds"), words[1], &words[2..]);
        if stock_mode() {
            eprintln!("PATH NOT ASSERTED: stock mode");
            continue;
        }
        assert!(worst < 0.5, "{mode}: {done}");
        assert!(!by.contains(&sleeper), "{mode}: {done}");
        let delta = host.snapshot().since(&before);
        assert_eq!((delta.get("accept_shm"), delta.get("accept_kernel")), (31, 0), "{mode}: {delta}");
    }
}

/// Listens with two threads that watch the listener, closes it, and at once listens on the same
/// port again.
const AGAIN: &str = r#"
import select, socket, sys, threading
port = int(sys.argv[1])
for turn in range(40):
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(64)
    watched, over = threading.Barrier(3), threading.Barrier(3)
    def watch():
        epoll = select.epoll()
        epoll.register(listener, select.EPOLLIN)
        epoll.poll(0)
        watched.wait()
        over.wait()
        epoll.close()
    threads = [threading.Thread(target=watch) for _ in range(2)]
    [t.start() for t in threads]
    watched.wait()
    over.wait()
    [t.join() for t in threads]
    listener.close()
print("done")
"#;

#[test]
fn an_address_is_free_when_its_listener_is_closed() {
    need_two_cpus!();
    let host = Host::new();
    let port = net::free_port();
    let mut command = host.command(Accel, fsocket_testkit::PYTHON);
    command.args(["-c", AGAIN, &port.to_string()]).env("FASTSOCKET_DISABLE", "shm");
    Proc::spawn(host.logs(), "again", command).finish(Duration::from_secs(60)).success().says("done");
    if stock_mode() {
        return eprintln!("PATH NOT ASSERTED: stock mode");
    }
    let joins = counter(&host.zones(), "zone_joins");
    assert!(joins >= 80, "{joins} local listen sockets");
}

/// Two workers that take turns as their parent tells them. The second worker stops before it has
/// read that it may steal from the first. Then the first one stops, with connections in its queue.
const TURNS: &str = r#"
import os, select, socket, sys
listener = socket.socket()
listener.bind(("127.0.0.1", int(sys.argv[1])))
listener.listen(64)
listener.setblocking(False)

class Worker:
    def __init__(self, cpu):
        theirs, self.ours = socket.socketpair()
        if os.fork() == 0:
            os.sched_setaffinity(0, [cpu])
            epoll, words = select.epoll(), theirs.makefile("rw")
            for word in words:
                words.write(f"{getattr(self, word.strip())(epoll)}\n")
                words.flush()
            os._exit(0)
        theirs.close()
        self.words = self.ours.makefile("rw")
    def watch(self, epoll):
        epoll.register(listener, select.EPOLLIN)
        return len(epoll.poll(0.01))
    def leave(self, epoll):
        epoll.unregister(listener)
        return len(epoll.poll(0.01))
    def serve(self, epoll):
        epoll.register(listener, select.EPOLLIN)
        n = 0
        while n < 5 and epoll.poll(3):
            listener.accept()
            n += 1
        return n
    def do(self, word):
        self.words.write(f"{word}\n")
        self.words.flush()
        return int(self.words.readline())

first, second = Worker(0), Worker(1)
second.do("watch")
first.do("watch")
select.select([], [], [], 0.2)
second.do("leave")
os.sched_setaffinity(0, [0])
clients = [socket.create_connection(listener.getsockname()) for _ in range(5)]
first.do("leave")
print("served", second.do("serve"))
"#;

#[test]
fn what_waits_at_a_worker_that_gives_up_is_not_kept_by_one_that_has() {
    need_two_cpus!();
    let host = Host::new();
    let mut command = host.command(Accel, fsocket_testkit::PYTHON);
    command.args(["-c", TURNS, &net::free_port().to_string()]).env("FASTSOCKET_DISABLE", "shm");
    Proc::spawn(host.logs(), "turns", command).finish(Duration::from_secs(60)).success().says("served 5");
    if stock_mode() {
        return eprintln!("PATH NOT ASSERTED: stock mode");
    }
    let zones = host.zones();
    assert_eq!((counter(&zones, "zone_joins"), counter(&zones, "zone_leaves")), (2, 2), "{zones:#}");
}

#[test]
fn workers_are_balanced_again_after_the_monitor_was_killed() {
    need_two_cpus!();
    if stock_mode() {
        return eprintln!("PATH NOT ASSERTED: stock mode");
    }
    for mode in ["epoll", "thread-epoll", "own-epoll"] {
        let mut host = Host::keeping();
        let server = Server::start(&host, mode, 512, &[]);
        let workers = server.workers();
        let queues = |host: &Host| {
            let zones = host.zones();
            zones["groups"][0]["balance"]["queues"].as_array().map_or(0, Vec::len)
        };
        net::wait_until(Duration::from_secs(60), || queues(&host) == 2).expect("balanced at first");
        host.kill_monitor();
        assert_eq!([0, 1].map(|cpu| server.worker(cpu)), workers, "{mode}: without a monitor");
        host.start_monitor();
        let again = net::wait_until(Duration::from_secs(60), || queues(&host) == 2);
        assert!(again.is_ok(), "{mode}: {:#}", host.zones());
        assert_eq!([0, 1].map(|cpu| server.worker(cpu)), workers, "{mode}: at the places they had");
        let sleeper = server.say(0, "sleep 3");
        std::thread::sleep(Duration::from_millis(100));
        let many: Vec<TcpStream> = (0..10).map(|_| server.say(0, "who")).collect();
        for c in &many {
            assert_eq!(server.told(c), workers[1], "{mode}");
        }
        assert_eq!(server.told(&sleeper), workers[0], "{mode}");
        assert!(stolen(&host.zones()) >= 10, "{mode}: {:#}", host.zones());
    }
}
