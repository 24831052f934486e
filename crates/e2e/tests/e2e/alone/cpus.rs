//! CPUs are taken from workers while these serve, and are given back. No connection may be refused
//! or wait for ever.

use fsocket_e2e::cpus::Cpuset;
use fsocket_e2e::native::{self, Echo};
use fsocket_e2e::zones::{connect, counter, cpus, told, Server, Start};
use fsocket_e2e::{need_hotplug, need_two_cpus};
use fsocket_testkit::host::Accel;
use fsocket_testkit::{stock_mode, Host, Proc};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Runs `happens` while stock clients on both CPUs open connections, all of which must be
/// answered. Returns the number of connections and the time of the slowest.
#[track_caller]
fn under_load(server: &Server, happens: impl FnOnce()) -> (u64, Duration) {
    let address: SocketAddr = ([127, 0, 0, 1], server.port).into();
    let (stop, dropped) = (AtomicBool::new(false), dropped_syns());
    let client = || {
        let (mut n, mut slowest) = (0, Duration::ZERO);
        while !stop.load(Ordering::Relaxed) {
            let began = Instant::now();
            told(&connect(address), n);
            slowest = slowest.max(began.elapsed());
            n += 1;
            if n % 16 == 0 {
                // Pause, because a fully loaded machine takes minutes to give a CPU away.
                std::thread::sleep(Duration::from_millis(4));
            }
        }
        (n as u64, slowest)
    };
    let served = std::thread::scope(|s| {
        let clients: Vec<_> = (0..4).map(|_| s.spawn(client)).collect();
        std::thread::sleep(Duration::from_millis(300));
        // The clients must end even if `happens` panics.
        let happened = std::panic::catch_unwind(std::panic::AssertUnwindSafe(happens));
        stop.store(true, Ordering::Relaxed);
        let all: Vec<_> = clients.into_iter().map(|c| c.join()).collect();
        if let Err(panic) = happened {
            std::panic::resume_unwind(panic);
        }
        let all = all.into_iter().map(|c| c.expect("every connection is answered"));
        all.fold((0, Duration::ZERO), |(n, slowest), (m, s)| (n + m, slowest.max(s)))
    });
    // A dropped SYN would be sent again after a second, so the connection alone does not show it.
    assert_eq!(dropped_syns(), dropped, "a SYN was dropped");
    served
}

/// Number of SYNs that met a full queue, in this network namespace.
fn dropped_syns() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/net/netstat").expect("counters");
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("TcpExt: ")).map(str::split_whitespace);
    let (names, values) = (lines.next().expect("names"), lines.next().expect("values"));
    let wanted = names.zip(values).filter(|(name, _)| matches!(*name, "ListenDrops" | "TCPReqQFullDrop"));
    wanted.map(|(_, value)| value.parse::<u64>().expect("a number")).sum()
}

#[track_caller]
fn served(what: &str, host: &Host, server: &Server, (n, slowest): (u64, Duration)) {
    println!("{what}: {n} connections, the slowest took {slowest:?}");
    assert!(n > 100, "{what}: {n} connections");
    // The server must still answer clients on each CPU.
    for cpu in 0..2 {
        assert_eq!(server.ask("127.0.0.1", cpu, 30).len(), 30);
    }
    if stock_mode() {
        return eprintln!("PATH NOT ASSERTED: stock mode");
    }
    let zones = host.zones();
    let all: u64 =
        ["local", "global", "remote", "stolen"].iter().map(|k| counter(&zones, &format!("accept_{k}"))).sum();
    assert!(all >= n + 60, "{what}: {zones:#}");
    // Clients on further CPUs (if there are more than two) have no local worker.
    let own = counter(&zones, "accept_local");
    assert!(own > 0 && (cpus() > 2 || own * 2 > all), "{what}: most are a worker's own: {zones:#}");
}

/// Server modes with their options (pinned or not), and the features that are switched off.
const WAYS: [(&str, &[&str], &str); 4] = [
    ("fork-epoll", &["pin"], "shm,balance"),
    ("fork-epoll", &["pin"], "shm"),
    ("fork-edge", &[], "shm"),
    ("thread-epoll", &["pin"], "shm"),
];

