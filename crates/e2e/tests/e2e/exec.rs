//! Programs that load the library inherit connections and listeners through `exec` and
//! `posix_spawn`. The connections must stay in shared memory.

use fsocket_e2e::{self as e2e, native};
use fsocket_testkit::host::{Accel, Side, Stock};
use fsocket_testkit::{helper, net, stock_mode, Delta, Host, Proc, PYTHON};
use std::time::Duration;

#[test]
fn what_is_inherited_stays_fast() {
    let host = Host::new();
    let Some(delta) = e2e::same_transcripts(&host, 120, "exec/exec.py", &[]) else { return };
    assert!(delta.get("connect_shm") >= 25 && delta.get("accept_shm") >= 25, "not over shared memory\n{delta}");
    // On a busy machine the next program may need more than a second to start; then its first
    // connection moves to kernel TCP.
    let untaken = delta.get("fallback.untaken");
    assert!(untaken <= 4, "the next programs accept nothing\n{delta}");
    assert!(delta.get("connect_kernel") + delta.get("accept_kernel") <= untaken, "over kernel TCP\n{delta}");
    assert!(delta.get("path_switch") <= untaken, "went over to the kernel\n{delta}");
    assert!(delta.get("hostile_peer") == 0 && delta.get("fallback.switch") == 0, "{delta}");
    // No memory of the replaced programs may remain.
    let report = host.snapshot();
    assert!(report.resident() == 0, "something is left: {}", report.resident());
}

/// Directory for the binary of the services.
fn place(host: &Host) -> String {
    let place = host.path().join("services");
    std::fs::create_dir(&place).expect("a directory");
    place.to_str().expect("text").to_owned()
}

/// The master watches the listener over shared memory and in a zone of its own. Its services know
/// only the kernel's queue of the listen socket. Waiting connections must move to that queue, and
/// later ones must arrive there.
#[test]
fn services_of_another_environment_accept() {
    let host = Host::new();
    let place = place(&host);
    let Some(delta) = e2e::same_transcripts(&host, 120, "exec/services.py", &[&place]) else { return };
    // Each service gets two connections, the first over shared memory. The master itself accepts
    // four and hands them over.
    assert!(
        delta.get("connect_shm") == 8 + 4 && delta.get("connect_kernel") == 8 + 1,
        "a listener is handed over\n{delta}"
    );
    assert!(delta.get("path_switch") >= 8 + 4 && delta.get("accept_shm") == 4, "nobody accepts there\n{delta}");
    assert!(delta.get("hostile_peer") == 0 && delta.get("fallback.switch") == 0, "{delta}");
}

#[test]
fn services_of_another_environment_accept_where_there_are_zones() {
    let host = Host::new();
    let place = place(&host);
    let script = fsocket_testkit::helper("exec/services.py");
    let run = |side| {
        let mut command = host.command(side, fsocket_testkit::PYTHON);
        command.arg(&script).arg(&place).env("FASTSOCKET_DISABLE", "shm");
        Proc::spawn(host.logs(), "services", command).finish(Duration::from_secs(120)).success().stdout
    };
    let Some(delta) = e2e::same_output(&host, run) else { return };
    assert!(delta.get("zone_joins") >= 4, "a zone\n{delta}");
    assert!(delta.get("fallback.zone_shared") >= 4, "which has ended\n{delta}");
}

/// In another root directory, or under another mount, the loader must not print an error about the
/// library.
#[test]
fn programs_that_cannot_open_the_library() {
    let host = Host::new();
    let Some(delta) = e2e::same_transcripts(&host, 120, "exec/hidden.py", &[]) else { return };
    assert!(delta.get("connect_shm") == 1 && delta.get("path_switch") >= 1, "one, for a program without\n{delta}");
    assert!(delta.get("hostile_peer") == 0 && delta.get("fallback.switch") == 0, "{delta}");
}

const LIMIT: Duration = Duration::from_secs(60);

#[track_caller]
fn app(host: &Host, side: Side, args: &[&str], says: &str) -> Proc {
    let path = helper("exec/super_server.py").display().to_string();
    let all: Vec<&str> = [path.as_str()].into_iter().chain(args.iter().copied()).collect();
    let mut app = host.start(side, args[0], PYTHON, &all);
    app.wait_stdout(says, LIMIT);
    app
}

/// Runs clients one after the other. Returns the changes of the counters.
#[track_caller]
fn clients(host: &Host, port: &str, n: &str) -> Delta {
    let before = host.snapshot();
    let said = e2e::python(host, Accel, 60, "exec/super_server.py", &["ask", port, n]);
    assert_eq!(said.matches("client served").count().to_string(), n, "{said}");
    host.snapshot().since(&before)
}

/// The first connection was made over shared memory and then moved to the kernel's queue; later
/// ones arrived there.
#[track_caller]
fn assert_left(delta: &Delta, n: i128) {
    if !stock_mode() {
        let counted = ["connect_shm", "fallback.untaken", "connect_kernel"].map(|name| delta.get(name));
        assert_eq!(counted, [1, 1, n - 1], "{delta}");
        assert_eq!((delta.get("accept_shm"), delta.get("fallback.switch")), (0, 0), "{delta}");
    }
}

/// Like inetd or dovecot's master: the process polls its listener but never accepts. Its child, a
/// program without the library, accepts.
#[test]
fn the_child_of_a_super_server_accepts() {
    for way in ["epoll-id", "edge-late", "poll-root", "select-none"] {
        for system in [false, true] {
            let host = if system { Host::for_all_users("") } else { Host::new() };
            let port = net::free_port().to_string();
            let server = app(&host, Accel, &["wait", &port, way], "listens");
            assert_left(&clients(&host, &port, "3"), 3);
            server.finish(LIMIT).success().says("ended 0");
        }
    }
}

