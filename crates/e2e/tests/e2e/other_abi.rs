//! An upgrade, under load, to a build with another ABI number. The old monitor stays for the
//! programs that it serves, and the new one serves new programs (ADR 83). The second build is in
//! `FASTSOCKET_TEST_OTHER` (`make test-upgrade`).

use crate::restarts::{system, Load, LIMIT};
use fsocket_testkit::host::{Accel, Stock};
use fsocket_testkit::{artifacts, net, Host, Proc, PYTHON};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Files of the package.
const FILES: [&str; 3] = ["fastsocketd", "fastsocket", "libfsocket.so"];

/// The two builds, and the directory where one of them is installed.
struct Builds {
    first: PathBuf,
    second: PathBuf,
    installed: PathBuf,
}

impl Builds {
    #[track_caller]
    fn new() -> Builds {
        let installed = std::env::temp_dir().join(format!("fastsocket-test-installed-{}", std::process::id()));
        let second = PathBuf::from(std::env::var_os("FASTSOCKET_TEST_OTHER").expect("FASTSOCKET_TEST_OTHER"));
        let builds = Builds { first: artifacts::dir(), second, installed };
        std::fs::create_dir_all(&builds.installed).expect("a directory");
        builds.install(&builds.first);
        // No other test runs in this process, so no thread reads the environment.
        std::env::set_var("FASTSOCKET_ARTIFACTS", &builds.installed);
        builds
    }

    /// Replaces the files, as a package manager does.
    #[track_caller]
    fn install(&self, build: &Path) {
        for name in FILES {
            let new = self.installed.join(format!("{name}.new"));
            std::fs::copy(build.join(name), &new).expect("a copy");
            std::fs::rename(&new, self.installed.join(name)).expect("installed");
        }
    }
}

impl Drop for Builds {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.installed);
    }
}

/// `fastsocket VERB --json`.
#[track_caller]
fn ask(host: &Host, verb: &str) -> Value {
    let mut command = host.command(Stock, artifacts::cli());
    command.env("FASTSOCKET_SOCKET", host.socket()).args([verb, "--json"]);
    let said = Proc::spawn(host.logs(), verb, command).finish(LIMIT).success().stdout;
    serde_json::from_str(&said).expect("JSON")
}

/// The report of the old monitor that has stayed. `None`: there is none.
fn retired(host: &Host) -> Option<Value> {
    let others = ask(host, "stat")["others"].take();
    let all = others.as_array()?;
    assert!(all.len() <= 1, "{others}");
    all.first().filter(|other| other["retired"] == true).cloned()
}

/// Number of connections over shared memory that each of these processes has opened, by this
/// monitor's report.
fn opened(monitor: &Value, pids: [u32; 2]) -> Option<[u64; 2]> {
    let all = monitor["processes"].as_array()?;
    let of = |pid: u32| all.iter().find(|p| p["pid"] == pid)?["counters"]["connect_shm"].as_u64();
    Some([of(pids[0])?, of(pids[1])?])
}

/// Waits until both processes have opened more connections, by the report of the monitor that
/// `asked` queries.
#[track_caller]
fn go_on(what: &str, load: &mut Load, asked: impl Fn() -> Option<Value>) {
    let (pids, mut first) = (load.opens(), None);
    let done = net::wait_until(LIMIT, || {
        assert!(load.client.running(), "{what}: the load has ended:\n{}", load.client.stderr());
        let now = asked().and_then(|monitor| opened(&monitor, pids));
        first = first.or(now);
        now.zip(first).is_some_and(|(now, first)| now[0] > first[0] && now[1] > first[1])
    });
    assert!(done.is_ok(), "{what}: never over shared memory\n{:#?}", asked());
}

fn is_there(socket: &Path) -> bool {
    std::fs::symlink_metadata(socket).is_ok()
}

/// The name of the socket that only a monitor of this ABI has.
fn own_socket(host: &Host) -> PathBuf {
    host.socket().with_file_name(format!("monitor-{}.sock", fsocket_abi::VERSION))
}

/// Ends the monitor, as a service manager does, and starts the installed one.
#[track_caller]
fn restart(host: &mut Host) {
    let monitor = host.monitor().expect("a monitor");
    monitor.signal(libc::SIGTERM);
    net::wait_until(LIMIT, || !monitor.running()).expect("its end");
    host.kill_monitor();
    host.start_monitor();
}

/// Makes the monitor execute the installed program in the same process.
#[track_caller]
fn reload(host: &mut Host) {
    let monitor = host.monitor().expect("a monitor");
    let starts = |monitor: &Proc| monitor.stderr().matches("(ABI ").count();
    monitor.signal(libc::SIGHUP);
    // The retired monitor also reports a start.
    net::wait_until(LIMIT, || starts(monitor) >= 3).expect("two begin");
}

