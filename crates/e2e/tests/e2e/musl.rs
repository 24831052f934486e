//! Programs that use musl (as on Alpine): the same library must work in them, also if peers,
//! parents or children use glibc.

use fsocket_e2e::native::{self, Echo};
use fsocket_testkit::counters::Delta;
use fsocket_testkit::host::{Accel, Side, Stock};
use fsocket_testkit::{artifacts, find_program, net, stock_mode, Host, Proc};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// More connections than any program here makes.
const MANY: usize = 1000;
/// Bytes of stack that a hook may use. A thread of musl has 128 KiB by default, and may have less.
const DEEPEST: usize = 16 << 10;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Libc {
    Glibc,
    Musl,
}
use Libc::{Glibc, Musl};

/// Libc of the server and of the client, or of the first and the second program.
const MIXED: [(Libc, Libc); 3] = [(Musl, Musl), (Glibc, Musl), (Musl, Glibc)];

/// A host, and the compiler for musl.
struct Place {
    host: Host,
    musl: PathBuf,
}

impl Place {
    /// `None`: there is no compiler for musl; a message says so.
    #[track_caller]
    fn new() -> Option<Place> {
        let Some(musl) = find_program("musl-gcc") else {
            assert!(std::env::var_os("FASTSOCKET_TEST_STRICT").is_none(), "musl-gcc is not installed");
            eprintln!("SKIPPED: musl-gcc is not installed (make deps)");
            return None;
        };
        Some(Place { host: Host::new(), musl })
    }

    #[track_caller]
    fn build(&self, libc: Libc, name: &str, flags: &[&str]) -> PathBuf {
        let (source, to) = (format!("{name}.c"), format!("{}-{libc:?}", name.rsplit('/').next().unwrap_or(name)));
        match libc {
            Glibc => native::build(&self.host, &to, &[&source], flags),
            Musl => native::build_with(&self.musl, &self.host, &to, &[&source], flags),
        }
    }

    #[track_caller]
    fn run(&self, side: Side, program: &Path, args: &[&str]) -> String {
        self.host.run(side, "program", 60, program, args).success().says("ok").stdout
    }

    /// Runs a program with the library. Returns its output and the changes of the counters.
    #[track_caller]
    fn counted(&self, program: &Path, args: &[&str]) -> (String, Delta) {
        let before = self.host.snapshot();
        let said = self.run(Accel, program, args);
        (said, self.host.snapshot().since(&before))
    }

    #[track_caller]
    fn serve(&self, libc: Libc) -> (Proc, String) {
        Echo::default().serve(&self.host, Accel, &self.build(libc, "echo", &[]), MANY)
    }
}

/// Asserts that there were no errors in shared memory and that no connection changed its path.
#[track_caller]
fn stays_in_shared_memory(delta: &Delta, connections: i128) {
    delta.assert_shm(connections);
    assert!(delta.get("path_switch") == 0 && delta.get("reset_shm") == 0, "{delta}");
}

#[test]
fn both_libcs_in_all_pairs() {
    let Some(place) = Place::new() else { return };
    for (server, client) in MIXED {
        let (server, port) = Echo::default().serve(&place.host, Accel, &place.build(server, "echo", &[]), 8);
        let (_, delta) = place.counted(&place.build(client, "echo", &[]), &["ask", &port, "8", "21"]);
        server.finish(Duration::from_secs(60)).success().says("ok");
        delta.assert_connected(8);
    }
}

/// Round trips over a Unix socket, with messages below and above the size of its buffer. All ends
/// must move to shared memory.
#[test]
fn unix_sockets_in_all_pairs() {
    let Some(place) = Place::new() else { return };
    for (server, client) in MIXED {
        let pair = |libc| place.build(libc, "../../../../bench/unix/pair", &[]);
        let path = place.host.path().join(format!("{server:?}-{client:?}")).display().to_string();
        let before = place.host.snapshot();
        let mut serves = place.host.start(Accel, "server", pair(server), &["serve", &path]);
        let listens = || std::os::unix::net::UnixStream::connect(&path).is_ok();
        net::wait_until(Duration::from_secs(60), listens).expect("it listens");
        for what in [["rtt", &path, "8", "2000"], ["rtt", &path, "300000", "500"]] {
            place.host.run(Accel, "client", 60, pair(client), &what).success();
        }
        serves.signal(libc::SIGTERM);
        net::wait_until(Duration::from_secs(60), || !serves.running()).expect("it ends");
        if !stock_mode() {
            let delta = place.host.snapshot().since(&before);
            assert!(delta.get("path_upgrade") == 4 && delta.get("hostile_peer") == 0, "{server:?} {delta}");
        }
    }
}

