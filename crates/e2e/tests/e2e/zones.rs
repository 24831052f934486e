//! Local listen sockets, with a server that tells who accepted. Clients have no library, so every
//! connection uses the kernel.
//!
//! Long: tests of one subject on one fixture.

use fsocket_e2e::need_two_cpus;
use fsocket_e2e::zones::{self, accepted, counter, places, selected, told, wait_for_places, Start};
use fsocket_testkit::host::{Accel, Stock};
use fsocket_testkit::{helper, net, stock_mode, Host, Proc, Side, PYTHON};
use std::collections::BTreeSet;
use std::time::Duration;

/// Every connection from a CPU must reach the worker that is pinned there.
#[track_caller]
fn assert_local(start: &Start, to: &str) {
    let host = Host::new();
    let server = start.run(&host);
    server.wait_for_sockets(1 + start.workers);
    if !stock_mode() {
        wait_for_places(&host, start.workers);
    }
    for cpu in 0..2 {
        for t in server.ask(to, cpu, 50) {
            assert!(stock_mode() || t.cpu == cpu as i32, "{} {}: from CPU {cpu}: {t:?}", start.mode, start.bind);
        }
    }
    if stock_mode() {
        return eprintln!("PATH NOT ASSERTED: stock mode");
    }
    let zones = host.zones();
    for cpu in 0..2 {
        assert_eq!(accepted(&zones, cpu, "local"), 50, "{} {}: {zones:#}", start.mode, start.bind);
    }
    assert_eq!((selected(&zones, "lookups"), selected(&zones, "self")), (100, 100), "{zones:#}");
    assert_eq!(counter(&zones, "accept_global"), 0);
}

#[test]
fn forked_workers_get_the_connections_of_their_cpu() {
    need_two_cpus!();
    for mode in ["fork-epoll", "fork-edge", "fork-exclusive"] {
        assert_local(&Start { mode, ..Start::default() }, "127.0.0.1");
    }
}

#[test]
fn threads_with_an_epoll_instance_each() {
    need_two_cpus!();
    assert_local(&Start { mode: "thread-epoll", ..Start::default() }, "127.0.0.1");
}

#[test]
fn beside_shared_memory() {
    need_two_cpus!();
    assert_local(&Start { env: &[("FASTSOCKET_DISABLE", "balance")], ..Start::default() }, "127.0.0.1");
}

#[test]
fn every_kind_of_address() {
    need_two_cpus!();
    for (bind, options, to) in [
        ("0.0.0.0", &["pin"][..], "127.0.0.1"),
        ("127.0.0.2", &["pin"], "127.0.0.2"),
        ("::1", &["pin"], "::1"),
        ("::", &["pin"], "::1"),
        ("::", &["pin", "dual"], "::1"),
        ("::", &["pin", "dual"], "127.0.0.1"),
    ] {
        assert_local(&Start { bind, options, ..Start::default() }, to);
    }
}

#[test]
fn workers_that_dropped_their_privileges() {
    need_two_cpus!();
    assert_local(&Start { options: &["pin", "user=65534"], ..Start::default() }, "127.0.0.1");
}

#[test]
fn workers_that_wait_in_accept_poll_and_select() {
    need_two_cpus!();
    for mode in ["fork-block", "fork-poll", "fork-select"] {
        // If a worker has to wait long for a CPU, it gives its queue up. That must not happen in
        // all of the servers.
        assert!((0..20).any(|_| each_worker_has_its_queue(mode)), "in each of 20 servers a worker gives its queue up");
    }
}

