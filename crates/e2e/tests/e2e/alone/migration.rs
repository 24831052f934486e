//! Flow groups move away from a worker that does not accept, and move back later, under load
//! between hosts. Open connections must survive. Tests cover the groups of a steered device and
//! those of a listener.

use fsocket_e2e::need_steering;
use fsocket_testkit::host::Stock;
use fsocket_testkit::load::{Load, Plan};
use fsocket_testkit::netns::{Chain, Receive};
use fsocket_testkit::servers::{self, Way};
use fsocket_testkit::workers::children;
use fsocket_testkit::{artifacts, need, net, Host, Proc};
use serde_json::Value;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// Numbers of flow groups: those of CPU 0, those moved so far, those moved back, and those that
/// are away now.
type Seen = (u64, u64, u64, u64);

fn groups(host: &Host) -> Seen {
    let zones = host.zones();
    let groups = &zones["flow_groups"][0];
    let number = |v: &Value| v.as_u64().unwrap_or_else(|| panic!("{zones:#}"));
    let [moved, returned, away] = ["moved", "returned", "away"].map(|name| number(&groups[name]));
    (number(&groups["by_cpu"]["0"]), moved, returned, away)
}

/// Waits until there are flow groups.
fn first_groups(host: &Host) -> Seen {
    let there = || host.zones()["flow_groups"][0]["by_cpu"]["0"].is_u64();
    net::wait_until(Duration::from_secs(60), there).expect("flow groups");
    groups(host)
}

/// Idle time and total time of a CPU, in clock ticks.
fn times(cpu: u32) -> (u64, u64) {
    let text = std::fs::read_to_string("/proc/stat").expect("/proc/stat");
    let line = text.lines().find_map(|l| l.strip_prefix(&format!("cpu{cpu} "))).expect("the CPU");
    // The fields are: user nice system idle iowait irq softirq steal. Guest time is included in
    // user.
    let v: Vec<u64> = line.split_whitespace().take(8).map(|w| w.parse().expect("a number")).collect();
    (v[3] + v[4], v.iter().sum())
}

/// A request on a connection that stays open.
#[track_caller]
fn ask(mut c: &TcpStream) {
    c.write_all(b"GET /64 HTTP/1.1\r\nHost: test\r\n\r\n").expect("send");
    let mut got = Vec::new();
    let mut buf = [0u8; 1000];
    while !got.ends_with(&[b'x'; 64]) {
        let n = c.read(&mut buf).expect("an answer");
        assert!(n > 0, "closed after {:?}", String::from_utf8_lossy(&got));
        got.extend_from_slice(&buf[..n]);
    }
}

#[test]
fn groups_of_a_device_move_from_a_worker_that_does_not_look_and_come_back() {
    need_steering!();
    move_and_come_back(&Receive::Inline, true);
}

#[test]
fn groups_of_a_listener_move_from_a_worker_that_does_not_look_and_come_back() {
    need_steering!();
    // Each CPU receives half of the packets, whatever CPU the clients run on.
    move_and_come_back(&Receive::Threads(vec![0, 1]), false);
}

fn move_and_come_back(receive: &Receive, steered: bool) {
    need!("nginx");
    let chain = Chain::new(2, receive).expect("hosts");
    let host = Host::configured(Some(&chain.middle), "[balance]\npatience_us = 20000\ngroups = 200\n");
    host.file("www/64", [b'x'; 64]);
    let front: SocketAddr = (chain.middle_front(), 80).into();
    let server = servers::nginx(&host, Way::Ours, &[front], 2);
    servers::wait_zones(&host, 2);
    if steered {
        let mut steer = host.command(Stock, artifacts::cli());
        steer.args(["steer", &chain.middle.interfaces[0].device, "--policy", "flow-groups"]);
        steer.env("FASTSOCKET_SOCKET", host.socket());
        Proc::spawn(host.logs(), "steer", steer).finish(Duration::from_secs(60)).success();
    }
    assert_eq!(first_groups(&host), (2048, 0, 0, 0));

    // Find the worker of CPU 0, and open connections that the other worker holds.
    let zones = host.zones();
    let workers = zones["groups"][0]["workers"].as_array().expect("workers").clone();
    let of =
        |cpu: u64| workers.iter().find(|w| w["cpu"] == cpu).and_then(|w| w["pid"].as_i64()).expect("a worker") as i32;
    let victim = of(0);
    assert!(children(server.pid()).contains(&victim));
    let held: Vec<TcpStream> =
        chain.client.within(|| (0..20).map(|_| TcpStream::connect(front).expect("connect")).collect());
    for c in &held {
        c.set_read_timeout(Some(Duration::from_secs(10))).expect("time-out");
        ask(c);
    }
    let by_victim = || local_accepts(&host, 0);
    let before = by_victim();

    let plan = Plan::get(front, "/64", &[b'x'; 64], 8);
    let load = Load::start(&plan, Some(&chain.client), None);
    std::thread::sleep(Duration::from_millis(300));
    // SAFETY: `kill` takes no pointers, and the process belongs to this test.
    unsafe { libc::kill(victim, libc::SIGSTOP) };
    let mut last = (0, 0, 0, 0);
    let away = net::wait_until(Duration::from_secs(60), || {
        last = groups(&host);
        last.0 == 0
    });
    // SAFETY: `kill` takes no pointers, and the process belongs to this test.
    unsafe { libc::kill(victim, libc::SIGCONT) };
    away.unwrap_or_else(|e| panic!("{last:?}: {e}"));
    assert!(last.1 >= 2048, "{last:?}");
    // Connections that were opened before must still work, on whatever CPU their packets now
    // arrive.
    held.iter().for_each(ask);
    let outcome = load.stop();
    // Only what the stopped worker had accepted waited for it; that is delayed, not lost.
    assert_eq!(outcome.failures(), 0, "{outcome:?}");
    assert!(outcome.answered > 500, "{outcome:?}");
    assert!(by_victim() >= before);

    // Groups return only to a CPU with idle time (a fifth), which the test cannot control. So it
    // measures for how long the CPU had it.
    let (mut spare, mut before, begin) = (Duration::ZERO, times(0), Instant::now());
    while spare < Duration::from_secs(20) && begin.elapsed() < Duration::from_secs(100) && last.3 != 0 {
        const PIECE: Duration = Duration::from_secs(1);
        std::thread::sleep(PIECE);
        last = groups(&host);
        let now = times(0);
        let (idle, all) = (now.0 - before.0, now.1 - before.1);
        // Require a little more idle time than the monitor does, because the monitor looks at a
        // longer time.
        if idle * 100 >= all * 30 {
            spare += PIECE;
        }
        before = now;
    }
    if spare < Duration::from_secs(10) && last.3 != 0 {
        return eprintln!("SKIPPED: the way back: CPU 0 had time to spare for {spare:?} of {:?} only", begin.elapsed());
    }
    assert_eq!((last.0, last.3), (2048, 0), "{last:?}: CPU 0 had time to spare for {spare:?}");
    assert!(last.2 >= 2048, "{last:?}");
    held.iter().for_each(ask);
    let zones = host.zones();
    assert!(fsocket_e2e::zones::counter(&zones, "accept_stolen") > 0, "{zones:#}");
}

