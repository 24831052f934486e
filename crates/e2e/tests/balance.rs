//! Connection stealing: a worker that does not accept leaves no connection waiting while
//! another is idle, however they wait. Clients are stock, so that every connection is
//! the kernel's.

use fsocket_e2e::need_two_cpus;
use fsocket_e2e::zones::{connect, counter, pin, selected};
use fsocket_testkit::host::Side::Accel;
use fsocket_testkit::{net, stock_mode, Host, Proc};
use serde_json::Value;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

struct Server {
    process: Proc,
    port: u16,
}

/// `busy_server.py` with two workers, both of which have a local listen socket that the other
/// may steal from.
#[track_caller]
fn server(host: &Host, mode: &str, backlog: u32, env: &[(&str, &str)]) -> Server {
    let port = net::free_port();
    let script = fsocket_testkit::script("apps/busy_server.py").display().to_string();
    let mut command = host.command(Accel, fsocket_testkit::PYTHON);
    command.args([&script, mode, &port.to_string(), "2", &backlog.to_string()]).env("FASTSOCKET_DISABLE", "shm");
    command.envs(env.iter().copied());
    let mut process = Proc::spawn(host.logs(), mode, command);
    let own = mode.contains("own-");
    let least = if own { 2 } else { 1 };
    let listens = || net::kernel_sockets(port, "0A") >= least;
    let up = net::wait_until(Duration::from_secs(10), || !process.running() || listens());
    assert!(up.is_ok() && process.running(), "{mode}: {}", process.stderr());
    let server = Server { process, port };
    // Who waits in a call must first show that he comes back at once.
    for round in 0..60 {
        let zones = || counter(&host.zones(), "zone_joins");
        if stock_mode() || if own { zones() == 2 } else { net::kernel_sockets(port, "0A") == 3 } {
            break;
        }
        assert!(round < 59, "{mode}: no local listen sockets");
        for cpu in 0..2 {
            (0..20).for_each(|_| _ = server.told(&server.say(cpu, "who")));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    server
}

impl Server {
    /// A connection whose SYN this CPU handles.
    #[track_caller]
    fn say(&self, cpu: usize, words: &str) -> TcpStream {
        let address: SocketAddr = ([127, 0, 0, 1], self.port).into();
        std::thread::scope(|s| {
            s.spawn(|| {
                pin(cpu);
                let mut c = connect(address);
                c.write_all(words.as_bytes()).expect("send");
                c
            })
            .join()
            .expect("a connection")
        })
    }

    /// Pid and thread of who answered.
    #[track_caller]
    fn told(&self, c: &TcpStream) -> (i32, i32) {
        let v = self.all_told(c);
        (v[0], v[1])
    }

    /// And the how many-th of its process it was.
    #[track_caller]
    fn all_told(&self, mut c: &TcpStream) -> [i32; 3] {
        let mut text = String::new();
        c.read_to_string(&mut text).expect("an answer");
        let v: Vec<i32> = text.split_whitespace().map(|w| w.parse().expect("a number")).collect();
        v.try_into().unwrap_or_else(|v| panic!("{text:?}: {v:?}"))
    }

    /// The worker of a CPU.
    #[track_caller]
    fn worker(&self, cpu: usize) -> (i32, i32) {
        self.told(&self.say(cpu, "who"))
    }
}

/// A host whose workers may be away for a while because this machine does other things,
/// before anybody steals from them; what comes stays theirs to be stolen.
#[track_caller]
fn patient() -> Host {
    Host::configured(None, "[balance]\npatience_us = 30000\nmigrate = false\n")
}

/// Connections that one worker took from another's queue, by the shared counts.
fn stolen(zones: &Value) -> u64 {
    let steals = zones["groups"][0]["balance"]["steals"].as_array().cloned().unwrap_or_default();
    steals.iter().map(|s| s["connections"].as_u64().unwrap_or(0)).sum()
}

/// How workers wait, and what is switched off.
const WAYS: [(&str, &str); 10] = [
    ("epoll", "shm"),
    ("edge", "shm"),
    ("exclusive", "shm"),
    ("poll", "shm"),
    ("select", "shm"),
    ("thread-epoll", "shm"),
    ("thread-edge", "shm"),
    ("thread-exclusive", "shm"),
    // Beside SYN queues.
    ("epoll", ""),
    ("poll", ""),
];

#[test]
fn who_waits_behind_a_sleeping_worker_is_served_by_another() {
    need_two_cpus!();
    for (mode, off) in WAYS {
        let host = patient();
        let server = server(&host, mode, 512, &[("FASTSOCKET_DISABLE", off)]);
        let busy = server.worker(0);
        let sleeper = server.say(0, "sleep 2");
        let sleeps = Instant::now();
        std::thread::sleep(Duration::from_millis(100));
        // They come to the sleeper's queue one after the other, as long as it sleeps for
        // certain: each time somebody who sleeps must be woken.
        let mut n = 0;
        while n < 20 && sleeps.elapsed() < Duration::from_millis(1400) {
            let began = Instant::now();
            let c = server.say(0, "who");
            if stock_mode() {
                server.told(&c);
                n += 1;
                continue;
            }
            let by = server.told(&c);
            let took = began.elapsed();
            assert_ne!(by, busy, "{mode}, without {off:?}: connection {n}: {:#}", host.zones());
            assert!(took < Duration::from_millis(500), "{mode}: connection {n} waited {took:?}");
            n += 1;
        }
        let asleep = server.told(&sleeper);
        assert!(stock_mode() || asleep == busy, "{mode}");
        if stock_mode() {
            eprintln!("PATH NOT ASSERTED: stock mode");
            continue;
        }
        let zones = host.zones();
        assert!(n >= 3 && stolen(&zones) >= n, "{mode}: {n}, {zones:#}");
        let counted = if mode.starts_with("thread") { "accept_remote" } else { "accept_stolen" };
        assert!(counter(&zones, counted) >= n, "{mode}: {n}, {zones:#}");
    }
}

/// Where workers have sockets of their own (SO_REUSEPORT) the kernel wakes nobody else; the
/// monitor does when it has looked twice.
#[test]
fn who_waits_at_a_sleeping_workers_own_socket_is_served_by_another() {
    need_two_cpus!();
    if stock_mode() {
        return eprintln!("PATH NOT ASSERTED: stock mode");
    }
    for mode in ["own-epoll", "own-edge", "own-exclusive", "thread-own-epoll"] {
        let host = patient();
        let server = server(&host, mode, 512, &[]);
        let busy = server.worker(0);
        let sleeper = server.say(0, "sleep 6");
        std::thread::sleep(Duration::from_millis(100));
        for n in 0..4 {
            let began = Instant::now();
            let many: Vec<TcpStream> = (0..10).map(|_| server.say(0, "who")).collect();
            for c in &many {
                assert_ne!(server.told(c), busy, "{mode}: connection {n}");
            }
            let took = began.elapsed();
            assert!(took < Duration::from_millis(1200), "{mode}: connections {n} waited {took:?}");
        }
        assert_eq!(server.told(&sleeper), busy, "{mode}");
        assert!(stolen(&host.zones()) >= 40, "{mode}: {:#}", host.zones());
    }
}

#[test]
fn a_killed_workers_own_sockets_connections_are_served() {
    need_two_cpus!();
    if stock_mode() {
        return eprintln!("PATH NOT ASSERTED: stock mode");
    }
    let host = patient();
    let server = server(&host, "own-epoll", 512, &[]);
    let [victim, other] = [0, 1].map(|cpu| server.worker(cpu).0);
    assert_ne!(victim, other);
    // SAFETY: signals to processes of this test.
    [victim, other].iter().for_each(|pid| unsafe { assert_eq!(libc::kill(*pid, libc::SIGSTOP), 0) });
    let waiting: Vec<TcpStream> = (0..40).map(|_| server.say(0, "who")).collect();
    // SAFETY: as above.
    unsafe {
        assert_eq!(libc::kill(victim, libc::SIGKILL), 0);
        assert_eq!(libc::kill(other, libc::SIGCONT), 0);
    }
    for (n, c) in waiting.iter().enumerate() {
        assert_eq!(server.told(c).0, other, "connection {n}");
    }
    assert_eq!(server.worker(0).0, other);
    let alone = || net::kernel_sockets(server.port, "0A") == 1;
    net::wait_until(Duration::from_secs(5), alone).expect("the dead one's socket is closed");
}

#[test]
fn nobody_steals_while_the_own_worker_waits() {
    need_two_cpus!();
    for mode in ["epoll", "exclusive", "thread-epoll"] {
        let host = patient();
        let server = server(&host, mode, 512, &[]);
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

/// Sockets of others in the epoll instances of a process: what the kernel says of those that
/// bear our mark.
fn watched_peers(pid: i32) -> usize {
    let infos = std::fs::read_dir(format!("/proc/{pid}/fdinfo")).into_iter().flatten().flatten();
    let texts = infos.filter_map(|f| std::fs::read_to_string(f.path()).ok());
    texts.map(|t| t.matches("data: f50c4e7be11a0003").count()).sum()
}

#[test]
fn who_has_enough_to_do_is_not_told_of_others() {
    need_two_cpus!();
    if stock_mode() {
        return eprintln!("PATH NOT ASSERTED: stock mode");
    }
    for mode in ["epoll", "thread-epoll"] {
        let host = patient();
        let server = server(&host, mode, 2048, &[]);
        let mut pids = [0, 1].map(|cpu| server.worker(cpu).0).to_vec();
        pids.dedup();
        let told = || pids.iter().map(|pid| watched_peers(*pid)).sum::<usize>();
        net::wait_until(Duration::from_secs(5), || told() == 2).expect("each is told of the other");
        let mut aloof = 0;
        for _ in 0..20 {
            // SAFETY: signals to processes of this test.
            let all = |signal| pids.iter().for_each(|pid| unsafe { assert_eq!(libc::kill(*pid, signal), 0) });
            all(libc::SIGSTOP);
            let waiting: Vec<TcpStream> = (0..600).map(|n| server.say(n % 2, "who")).collect();
            all(libc::SIGCONT);
            let until = Instant::now() + Duration::from_millis(500);
            while Instant::now() < until && aloof < 2 {
                aloof = aloof.max(2 - told().min(2));
            }
            waiting.iter().for_each(|c| _ = server.told(c));
            // Nothing more comes, and each sleeps.
            let again = net::wait_until(Duration::from_secs(5), || told() == 2);
            assert!(again.is_ok(), "{mode}: {} are told", told());
            if aloof > 0 {
                break;
            }
        }
        assert!(aloof > 0, "{mode}: workers with 300 connections each in their queues were told of others");
    }
}

/// While connections come fast, a worker sleeps without being told of others; the monitor calls
/// it back if one of them stops just then.
#[test]
fn who_is_not_told_of_others_and_sleeps_is_called_by_the_monitor() {
    need_two_cpus!();
    if stock_mode() {
        return eprintln!("PATH NOT ASSERTED: stock mode");
    }
    let host = Host::configured(None, "[balance]\nmigrate = false\n");
    let server = server(&host, "epoll", 512, &[]);
    let (stops, goes_on) = (server.worker(0).0, server.worker(1).0);
    // SAFETY: a signal to a process of this test.
    let signal = |signal| unsafe { assert_eq!(libc::kill(stops, signal), 0) };
    let mut aloof = 0;
    for _ in 0..40 {
        let until = Instant::now() + Duration::from_millis(400);
        std::thread::scope(|s| {
            for cpu in 0..2 {
                let server = &server;
                s.spawn(move || {
                    pin(cpu);
                    while Instant::now() < until {
                        let mut c = connect(([127, 0, 0, 1], server.port).into());
                        c.write_all(b"who").expect("send");
                        server.told(&c);
                    }
                });
            }
        });
        signal(libc::SIGSTOP);
        if watched_peers(goes_on) == 0 {
            aloof += 1;
            let began = Instant::now();
            let by = server.worker(0).0;
            let took = began.elapsed();
            assert_eq!(by, goes_on, "{:#}", host.zones());
            assert!(took < Duration::from_millis(500), "waited {took:?}");
        }
        signal(libc::SIGCONT);
        if aloof == 3 {
            break;
        }
    }
    assert!(aloof > 0, "it was told of the other one each time");
    assert!(stolen(&host.zones()) >= aloof, "{:#}", host.zones());
}

#[test]
fn a_full_queue_is_busy_and_its_killed_workers_connections_are_served() {
    need_two_cpus!();
    // Limit 32 a zone, busy above 24.
    let host = patient();
    let server = server(&host, "epoll", 64, &[]);
    let (victim, _) = server.worker(0);
    let other = server.worker(1).0;
    assert_ne!(victim, other);
    // Neither worker accepts.
    for pid in [victim, other] {
        // SAFETY: a signal to a process of this test.
        unsafe { libc::kill(pid, libc::SIGSTOP) };
    }
    let waiting: Vec<TcpStream> = (0..40).map(|_| server.say(0, "who")).collect();
    if !stock_mode() {
        let zones = host.zones();
        let queue = zones["groups"][0]["balance"]["queues"]
            .as_array()
            .and_then(|q| q.iter().find(|q| q["cpu"] == 0).cloned())
            .expect("a queue for CPU 0");
        assert_eq!(queue["length"], 40, "{zones:#}");
        assert_eq!(queue["busy"], true, "{zones:#}");
    }
    // SAFETY: as above.
    unsafe {
        libc::kill(victim, libc::SIGKILL);
        libc::kill(other, libc::SIGCONT);
    }
    for (n, c) in waiting.iter().enumerate() {
        let by = server.told(c).0;
        assert!(by == other, "connection {n} was served by {by}");
    }
    if stock_mode() {
        return;
    }
    // All of them are the one's that is left; its queue is not busy any more.
    for cpu in 0..2 {
        assert_eq!(server.worker(cpu).0, other);
    }
    net::wait_until(Duration::from_secs(5), || net::kernel_sockets(server.port, "0A") == 2)
        .expect("the dead one's socket is closed");
    let zones = host.zones();
    assert!(counter(&zones, "accept_stolen") + selected(&zones, "migrated") >= 40, "{zones:#}");
}

#[test]
fn five_local_ones_for_one_of_a_busy_zone() {
    need_two_cpus!();
    if stock_mode() {
        return eprintln!("PATH NOT ASSERTED: stock mode");
    }
    // Limit 64 a zone, busy above 48.
    let host = patient();
    let server = server(&host, "epoll", 128, &[]);
    let [victim, thief] = [0, 1].map(|cpu| server.worker(cpu).0);
    assert_ne!(victim, thief);
    // SAFETY: signals to processes of this test.
    [victim, thief].iter().for_each(|pid| unsafe { assert_eq!(libc::kill(*pid, libc::SIGSTOP), 0) });
    let busy: Vec<TcpStream> = (0..60).map(|_| server.say(0, "who")).collect();
    let own: Vec<TcpStream> = (0..40).map(|_| server.say(1, "who")).collect();
    // SAFETY: as above.
    unsafe { libc::kill(thief, libc::SIGCONT) };
    let mut order: Vec<(i32, bool)> = own.iter().map(|c| (server.all_told(c)[2], false)).collect();
    order.extend(busy.iter().map(|c| (server.all_told(c)[2], true)));
    // SAFETY: as above.
    unsafe { libc::kill(victim, libc::SIGCONT) };
    order.sort_unstable();
    // While it had its own.
    let last_own = order.iter().rposition(|(_, stolen)| !stolen).expect("its own");
    let stolen = order[..last_own].iter().filter(|(_, stolen)| *stolen).count();
    assert!((7..=9).contains(&stolen), "{stolen} stolen beside 40 of its own: {order:?}");
}

#[test]
fn who_waits_at_a_dead_worker_takes_turns_with_who_waits_at_a_living_one() {
    need_two_cpus!();
    if stock_mode() {
        return eprintln!("PATH NOT ASSERTED: stock mode");
    }
    // Limit 128 a zone: nobody is busy.
    let host = patient();
    let server = server(&host, "epoll", 256, &[]);
    let [victim, other] = [0, 1].map(|cpu| server.worker(cpu).0);
    assert_ne!(victim, other);
    // SAFETY: signals to processes of this test.
    [victim, other].iter().for_each(|pid| unsafe { assert_eq!(libc::kill(*pid, libc::SIGSTOP), 0) });
    let orphans: Vec<TcpStream> = (0..15).map(|_| server.say(0, "who")).collect();
    let own: Vec<TcpStream> = (0..60).map(|_| server.say(1, "who")).collect();
    // SAFETY: as above.
    unsafe { assert_eq!(libc::kill(victim, libc::SIGKILL), 0) };
    let queues = || host.zones()["groups"][0]["balance"]["queues"].as_array().map_or(0, Vec::len);
    net::wait_until(Duration::from_secs(5), || queues() == 1).expect("the monitor knows");
    // SAFETY: as above.
    unsafe { assert_eq!(libc::kill(other, libc::SIGCONT), 0) };
    let mut order: Vec<(i32, bool)> = own.iter().map(|c| (server.all_told(c)[2], false)).collect();
    order.extend(orphans.iter().map(|c| (server.all_told(c)[2], true)));
    order.sort_unstable();
    let last_own = order.iter().rposition(|(_, orphan)| !orphan).expect("its own");
    let between = order[..last_own].iter().filter(|(_, orphan)| *orphan).count();
    assert!(between >= 14, "{between} of 15 in between: {order:?}");
    let zones = host.zones();
    assert!(counter(&zones, "accept_stolen") >= 15, "{zones:#}");
}

#[test]
fn busy_is_over_when_the_queue_has_been_short_for_a_while() {
    need_two_cpus!();
    if stock_mode() {
        return eprintln!("PATH NOT ASSERTED: stock mode");
    }
    let host = Host::new();
    let server = server(&host, "epoll", 64, &[]);
    let busy = |host: &Host| {
        let zones = host.zones();
        let queues = zones["groups"][0]["balance"]["queues"].as_array().expect("queues").clone();
        queues.iter().any(|q| q["busy"] == true)
    };
    let workers = [server.worker(0).0, server.worker(1).0];
    assert!(!busy(&host));
    // SAFETY: signals to processes of this test.
    workers.iter().for_each(|pid| unsafe { assert_eq!(libc::kill(*pid, libc::SIGSTOP), 0) });
    let waiting: Vec<TcpStream> = (0..30).map(|_| server.say(0, "who")).collect();
    assert!(busy(&host));
    // SAFETY: as above.
    workers.iter().for_each(|pid| unsafe { assert_eq!(libc::kill(*pid, libc::SIGCONT), 0) });
    waiting.iter().for_each(|c| _ = server.told(c));
    net::wait_until(Duration::from_secs(3), || !busy(&host)).expect("not busy any more");
}

#[test]
fn switched_off() {
    need_two_cpus!();
    let host = Host::new();
    let server = server(&host, "epoll", 512, &[("FASTSOCKET_DISABLE", "shm,balance")]);
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

/// A client with the library: all its connections go over shared memory.
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
        let script = fsocket_testkit::script("apps/busy_server.py").display().to_string();
        let mut command = host.command(Accel, fsocket_testkit::PYTHON);
        command.args([&script, mode, &port.to_string(), "2", "64"]);
        let _server = Proc::spawn(host.logs(), mode, command);
        net::wait_until(Duration::from_secs(10), || net::kernel_sockets(port, "0A") > 0).expect("it listens");
        let before = host.snapshot();
        let args = ["-c", SHM_CLIENT, &port.to_string()];
        let done = host.run(Accel, "client", 30, fsocket_testkit::PYTHON, &args).success().stdout;
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

/// Listens with two threads that watch, closes, and listens there again at once.
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
    Proc::spawn(host.logs(), "again", command).finish(Duration::from_secs(30)).success().says("done");
    if stock_mode() {
        return eprintln!("PATH NOT ASSERTED: stock mode");
    }
    let joins = counter(&host.zones(), "zone_joins");
    assert!(joins >= 80, "{joins} local listen sockets");
}

/// Two workers that take turns, one after the other as their parent says. The second gives up
/// before it has read that the first may be stolen from; then that one gives up, with
/// connections in its queue.
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
    Proc::spawn(host.logs(), "turns", command).finish(Duration::from_secs(30)).success().says("served 5");
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
        let server = server(&host, mode, 512, &[]);
        let workers = [0, 1].map(|cpu| server.worker(cpu));
        let queues = |host: &Host| {
            let zones = host.zones();
            zones["groups"][0]["balance"]["queues"].as_array().map_or(0, Vec::len)
        };
        net::wait_until(Duration::from_secs(5), || queues(&host) == 2).expect("balanced at first");
        host.kill_monitor();
        assert_eq!([0, 1].map(|cpu| server.worker(cpu)), workers, "{mode}: without a monitor");
        host.start_monitor();
        let again = net::wait_until(Duration::from_secs(10), || queues(&host) == 2);
        assert!(again.is_ok(), "{mode}: {:#}", host.zones());
        assert_eq!([0, 1].map(|cpu| server.worker(cpu)), workers, "{mode}: at the places they had");
        let sleeper = server.say(0, "sleep 4");
        std::thread::sleep(Duration::from_millis(100));
        let many: Vec<TcpStream> = (0..10).map(|_| server.say(0, "who")).collect();
        let began = Instant::now();
        for c in &many {
            assert_eq!(server.told(c), workers[1], "{mode}");
        }
        assert!(began.elapsed() < Duration::from_secs(2), "{mode}: {:?}", began.elapsed());
        assert_eq!(server.told(&sleeper), workers[0], "{mode}");
        assert!(stolen(&host.zones()) >= 10, "{mode}: {:#}", host.zones());
    }
}
