//! Programs that load the library inherit connections and listeners through
//! `exec` and `posix_spawn` as they are: over shared memory before and after.

use fsocket_e2e::{self as e2e, native};
use fsocket_testkit::host::{Accel, Side, Stock};
use fsocket_testkit::{net, script, stock_mode, Delta, Host, Proc, PYTHON};
use std::time::Duration;

#[test]
fn what_is_inherited_stays_fast() {
    let host = Host::new();
    let Some(delta) = e2e::same_transcripts(&host, 120, "exec.py", &[]) else { return };
    assert!(delta.get("connect_shm") >= 25 && delta.get("accept_shm") >= 25, "not over shared memory\n{delta}");
    // (On a busy machine a program may need more than a second to start. Its first connection goes over to kernel TCP then.)
    let untaken = delta.get("fallback.untaken");
    assert!(untaken <= 4, "the next programs accept nothing\n{delta}");
    assert!(delta.get("connect_kernel") + delta.get("accept_kernel") <= untaken, "over kernel TCP\n{delta}");
    assert!(delta.get("path_switch") <= untaken, "went over to the kernel\n{delta}");
    assert!(delta.get("hostile_peer") == 0 && delta.get("fallback.switch") == 0, "{delta}");
    // Nothing is left of the programs that were replaced.
    let report = host.snapshot();
    assert!(report.resident() == 0, "something is left: {}", report.resident());
}

/// Where the services' binary is put.
fn place(host: &Host) -> String {
    let place = host.path().join("services");
    std::fs::create_dir(&place).expect("a directory");
    place.to_str().expect("text").to_owned()
}

/// The master watches over shared memory and in a zone of its own, its services know only the
/// kernel's queue of the one listen socket: what waits goes there, and everything after it.
#[test]
fn services_of_another_environment_accept() {
    let host = Host::new();
    let place = place(&host);
    let Some(delta) = e2e::same_transcripts(&host, 120, "services.py", &[&place]) else { return };
    // One of two each; and four connections that the master accepts and hands over.
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
    let script = fsocket_testkit::script("apps/services.py");
    let run = |side| {
        let mut command = host.command(side, fsocket_testkit::PYTHON);
        command.arg(&script).arg(&place).env("FASTSOCKET_DISABLE", "shm");
        Proc::spawn(host.logs(), "services", command).finish(Duration::from_secs(120)).success().stdout
    };
    let Some(delta) = e2e::same_output(&host, run) else { return };
    assert!(delta.get("zone_joins") >= 4, "a zone\n{delta}");
    assert!(delta.get("fallback.zone_shared") >= 4, "which has ended\n{delta}");
}

/// In another root, under another mount: the loader has nothing to complain of.
#[test]
fn programs_that_cannot_open_the_library() {
    let host = Host::new();
    let Some(delta) = e2e::same_transcripts(&host, 120, "hidden.py", &[]) else { return };
    assert!(delta.get("connect_shm") == 1 && delta.get("path_switch") >= 1, "one, for a program without\n{delta}");
    assert!(delta.get("hostile_peer") == 0 && delta.get("fallback.switch") == 0, "{delta}");
}

const LIMIT: Duration = Duration::from_secs(60);

#[track_caller]
fn app(host: &Host, side: Side, args: &[&str], says: &str) -> Proc {
    let path = script("apps/super_server.py").display().to_string();
    let all: Vec<&str> = [path.as_str()].into_iter().chain(args.iter().copied()).collect();
    let mut app = host.start(side, args[0], PYTHON, &all);
    app.wait_stdout(says, LIMIT);
    app
}

/// One after the other; what they counted.
#[track_caller]
fn clients(host: &Host, port: &str, n: &str) -> Delta {
    let before = host.snapshot();
    let said = e2e::python(host, Accel, 60, "super_server.py", &["ask", port, n]);
    assert_eq!(said.matches("client served").count().to_string(), n, "{said}");
    host.snapshot().since(&before)
}

/// The first connection was made over shared memory, and went into the kernel's queue; so did those after it.
#[track_caller]
fn assert_left(delta: &Delta, n: i128) {
    if !stock_mode() {
        let counted = ["connect_shm", "fallback.untaken", "connect_kernel"].map(|name| delta.get(name));
        assert_eq!(counted, [1, 1, n - 1], "{delta}");
        assert_eq!((delta.get("accept_shm"), delta.get("fallback.switch")), (0, 0), "{delta}");
    }
}