/// Connections that the worker of a CPU accepted from its own queue.
fn local_accepts(host: &Host, cpu: u64) -> u64 {
    fsocket_e2e::zones::accepted(&host.zones(), cpu, "local")
}

/// A network card with a single queue. The SO_REUSEPORT of the kernel would give each worker half
/// of the connections.
#[test]
fn one_cpu_that_receives_everything_shares_it() {
    need_steering!();
    need!("nginx");
    let chain = Chain::new(1, &Receive::Threads(vec![0])).expect("hosts");
    let host = Host::configured(Some(&chain.middle), "");
    host.file("www/64", [b'x'; 64]);
    let front: SocketAddr = (chain.middle_front(), 80).into();
    let _server = servers::nginx(&host, Way::Ours, &[front], 2);
    servers::wait_zones(&host, 2);
    // CPU 0 is busy, and CPU 1 is idle.
    let load = std::thread::scope(|s| {
        let start = || {
            fsocket_e2e::zones::pin(0);
            Load::start(&Plan::get(front, "/64", &[b'x'; 64], 8), Some(&chain.client), None)
        };
        s.spawn(start).join().expect("load")
    });
    // All packets arrive on CPU 0, so only its groups count. If CPU 0 remains overloaded, more
    // than half of them may move.
    let shared = || {
        let by_cpu = host.zones()["flow_groups"][0]["by_cpu"].clone();
        let [there, here] = ["0", "1"].map(|cpu| by_cpu[cpu].as_u64().unwrap_or(0));
        here >= 1024 && there + here == 2048
    };
    // Groups move only to a CPU that is idle for a fifth of the time, which this test cannot
    // control.
    let (mut spare, mut last) = (Duration::ZERO, times(1));
    let begin = Instant::now();
    while !shared() && spare < Duration::from_secs(10) && begin.elapsed() < Duration::from_secs(40) {
        const PIECE: Duration = Duration::from_secs(1);
        std::thread::sleep(PIECE);
        let now = times(1);
        if (now.0 - last.0) * 100 >= (now.1 - last.1) * 30 {
            spare += PIECE;
        }
        last = now;
    }
    let is_shared = shared();
    if !is_shared && spare < Duration::from_secs(6) {
        let outcome = load.stop();
        assert_eq!(outcome.failures(), 0, "{outcome:?}");
        return eprintln!("SKIPPED: CPU 1 had time to spare for {spare:?} of {:?} only", begin.elapsed());
    }
    let before = [0, 1].map(|cpu| local_accepts(&host, cpu));
    std::thread::sleep(Duration::from_secs(1));
    let after = [0, 1].map(|cpu| local_accepts(&host, cpu));
    let outcome = load.stop();
    assert_eq!(outcome.failures(), 0, "{outcome:?}");
    let zones = host.zones();
    assert!(is_shared, "CPU 1 had time to spare for {spare:?}: {zones:#}");
    // Each worker gets about half; stealing may change the shares a little.
    let came = [after[0] - before[0], after[1] - before[1]];
    assert!(came.iter().all(|n| n * 5 > came.iter().sum()), "{came:?}: {zones:#}");
    let lookups = &zones["groups"][0]["selections"]["lookups"];
    assert!(lookups[1].as_u64() == Some(0) && lookups[0].as_u64() > Some(0), "one CPU receives: {lookups}");
}