/// Returns false if a worker has given its queue up.
#[track_caller]
fn each_worker_has_its_queue(mode: &str) -> bool {
    let host = Host::new();
    let server = Start { mode, ..Start::default() }.run(&host);
    // A worker gets a queue only after the library has seen it come back to its call at once.
    let come = net::wait_until(Duration::from_secs(60), || {
        (0..2).for_each(|cpu| drop(server.ask("127.0.0.1", cpu, 20)));
        stock_mode() || net::kernel_sockets(server.port, "0A") == 3
    });
    if stock_mode() {
        return true;
    }
    let left = || counter(&host.zones(), "zone_leaves") > 0;
    if come.is_err() || net::wait_until(Duration::from_secs(60), || left() || places(&host) == 2).is_err() || left() {
        assert!(left(), "{mode}: no local listen sockets");
        return false;
    }
    for cpu in 0..2 {
        let right = server.ask("127.0.0.1", cpu, 50).iter().filter(|t| t.cpu == cpu as i32).count();
        if right != 50 && left() {
            return false;
        }
        assert_eq!(right, 50, "{mode}: from CPU {cpu}");
    }
    true
}

/// A signal must end an `accept` that has a time limit, even if the handler restarts calls.
#[test]
fn a_signal_ends_an_accept_with_a_limit() {
    need_two_cpus!();
    let host = Host::new();
    let port = net::free_port();
    let mut command = host.command(Side::Accel, PYTHON);
    command.arg(helper("zones/accept_limit.py")).arg(port.to_string()).env("FASTSOCKET_DISABLE", "shm,balance");
    let done = Proc::spawn(host.logs(), "accept_limit", command).finish(Duration::from_secs(60)).success();
    let sockets = if stock_mode() { 1 } else { 3 };
    assert_eq!(done.stdout.trim(), format!("EINTR soon {sockets}"), "two are the workers' own");
}

#[test]
fn workers_that_cannot_have_a_queue_of_their_own() {
    need_two_cpus!();
    for (mode, why) in [("fork-oneshot", "turns"), ("fork-nonblock", "unseen")] {
        let host = Host::new();
        let server = Start { mode, ..Start::default() }.run(&host);
        for cpu in 0..2 {
            server.ask("127.0.0.1", cpu, 30);
        }
        server.wait_for_sockets(1);
        if !stock_mode() {
            let zones = host.zones();
            assert!(counter(&zones, &format!("fallback.zone_{why}")) > 0, "{mode}: {zones:#}");
        }
    }
    // Threads may take turns in accept. Then only the thread whose turn comes next waits.
    let host = Host::new();
    let server = Start { mode: "thread-block", ..Start::default() }.run(&host);
    server.ask("127.0.0.1", 0, 100);
    server.wait_for_sockets(1);
}

#[test]
fn more_and_fewer_workers_than_cpus() {
    need_two_cpus!();
    for workers in [1, 5] {
        let host = Host::new();
        let server = Start { workers, options: &[], ..Start::default() }.run(&host);
        server.wait_for_sockets(1 + workers);
        let mut seen = BTreeSet::new();
        for cpu in 0..2 {
            seen.extend(server.ask("127.0.0.1", cpu, 200).iter().map(|t| t.pid));
        }
        // All workers get a share, and no connection waits for ever.
        assert_eq!(seen.len(), workers);
    }
}

#[test]
fn options_are_inherited() {
    let host = Host::new();
    let options = &["pin", "tune"];
    let stock =
        Start { options, side: Stock, env: &[], ..Start::default() }.run(&host).ask("127.0.0.1", 0, 1)[0].clone();
    let server = Start { options, ..Start::default() }.run(&host);
    server.wait_for_sockets(3);
    for cpu in 0..zones::cpus().min(2) {
        let t = &server.ask("127.0.0.1", cpu, 1)[0];
        assert_eq!((t.sndbuf, t.keepidle, t.ttl), (stock.sndbuf, stock.keepidle, stock.ttl));
    }
    assert_eq!((stock.keepidle, stock.ttl), (77, 33));
}

/// The result when another process of the same user binds to this port with SO_REUSEPORT.
fn stranger(host: &Host, ip: &str, port: u16) -> String {
    let code = format!(
        "import socket\ns = socket.socket({})\ns.setsockopt(1, 15, 1)\n\
         try:\n    s.bind(('{ip}', {port})); s.listen(5); print('bound')\nexcept OSError as e:\n    print(e.strerror)\n",
        if ip.contains(':') { "socket.AF_INET6" } else { "" }
    );
    host.run(Stock, "stranger", 60, fsocket_testkit::PYTHON, &["-c", &code]).success().stdout.trim().to_owned()
}