/// As inetd and dovecot's master: it looks and never accepts; its child does, a program without the library.
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

/// A program that has written its title over the environment before its first socket, as setproctitle does.
#[test]
fn the_child_of_a_super_server_with_a_title_accepts() {
    for system in [false, true] {
        let host = if system { Host::for_all_users("") } else { Host::new() };
        let port = net::free_port().to_string();
        let program = native::build(&host, "titled", &["titled_super.c"], &[]);
        let helper = script("apps/super_server.py").display().to_string();
        let mut server = host.start(Accel, "titled", program, &[&port, PYTHON, &helper, "helper", "3"]);
        server.wait_stdout("listens", LIMIT);
        assert_left(&clients(&host, &port, "3"), 3);
        server.finish(LIMIT).success().says("ended 0");
    }
}

/// A process with the library looks at a listener, and tells one without it to accept. No call hands it over.
#[test]
fn what_nobody_with_the_library_takes_goes_to_the_kernel() {
    let host = Host::new();
    let (port, path) = (net::free_port().to_string(), host.path().join("meeting").display().to_string());
    let _owner = app(&host, Stock, &["own", &port, &path], "listens");
    let _looks = app(&host, Accel, &["look", &path], "looks");
    assert_left(&clients(&host, &port, "3"), 3);
}

/// A server that computes, or is stopped, for three seconds: its connections go to the kernel, are accepted in order,
/// and later ones come over shared memory again.
#[test]
fn a_server_that_is_away_loses_nothing() {
    for way in ["computes", "edge", "stopped"] {
        let host = Host::new();
        let port = net::free_port().to_string();
        let before = host.snapshot();
        let server = app(&host, Accel, &["busy", &port, way, "5"], "listens");
        let said = e2e::python(&host, Accel, 60, "super_server.py", &["order", &port, "5"]);
        let order = ["0", "0", "1", "2", "3", "4", "0", "1", "2", "3", "4"];
        assert_eq!(said, format!("{}ok\n", order.map(|n| format!("client {n}\n")).concat()));
        let served = server.finish(LIMIT).success().stdout;
        assert_eq!(served, format!("listens\n{}ok\n", order.map(|n| format!("served {n}\n")).concat()), "{way}");
        let delta = host.snapshot().since(&before);
        if !stock_mode() {
            // One before, three that wait, two that come when the kernel has those, and five afterwards. (On a busy
            // machine the two come before it has them, and then wait, too.)
            let [shm, kernel, untaken] =
                ["connect_shm", "connect_kernel", "fallback.untaken"].map(|name| delta.get(name));
            assert_eq!([shm + kernel, untaken + kernel], [11, 5], "{way}: {delta}");
            assert!(kernel <= 2, "{way}: {delta}");
            assert_eq!(["accept_shm", "accept_kernel"].map(|name| delta.get(name)), [1 + 5, 3 + 2], "{way}: {delta}");
        }
    }
}

/// `vfork`: the child has its parent's memory, and descriptors of its own.
#[test]
fn children_in_their_parents_memory() {
    let host = Host::new();
    let vfork = native::build(&host, "vfork", &["vfork.c"], &["-lpthread"]);
    let copies = native::build(&host, "copies", &["copies.c"], &["-static"]);
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
    // One connection, which all those children close.
    host.snapshot().since(&before).assert_shm(1);
    let run = |side| {
        let mut command = host.command(side, &vfork);
        command.args(["100", "/bin/cat"]).arg(&copies);
        Proc::spawn(host.logs(), "vfork", command).finish(Duration::from_secs(120)).success().stdout
    };
    let Some(delta) = e2e::same_output(&host, run) else { return };
    assert!(delta.get("connect_shm") >= 8 && delta.get("connect_kernel") == 0, "not over shared memory\n{delta}");
    // Those that a child uses, or that are a program's standard input and output: one and four.
    assert!((5..=20).contains(&delta.get("path_switch")), "which were handed over?\n{delta}");
    assert!(delta.get("hostile_peer") == 0 && delta.get("fallback.switch") == 0, "{delta}");
}