/// Clients and servers are threads of one process; some servers use epoll.
#[test]
fn threads_and_epoll() {
    let Some(place) = Place::new() else { return };
    Echo::default().check(&place.build(Musl, "echo", &[]), &place.host, 8, 30);
}

/// One program forks, starts threads, and uses epoll, posix_spawn, system, popen and vfork, while
/// it has a connection.
#[test]
fn processes_and_threads() {
    let Some(place) = Place::new() else { return };
    let (_, delta) = place.counted(&place.build(Musl, "musl/musl", &[]), &[]);
    delta.assert_shm(1);
}

/// A static program loads no library, whatever its libc is.
#[test]
fn a_static_program_uses_the_kernel() {
    let Some(place) = Place::new() else { return };
    let (_, delta) = place.counted(&place.build(Musl, "musl/musl", &["-static"]), &[]);
    delta.assert_kernel_only();
}

/// A program continues with a connection that another one has opened: under the same libc, under
/// the other one, and under the first one again.
#[test]
fn connections_are_handed_on() {
    let Some(place) = Place::new() else { return };
    for (first, second) in MIXED {
        let (_server, port) = place.serve(second);
        let [first, second] = [first, second].map(|libc| place.build(libc, "musl/handed", &[]));
        let [one, two] = [&first, &second].map(|p| p.display().to_string());
        for how in ["exec", "fork", "shells"] {
            let (_, delta) = place.counted(&first, &[how, &port, &two, &one]);
            delta.assert_connected(1);
            assert!(delta.get("path_switch") == 0, "{how}: {first:?} {second:?}: {delta}");
        }
        // The library cannot see what musl's child does before its exec, so the connection may
        // move to the kernel.
        for how in ["spawn", "vfork"] {
            let (_, delta) = place.counted(&first, &[how, &port, &two, &one]);
            delta.assert_connected(1);
            assert!(delta.get("fallback.switch") == 0 && delta.get("reset_shm") == 0, "{how}: {delta}");
        }
    }
}

/// A static program between two others does not load the library, so from there on the connection
/// uses the kernel.
#[test]
fn a_static_program_in_between() {
    let Some(place) = Place::new() else { return };
    let (_server, port) = place.serve(Musl);
    let program = place.build(Musl, "musl/handed", &[]);
    let is_static = native::build_with(&place.musl, &place.host, "handed-static", &["musl/handed.c"], &["-static"]);
    let (_, delta) =
        place.counted(&program, &["exec", &port, &is_static.display().to_string(), &program.display().to_string()]);
    delta.assert_connected(1);
    assert!(stock_mode() || delta.get("path_switch") > 0, "{delta}");
}

/// In musl, lengths in messages have 32 bits, followed by padding with any contents.
#[test]
fn messages_with_padding() {
    let Some(place) = Place::new() else { return };
    for libc in [Musl, Glibc] {
        let (_, delta) = place.counted(&place.build(libc, "musl/padded", &[]), &[]);
        delta.assert_shm(1);
        // A connection that is passed to another process moves to kernel TCP.
        assert!(stock_mode() || delta.get("path_switch") > 0, "{libc:?}: {delta}");
    }
}

/// System calls by number for which musl has no function, and stdio on a connection.
#[test]
fn calls_that_musl_lacks() {
    let Some(place) = Place::new() else { return };
    for libc in [Musl, Glibc] {
        let (_, delta) = place.counted(&place.build(libc, "musl/lacking", &[]), &[]);
        delta.assert_shm(1);
        assert!(delta.get("fallback.switch") == 0, "{libc:?}: {delta}");
    }
}

/// Makes each call on a thread with 64 KiB of stack.
#[test]
fn no_hook_takes_much_stack() {
    let Some(place) = Place::new() else { return };
    for libc in [Musl, Glibc] {
        let (said, delta) = place.counted(&place.build(libc, "musl/stacks", &[]), &[]);
        delta.assert_shm(1);
        let deepest = said.lines().find_map(|l| l.strip_prefix("deepest ")?.split(' ').next()?.parse::<usize>().ok());
        let deepest = deepest.expect("a line says how deep");
        println!("{libc:?}: {deepest} bytes");
        assert!((1..DEEPEST).contains(&deepest), "{libc:?}: {said}");
    }
}