#[test]
fn the_port_is_as_closed_to_others_as_stock() {
    for (bind, options) in [("127.0.0.1", &["pin"][..]), ("0.0.0.0", &["pin"]), ("::", &["pin", "dual"])] {
        let host = Host::new();
        let server = Start { bind, options, ..Start::default() }.run(&host);
        server.wait_for_sockets(3);
        assert_eq!(stranger(&host, bind, server.port), "Address already in use", "{bind}");
        // When the server has ended, the port must be free, as on stock sockets.
        drop(server.process);
        net::wait_until(Duration::from_secs(60), || net::kernel_sockets(server.port, "0A") == 0).expect("all closed");
        assert_eq!(stranger(&host, bind, server.port), "bound", "{bind}");
    }
}

/// The number of connections that wait with the killed worker depends on timing, so these tests
/// run alone.
mod alone {
    use super::*;

    #[test]
    fn a_killed_worker_loses_nothing_that_waited() {
        need_two_cpus!();
        for (env, how) in [("shm,balance", "migrated"), ("shm", "stolen")] {
            a_killed_worker_loses_nothing(env, how);
        }
    }
}

/// Connections in the queue of a killed worker must move to the global socket, or be accepted by
/// other workers that have a descriptor of that queue.
#[track_caller]
fn a_killed_worker_loses_nothing(off: &str, how: &str) {
    // All connections must reach the worker that is killed, so its flow groups must not move.
    let host = Host::configured(None, "[balance]\nmigrate = false\n");
    let env = &[("FASTSOCKET_DISABLE", off)];
    let server = Start { options: &["pin", "respawn"], env, ..Start::default() }.run(&host);
    server.wait_for_sockets(3);
    for round in 0..5 {
        server.kill_while_hundred_wait(round);
        server.wait_for_sockets(3);
    }
    if !stock_mode() {
        let zones = host.zones();
        let saved = if how == "migrated" { selected(&zones, how) } else { counter(&zones, "accept_stolen") };
        assert!(saved >= 500, "{how}: {zones:#}");
    }
}