#[test]
fn a_cpu_is_unplugged_and_plugged_again() {
    need_two_cpus!();
    let cpu = need_hotplug!();
    for (mode, options, off) in WAYS {
        let host = Host::new();
        let env = [("FASTSOCKET_DISABLE", off), ("FASTSOCKET_PIN", "auto")];
        let server = Start { mode, options, env: &env, ..Start::default() }.run(&host);
        server.wait_for_sockets(3);
        let seen = under_load(&server, || {
            cpu.away_and_back(2);
        });
        served(&format!("{mode} {options:?} {off}"), &host, &server, seen);
    }
}

/// Server and monitor start while a CPU is away. When the CPU returns, a worker on it must get a
/// zone.
#[test]
fn begun_while_a_cpu_is_unplugged() {
    need_two_cpus!();
    let cpu = need_hotplug!();
    cpu.set(false);
    let host = Host::new();
    let server = Start { options: &[], workers: 3, ..Start::default() }.run(&host);
    server.wait_for_sockets(4);
    assert_eq!(server.ask("127.0.0.1", 0, 50).len(), 50);
    let seen = under_load(&server, || {
        cpu.set(true);
        std::thread::sleep(Duration::from_millis(500));
    });
    println!("{seen:?}");
    for cpu in 0..2 {
        assert_eq!(server.ask("127.0.0.1", cpu, 50).len(), 50);
    }
    let late = Start::default().run(&host);
    late.wait_for_sockets(3);
    for cpu in 0..2 {
        assert!(stock_mode() || late.ask("127.0.0.1", cpu, 30).iter().all(|t| t.cpu == cpu as i32));
    }
}

/// In shared memory each end looks at the CPU of the other end to decide whether spinning pays.
#[test]
fn unplugged_beneath_shared_memory() {
    need_two_cpus!();
    let cpu = need_hotplug!();
    let host = Host::new();
    let echo = native::build(&host, "echo", &["echo.c"], &[]);
    let before = host.snapshot();
    let (_server, port) = Echo::default().serve(&host, Accel, &echo, 100_000);
    let ask = || {
        let mut ask = host.command(Accel, &echo);
        ask.args(["ask", &port, "6", "1000"]);
        Proc::spawn(host.logs(), "ask", ask).finish(Duration::from_secs(60)).success().says("ok");
    };
    // Clients run one after the other, from before the first change until after the last.
    ask();
    let mut clients = 1;
    std::thread::scope(|s| {
        let hotplug = s.spawn(|| cpu.away_and_back(2));
        while !hotplug.is_finished() {
            ask();
            clients += 1;
        }
    });
    ask();
    assert!(clients > 2, "nothing ran meanwhile");
    host.snapshot().since(&before).assert_shm(6 * (clients + 1));
}

/// A CPU is taken from the workers' control group, and given back.
#[test]
fn a_cpu_is_taken_by_a_cpuset() {
    need_two_cpus!();
    let Some(set) = Cpuset::new() else {
        return eprintln!("SKIPPED: no control group with CPUs can be made here (root, cpuset)");
    };
    let procs = set.procs().display().to_string();
    let enter = format!("echo $$ > {procs} && exec \"$@\"");
    let before = ["sh", "-c", enter.as_str(), "enter"];
    for (mode, options, off) in WAYS {
        let host = Host::new();
        set.cpus("0-1");
        let env = [("FASTSOCKET_DISABLE", off), ("FASTSOCKET_PIN", "auto")];
        let server = Start { mode, options, env: &env, before: &before, ..Start::default() }.run(&host);
        server.wait_for_sockets(3);
        let members = std::fs::read_to_string(&procs).expect("members");
        assert!(members.lines().any(|pid| pid == server.process.pid().to_string()), "{members}");
        let seen = under_load(&server, || {
            for list in ["0", "0-1", "1", "0-1"] {
                set.cpus(list);
                std::thread::sleep(Duration::from_millis(500));
            }
        });
        served(&format!("cpuset, {mode} {options:?} {off}"), &host, &server, seen);
    }
}