/// A program that wrote its title over its environment before its first socket, as setproctitle
/// does.
#[test]
fn the_child_of_a_super_server_with_a_title_accepts() {
    for system in [false, true] {
        let host = if system { Host::for_all_users("") } else { Host::new() };
        let port = net::free_port().to_string();
        let program = native::build(&host, "titled", &["exec/titled_super.c"], &[]);
        let helper = helper("exec/super_server.py").display().to_string();
        let mut server = host.start(Accel, "titled", program, &[&port, PYTHON, &helper, "helper", "3"]);
        server.wait_stdout("listens", LIMIT);
        assert_left(&clients(&host, &port, "3"), 3);
        server.finish(LIMIT).success().says("ended 0");
    }
}

/// A master that never accepts passes its listener on before the new worker (with other rights)
/// polls it. The master must not count as a process that serves the listener.
#[test]
fn a_reloaded_master_leaves_the_listener_to_its_worker() {
    for workers in ["nobody", "root"] {
        let host = Host::new();
        let port = net::free_port().to_string();
        let Some(delta) = e2e::same_transcripts(&host, 60, "exec/reloaded_master.py", &[&port, workers]) else {
            continue;
        };
        // Until the new worker polls, clients use the kernel; the last ones wait there.
        assert!(delta.get("connect_shm") >= 5, "{workers}\n{delta}");
        assert_eq!(delta.get("fallback.option"), 0, "{workers}\n{delta}");
    }
}

/// A process with the library polls a listener, and tells a process without the library to accept.
/// No call hands the listener over.
#[test]
fn what_nobody_with_the_library_takes_goes_to_the_kernel() {
    let host = Host::new();
    let (port, path) = (net::free_port().to_string(), host.path().join("meeting").display().to_string());
    let _owner = app(&host, Stock, &["own", &port, &path], "listens");
    let _looks = app(&host, Accel, &["look", &path], "looks");
    assert_left(&clients(&host, &port, "3"), 3);
}

/// A server computes, or is stopped, for three seconds. Its connections must move to the kernel
/// and be accepted in order. Later ones must use shared memory again.
#[test]
fn a_server_that_is_away_loses_nothing() {
    for way in ["computes", "edge", "stopped"] {
        let host = Host::new();
        let port = net::free_port().to_string();
        let before = host.snapshot();
        let server = app(&host, Accel, &["busy", &port, way, "5"], "listens");
        let said = e2e::python(&host, Accel, 60, "exec/super_server.py", &["order", &port, "5"]);
        let order = ["0", "0", "1", "2", "3", "4", "0", "1", "2", "3", "4"];
        assert_eq!(said, format!("{}ok\n", order.map(|n| format!("client {n}\n")).concat()));
        let served = server.finish(LIMIT).success().stdout;
        assert_eq!(served, format!("listens\n{}ok\n", order.map(|n| format!("served {n}\n")).concat()), "{way}");
        let delta = host.snapshot().since(&before);
        if !stock_mode() {
            // One connection comes before, three wait, two come after the kernel has those, and
            // five come afterwards. (On a busy machine the two may come earlier, and then wait,
            // too.)
            let [shm, kernel, untaken] =
                ["connect_shm", "connect_kernel", "fallback.untaken"].map(|name| delta.get(name));
            assert_eq!([shm + kernel, untaken + kernel], [11, 5], "{way}: {delta}");
            assert!(kernel <= 2, "{way}: {delta}");
            assert_eq!(["accept_shm", "accept_kernel"].map(|name| delta.get(name)), [1 + 5, 3 + 2], "{way}: {delta}");
        }
    }
}

/// After `vfork` the child runs in its parent's memory, but has descriptors of its own.
#[test]
fn children_in_their_parents_memory() {
    let host = Host::new();
    let vfork = native::build(&host, "vfork", &["exec/vfork.c"], &["-lpthread"]);
    let copies = native::build(&host, "copies", &["exec/copies.c"], &["-static"]);
    let before = host.snapshot();
    let numbers = Proc::spawn(host.logs(), "numbers", {
        let mut command = host.command(Accel, &vfork);
        command.arg("numbers");
        command
    });
    let said = numbers.finish(Duration::from_secs(60)).says("ok").stdout;
    assert!(
        stock_mode() || said.contains("by number 700 shared 3") && said.contains("SYS_clone3 700 shared 5"),
        "{said}"
    );
    // All these children close the same connection.
    host.snapshot().since(&before).assert_shm(1);
    let run = |side| {
        let mut command = host.command(side, &vfork);
        command.args(["100", "/bin/cat"]).arg(&copies);
        Proc::spawn(host.logs(), "vfork", command).finish(Duration::from_secs(120)).success().stdout
    };
    let Some(delta) = e2e::same_output(&host, run) else { return };
    assert!(delta.get("connect_shm") >= 8 && delta.get("connect_kernel") == 0, "not over shared memory\n{delta}");
    // Only these connections move: those that a child uses, and those that are a program's
    // standard input and output.
    assert!((5..=20).contains(&delta.get("path_switch")), "which were handed over?\n{delta}");
    assert!(delta.get("hostile_peer") == 0 && delta.get("fallback.switch") == 0, "{delta}");
}