#[test]
fn without_root_and_without_monitor() {
    need_two_cpus!();
    let host = Host::new();
    let before = &["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];
    let env = &[("FASTSOCKET_SOCKET", "/nonexistent")];
    for bind in ["127.0.0.1", "0.0.0.0"] {
        let server = Start { bind, before, env, ..Start::default() }.run(&host);
        server.wait_for_sockets(3);
        for cpu in 0..2 {
            let right = server.ask("127.0.0.1", cpu, 50).iter().filter(|t| t.cpu == cpu as i32).count();
            assert!(stock_mode() || right == 50, "{bind}: {right} of 50 from CPU {cpu}");
        }
        assert_eq!(stranger(&host, bind, server.port), "Address already in use", "{bind}");
    }
    // Without a privilege, a process cannot take the address :: away again.
    let server = Start { bind: "::", options: &["pin", "dual"], before, env, ..Start::default() }.run(&host);
    for cpu in 0..2 {
        server.ask("127.0.0.1", cpu, 30);
    }
    server.wait_for_sockets(1);
}

#[test]
fn without_monitor_a_worker_that_ends_hands_over_what_waits() {
    need_two_cpus!();
    let host = Host::new();
    let env = &[("FASTSOCKET_SOCKET", "/nonexistent")];
    for mode in ["fork-epoll", "fork-edge"] {
        let server = Start { mode, options: &["pin", "quit"], env, ..Start::default() }.run(&host);
        server.wait_for_sockets(3);
        let (leaving, waiting) = server.hundred_wait();
        // SAFETY: `kill` takes no pointers, and the process belongs to this test.
        unsafe {
            libc::kill(leaving, libc::SIGUSR1);
            libc::kill(leaving, libc::SIGCONT);
        }
        let by_others = waiting.iter().enumerate().filter(|(i, c)| told(c, *i).pid != leaving).count();
        assert!(stock_mode() || by_others >= 90, "{mode}: {by_others} of 100 were handed over");
        server.wait_for_sockets(2);
    }
}

#[test]
fn switched_off() {
    let host = Host::new();
    let server = Start { env: &[("FASTSOCKET_DISABLE", "shm,zones")], ..Start::default() }.run(&host);
    server.ask("127.0.0.1", 0, 20);
    server.wait_for_sockets(1);
    let taken = host.run(Accel, "second", 60, fsocket_testkit::PYTHON, &["-c", &format!(
        "import socket,errno\ntry:\n    socket.create_server(('127.0.0.1', {}))\nexcept OSError as e:\n    assert e.errno == errno.EADDRINUSE\n    print('ok')", server.port)]);
    taken.success().says("ok");
}

#[test]
fn a_listener_from_a_service_manager() {
    need_two_cpus!();
    // The manager has no library. It listens, and then executes the server.
    let manager = "import os, socket, sys\nwords = sys.argv[2:]\ns = socket.socket()\n\
        s.setsockopt(1, 2, 1)\ns.bind((words[3], int(words[4])))\ns.listen(512)\n\
        if s.fileno() != 3: os.dup2(s.fileno(), 3)\nos.set_inheritable(3, True)\n\
        os.environ['LD_PRELOAD'] = sys.argv[1]\nos.execvp(words[0], words)\n";
    let library = fsocket_testkit::artifacts::library().display().to_string();
    let library = if stock_mode() { "" } else { library.as_str() };
    let before = &["env", "-u", "LD_PRELOAD", fsocket_testkit::PYTHON, "-c", manager, library];
    for env in [&[("FASTSOCKET_DISABLE", "shm,balance")][..], &[("FASTSOCKET_DISABLE", "balance")]] {
        assert_local(&Start { before, env, options: &["pin", "fd3"], ..Start::default() }, "127.0.0.1");
    }
    // Without a monitor, the library attaches the classic selector itself.
    let host = Host::new();
    let env = &[("FASTSOCKET_SOCKET", "/nonexistent")];
    let server = Start { before, env, options: &["pin", "fd3"], ..Start::default() }.run(&host);
    server.wait_for_sockets(3);
    for cpu in 0..2 {
        let right = server.ask("127.0.0.1", cpu, 50).iter().filter(|t| t.cpu == cpu as i32).count();
        assert!(stock_mode() || right == 50, "{right} of 50 from CPU {cpu}");
    }
}

#[test]
fn several_ports_and_several_programs_on_the_same_cpus() {
    need_two_cpus!();
    let host = Host::new();
    let servers: Vec<_> = ["fork-epoll", "thread-epoll", "fork-edge"]
        .into_iter()
        .map(|mode| Start { mode, ..Start::default() }.run(&host))
        .collect();
    for server in &servers {
        server.wait_for_sockets(3);
    }
    for _ in 0..3 {
        for server in &servers {
            for cpu in 0..2 {
                for t in server.ask("127.0.0.1", cpu, 20) {
                    assert!(stock_mode() || t.cpu == cpu as i32, "{t:?}");
                }
            }
        }
    }
}

#[test]
fn a_cpu_that_is_taken_away_by_taskset() {
    need_two_cpus!();
    let host = Host::new();
    // Both workers run on CPU 1, and CPU 0 has no worker.
    let before = &["taskset", "-c", "1"];
    let server = Start { before, ..Start::default() }.run(&host);
    server.wait_for_sockets(3);
    let mut seen = BTreeSet::new();
    for cpu in 0..2 {
        for t in server.ask("127.0.0.1", cpu, 100) {
            assert_eq!(t.cpu, 1);
            seen.insert(t.pid);
        }
    }
    assert_eq!(seen.len(), 2, "both have a share");
    if !stock_mode() {
        let zones = host.zones();
        assert_eq!((selected(&zones, "self"), selected(&zones, "other")), (100, 100), "{zones:#}");
    }
}

#[test]
fn ways_of_pinning() {
    need_two_cpus!();
    let with = |pin: &'static str, options: &'static [&'static str]| {
        let host = Host::new();
        let env = [("FASTSOCKET_DISABLE", "shm,balance"), ("FASTSOCKET_PIN", pin)];
        let server = Start { env: &env, options, ..Start::default() }.run(&host);
        if pin == "require" && options.is_empty() {
            server.ask("127.0.0.1", 0, 20);
            server.wait_for_sockets(1);
        } else {
            server.wait_for_sockets(3);
        }
        let told: Vec<_> = (0..2).flat_map(|cpu| server.ask("127.0.0.1", cpu, 30)).collect();
        let zones = if stock_mode() { Default::default() } else { host.zones() };
        (told, zones)
    };
    if stock_mode() {
        return eprintln!("SKIPPED: stock pins nobody");
    }
    let (told, zones) = with("auto", &[]);
    assert!(told.iter().enumerate().all(|(i, t)| t.cpu == i as i32 / 30), "pinned, each to its CPU: {told:?}");
    assert_eq!(selected(&zones, "self"), 60);
    let (told, zones) = with("never", &[]);
    assert!(told.iter().all(|t| t.cpu == -1), "nobody is pinned: {told:?}");
    assert_eq!(selected(&zones, "self"), 60, "but each CPU has somebody");
    let (told, zones) = with("require", &[]);
    assert!(told.iter().all(|t| t.cpu == -1), "{told:?}");
    assert!(counter(&zones, "fallback.zone_unpinned") >= 1, "{zones:#}");
    let (told, _) = with("require", &["pin"]);
    assert!(told.iter().enumerate().all(|(i, t)| t.cpu == i as i32 / 30), "{told:?}");
}

/// The setting `net.ipv4.tcp_migrate_req`. Dropping this value restores it.
struct MigrateReq(String);
impl MigrateReq {
    const FILE: &str = "/proc/sys/net/ipv4/tcp_migrate_req";
    fn set() -> MigrateReq {
        let before = std::fs::read_to_string(Self::FILE).expect("since 5.14");
        std::fs::write(Self::FILE, "1").expect("root");
        MigrateReq(before)
    }
}
impl Drop for MigrateReq {
    fn drop(&mut self) {
        std::fs::write(Self::FILE, &self.0).expect("root");
    }
}

#[test]
fn without_monitor_the_kernel_can_move_what_a_killed_worker_leaves() {
    need_two_cpus!();
    // SAFETY: `geteuid` takes no arguments.
    if unsafe { libc::geteuid() } != 0 {
        return eprintln!("SKIPPED: needs root to set net.ipv4.tcp_migrate_req");
    }
    let _set = MigrateReq::set();
    let host = Host::new();
    let env = &[("FASTSOCKET_SOCKET", "/nonexistent")];
    let server = Start { options: &["pin", "respawn"], env, ..Start::default() }.run(&host);
    for round in 0..3 {
        server.wait_for_sockets(3);
        server.kill_while_hundred_wait(round);
    }
}

#[test]
fn a_program_that_is_started_does_not_keep_the_port() {
    let host = Host::new();
    // A server with zones starts a program that outlives it. The program inherits no sockets,
    // because Python's are close-on-exec.
    let code = "import os, socket, sys, time\ns = socket.socket()\ns.bind(('127.0.0.1', int(sys.argv[1])))\n\
        s.listen(8)\nif os.fork() == 0:\n    time.sleep(0.3)\n    os._exit(0)\nos.wait()\n\
        (os.fork() or os.execv('/bin/sleep', ['sleep', '100']))\nprint('started', flush=True)\n";
    let port = net::free_port();
    let mut command = host.command(fsocket_testkit::host::Accel, fsocket_testkit::PYTHON);
    command.args(["-c", code, &port.to_string()]).env("FASTSOCKET_DISABLE", "shm");
    let mut server = fsocket_testkit::Proc::spawn(host.logs(), "starter", command);
    server.wait_stdout("started", Duration::from_secs(60));
    net::wait_until(Duration::from_secs(60), || !server.running()).expect("it ends");
    assert_eq!(stranger(&host, "127.0.0.1", port), "bound");
}