/// Threads that are cancelled while they wait, or leave by siglongjmp.
#[test]
fn cancelled_and_left() {
    let Some(place) = Place::new() else { return };
    let program = native::build_with(&place.musl, &place.host, "cancel", &["cancel.c"], &["-Wno-unused-result"]);
    for (what, connections) in [("cancel", 46), ("jump", 17)] {
        let stock = place.run(Stock, &program, &[what]);
        let (mut ours, mut delta) = place.counted(&program, &[what]);
        let closed_all = |delta: &Delta| delta.get("close_shm") == 2 * delta.get("connect_shm");
        // As in `threads.rs`, a rare jump keeps a connection open, so the case gets a second run.
        for _ in 0..2 {
            if what == "jump" && !closed_all(&delta) {
                (ours, delta) = place.counted(&program, &[what]);
            }
        }
        // musl's cancellation signal interrupts `poll` and similar calls even in a thread that has
        // disabled cancellation. Our calls go on, unless the signal comes just before the thread
        // sleeps.
        let either = |text: &str| text.replace("not cancelled: -1", "not cancelled: 1");
        assert_eq!(either(&ours), either(&stock), "{what}");
        stays_in_shared_memory(&delta, connections);
        assert!(closed_all(&delta), "connections are left\n{delta}");
    }
}

/// Every way of waiting must report the end of a killed peer as on stock sockets, even if the
/// monitor was killed before and so cannot tell.
#[test]
fn killed_processes_are_noticed() {
    let Some(mut place) = Place::new() else { return };
    for (of_server, of_client) in MIXED {
        let [server, client] = [of_server, of_client].map(|libc| place.build(libc, "musl/killed", &[]));
        for (waits, without_monitor) in [("listen", false), ("dial", false), ("listen", true), ("dial", true)] {
            let [stock, ours] = [Stock, Accel].map(|side| {
                let before = place.host.snapshot();
                let port = net::free_port();
                let does = |role| if role == waits { "wait" } else { "hold" };
                let start = |program: &Path, role| {
                    place.host.start(side, role, program, &[role, &port.to_string(), does(role)])
                };
                let listens = start(&server, "listen");
                let known = || side == Stock || stock_mode() || place.host.knows(port);
                let up = || net::kernel_sockets(port, "0A") > 0 && known();
                net::wait_until(Duration::from_secs(60), up).expect("it listens");
                let dials = start(&client, "dial");
                let (mut waiting, mut holding) = if waits == "listen" { (listens, dials) } else { (dials, listens) };
                waiting.wait_stdout("waits", Duration::from_secs(60));
                holding.wait_stdout("holds", Duration::from_secs(60));
                if side == Accel {
                    stays_in_shared_memory(&place.host.snapshot().since(&before), 5);
                }
                // Give the waiting programs time to sleep.
                std::thread::sleep(Duration::from_millis(100));
                if side == Accel && without_monitor && !stock_mode() {
                    place.host.kill_monitor();
                }
                drop(holding);
                let said = waiting.finish(Duration::from_secs(90)).success().says("ok").stdout;
                if side == Accel && without_monitor && !stock_mode() {
                    place.host.start_monitor();
                }
                said
            });
            assert_eq!(ours, stock, "{of_server:?} {of_client:?}: {waits} waits, without a monitor: {without_monitor}");
        }
    }
}

/// gcompat offers functions of glibc on top of musl. Such a program was built for another libc
/// than the one to which the library would pass calls, so the library must leave it alone.
#[test]
fn glibcs_functions_over_musl_are_left_alone() {
    let Some(place) = Place::new() else { return };
    let sources = ["musl/musl.c", "musl/glibc_names.c"];
    let program = native::build_with(&place.musl, &place.host, "gcompat", &sources, &["-rdynamic"]);
    let (_, delta) = place.counted(&program, &[]);
    delta.assert_kernel_only();
}

/// `run`, `doctor --program` and `explain` must treat a musl program like any other.
#[test]
fn commands_know_it() {
    let Some(place) = Place::new() else { return };
    if stock_mode() {
        return eprintln!("SKIPPED: stock mode has no command line");
    }
    let command = |args: &[&str]| {
        let mut command = place.host.command(Stock, artifacts::cli());
        command.env("FASTSOCKET_SOCKET", place.host.socket()).args(args);
        Proc::spawn(place.host.logs(), "fastsocket", command).finish(Duration::from_secs(60))
    };
    let program = place.build(Musl, "musl/musl", &[]).display().to_string();
    let before = place.host.snapshot();
    let done = command(&["run", "--require", "--", &program]).success().says("ok");
    assert_eq!(done.stderr, "", "a warning");
    place.host.snapshot().since(&before).assert_shm(1);
    let done = command(&["doctor", "--program", &program]);
    assert!(done.stdout.contains("(musl)") && !done.stdout.contains("FAIL  program"), "{done:?}");
    let (server, port) = place.serve(Musl);
    place.run(Accel, &place.build(Glibc, "echo", &[]), &["ask", &port, "2", "3"]);
    let done = command(&["explain", "--json", &server.pid().to_string()]).success();
    assert!(done.stdout.contains("\"program_kind\": \"musl\""), "{done:?}");
    assert!(done.stdout.contains("\"obstacles\": []"), "{done:?}");
}