#[track_caller]
fn upgraded(mut host: Host, builds: &Builds, restart: fn(&mut Host)) {
    let mut old = Load::start(&host);
    go_on("before", &mut old, || Some(ask(&host, "stat")));
    builds.install(&builds.second);
    restart(&mut host);
    go_on("programs from before", &mut old, || retired(&host));
    let mut new = Load::start(&host);
    go_on("new programs", &mut new, || Some(ask(&host, "stat")));
    go_on("programs from before, beside new ones", &mut old, || retired(&host));
    let stayed = retired(&host).expect("it stays while it is needed");
    for wrong in ["fallback.version", "hostile_peer"] {
        assert_eq!(stayed["totals"][wrong], 0, "{wrong}: {stayed:#}");
    }
    let all = ask(&host, "ss");
    let of = |pid: u32| {
        let all = all["connections"].as_array().expect("a list");
        all.iter()
            .filter(|c| c["path"] == "shm" && c["pids"].as_array().is_some_and(|p| p.iter().any(|p| *p == pid)))
            .count()
    };
    assert!(of(old.client.pid()) > 0 && of(new.client.pid()) > 0, "{all:#}");
    let text = host.command(Stock, artifacts::cli()).env("FASTSOCKET_SOCKET", host.socket()).arg("stat").output();
    let text = String::from_utf8(text.expect("stat").stdout).expect("text");
    assert!(text.contains(&format!("The monitor of ABI {} at ", fsocket_abi::VERSION)), "{text}");
    old.end();
    net::wait_until(LIMIT, || !is_there(&own_socket(&host))).expect("it ends with its last program");
    assert!(retired(&host).is_none());
    go_on("new programs alone", &mut new, || Some(ask(&host, "stat")));
    assert_eq!(ask(&host, "stat")["totals"]["hostile_peer"], 0);
    new.end();
}

#[test]
#[ignore = "needs a second build: make test-upgrade"]
fn restarted_under_load() {
    let builds = Builds::new();
    upgraded(system(), &builds, restart);
}

#[test]
#[ignore = "needs a second build: make test-upgrade"]
fn reloaded_under_load() {
    let builds = Builds::new();
    upgraded(system(), &builds, reload);
}

/// The first build is installed again. Its monitor must take the place of the old monitor.
#[test]
#[ignore = "needs a second build: make test-upgrade"]
fn and_back() {
    let builds = Builds::new();
    let mut host = system();
    let mut load = Load::start(&host);
    for _ in 0..3 {
        builds.install(&builds.second);
        restart(&mut host);
        go_on("upgraded", &mut load, || retired(&host));
        builds.install(&builds.first);
        restart(&mut host);
        // No program runs for which the monitor of the second build would stay.
        go_on("back", &mut load, || Some(ask(&host, "stat")));
    }
    load.end();
    end_retired(&host);
}

#[track_caller]
fn end_retired(host: &Host) {
    let mut command = host.command(Stock, artifacts::monitor());
    command.arg("--socket").arg(host.socket()).arg("--end-retired");
    Proc::spawn(host.logs(), "end-retired", command).finish(LIMIT).success();
    let none = || ask(host, "stat")["others"].as_array().is_some_and(Vec::is_empty);
    net::wait_until(LIMIT, none).expect("no other monitor");
}

/// Opens a connection and executes another program, which continues with it once the file exists.
const HANDED: &str = r#"
import os, socket, sys, time
how, number, file = sys.argv[1:]
def talk(s):
    s.sendall(b"x" * 5000)
    left = 5000
    while left:
        left -= len(s.recv(left)) or sys.exit("the end")
if how == "resume":
    talk(socket.socket(fileno=int(number)))
    print("ok")
    sys.exit()
s = socket.create_connection(("127.0.0.1", int(number)))
talk(s)
s.set_inheritable(True)
print("connected", flush=True)
while not os.path.exists(file):
    time.sleep(0.01)
command = [sys.executable, __file__, "resume", str(s.fileno()), file]
if how == "exec":
    os.execv(command[0], command)
pid = os.posix_spawn(command[0], command, os.environ) if how == "spawn" else os.fork()
if pid == 0:
    os.execv(command[0], command)
assert os.waitpid(pid, 0)[1] == 0
talk(s)
"#;

/// A program executes another one, which loads the library that was installed meanwhile. That
/// library does not understand the old shared memory, so the connection must be handed over as to
/// a program without the library.
#[test]
#[ignore = "needs a second build: make test-upgrade"]
fn handed_to_a_program_of_the_other_abi() {
    let builds = Builds::new();
    let host = system();
    let (_server, port) = fsocket_e2e::echo_server(&host, Accel, "threaded", "127.0.0.1");
    let script = host.file("handed.py", HANDED).display().to_string();
    for is_other in [false, true] {
        for how in ["exec", "spawn", "fork"] {
            builds.install(&builds.first);
            let (file, before) = (host.path().join(format!("{how}-{is_other}")), host.snapshot());
            let args = [&script, how, &port.to_string(), &file.display().to_string()];
            let mut program = host.start(Accel, "handed", PYTHON, &args);
            program.wait_stdout("connected", LIMIT);
            if is_other {
                builds.install(&builds.second);
            }
            std::fs::write(&file, "").expect("a file");
            program.finish(LIMIT).success().says("ok");
            builds.install(&builds.first);
            let delta = host.snapshot().since(&before);
            assert_eq!(delta.get("connect_shm"), 1, "{how}: {delta}");
            // With `fork`, the child that executes a program may have handed it over in any case.
            assert!(!is_other || delta.get("path_switch") > 0, "{how}: {delta}");
        }
    }
}
