//! The library starts in a program only at the first call that concerns it (ADR 62).

use fsocket_e2e::native::{self, Echo};
use fsocket_testkit::host::{Accel, Stock};
use fsocket_testkit::{artifacts, helper, net, stock_mode, Host, Proc, PYTHON};
use std::os::unix::fs::DirBuilderExt;
use std::process::Command;
use std::time::Duration;

/// The system calls that a program makes, as strace lists them.
#[track_caller]
fn calls(host: &Host, program: &[&str]) -> String {
    let strace = fsocket_testkit::find_program("strace").expect("strace (make deps)");
    let preload = format!("LD_PRELOAD={}", artifacts::library().display());
    let socket = format!("FASTSOCKET_SOCKET={}", host.socket().display());
    let mut command = host.command(Stock, strace);
    command.args(["-f", "-E", &preload, "-E", &socket]).args(program);
    Proc::spawn(host.logs(), "strace", command).finish(Duration::from_secs(60)).success().stderr
}

/// Without sockets, the library must not contact the monitor. Children of a shell must share
/// memory as without the library.
#[test]
fn a_program_without_sockets_is_left_alone() {
    if stock_mode() {
        return eprintln!("SKIPPED: there is no library");
    }
    let host = Host::new();
    for program in [&["true"][..], &["cat", "/dev/null"], &["sh", "-c", "/bin/true; /bin/true"]] {
        let made = calls(&host, program);
        assert!(made.contains("libfsocket.so"), "{made}");
        for call in ["socket(", "connect(", "memfd_create(", "membarrier("] {
            assert!(!made.contains(call), "{program:?} calls {call}\n{made}");
        }
    }
    let shell = calls(&host, &["sh", "-c", "/bin/true; /bin/true"]);
    assert!(shell.contains("vfork("), "a fork\n{shell}");
    assert!(host.snapshot().report.is_some_and(|r| r.processes.is_empty()), "somebody has greeted the monitor");
}

/// The peer has no library, so the library has given the connection up. From then on it must add
/// no system calls to those that the program makes.
#[test]
fn a_connection_that_stays_in_the_kernel_costs_no_system_calls() {
    if stock_mode() {
        return eprintln!("SKIPPED: there is no library");
    }
    const COUNTED: usize = 200;
    let host = Host::new();
    let echo = native::build(&host, "echo", &["echo.c"], &[]);
    let (_server, port) = Echo::default().serve(&host, Stock, &echo, 1);
    let (path, counted) = (helper("asleep/settled.py").display().to_string(), COUNTED.to_string());
    let made = calls(&host, &["env", "FASTSOCKET_UPGRADE=4", PYTHON, &path, &port, "4000", &counted]);
    let (_, settled) = made.split_once("\"settled\\n\"").unwrap_or_else(|| panic!("no mark\n{made}"));
    let (settled, _) = settled.split_once("\"counted\\n\"").unwrap_or_else(|| panic!("no second mark\n{settled}"));
    let of = |names: &[&str]| {
        let call = |line: &&str| names.iter().any(|n| line.trim_start().starts_with(&format!("{n}(")));
        settled.lines().filter(call).count()
    };
    let waits = [of(&["poll", "ppoll"]), of(&["select", "pselect6"])];
    assert_eq!(waits, [COUNTED; 2], "polls and selects");
    assert_eq!([of(&["sendto"]), of(&["recvfrom"])], [COUNTED; 2], "sends and receives");
    let more = of(&["getsockopt", "ioctl", "fcntl", "recvmsg", "sendmsg", "futex"]);
    assert_eq!(more, 0, "calls that the program does not make");
}

/// The library starts in the child that connects, and later in the parent. Children that borrow
/// the parent's memory (vfork) must start it in neither.
#[test]
fn it_begins_where_it_is_called() {
    let host = Host::new();
    let echo = native::build(&host, "echo", &["echo.c"], &[]);
    let asleep = native::build(&host, "asleep", &["asleep/asleep.c"], &[]);
    let (_server, port) = Echo::default().serve(&host, Accel, &echo, 100);
    let before = host.snapshot();
    let mut command = host.command(Accel, &asleep);
    command.arg(&port);
    Proc::spawn(host.logs(), "asleep", command).finish(Duration::from_secs(60)).success().says("ok");
    host.snapshot().since(&before).assert_shm(2);
}

/// A private monitor without clients must not end while a program runs whose library has not
/// started yet. It ends after that program.
#[test]
fn a_private_monitor_stays_for_a_program_that_sleeps() {
    if stock_mode() {
        return eprintln!("SKIPPED: there is no library");
    }
    let host = Host::stopped();
    let asleep = native::build(&host, "asleep", &["asleep/asleep.c"], &[]);
    let socket = host.path().join("own").join("socket");
    std::fs::DirBuilder::new().mode(0o700).create(socket.parent().expect("a directory")).expect("made");
    let mut command = Command::new(artifacts::monitor());
    command.args(["--private", "--linger", "0.3", "--socket"]).arg(&socket);
    let mut monitor = Proc::spawn(host.logs(), "fastsocketd", command);
    net::wait_until(Duration::from_secs(60), || socket.exists()).expect("it begins");
    let with = |mut command: Command| {
        command.env("LD_PRELOAD", artifacts::library()).env("FASTSOCKET_SOCKET", &socket);
        command
    };
    // This first program ends the long grace period that the monitor has at its start.
    let mut first = host.command(Stock, fsocket_testkit::PYTHON);
    first.args(["-c", "import socket; socket.socket()"]);
    let mut late = host.command(Stock, &asleep);
    let port = net::free_port();
    late.args([&port.to_string(), "3000000"]);
    let late = Proc::spawn(host.logs(), "asleep", with(late));
    Proc::spawn(host.logs(), "first", with(first)).finish(Duration::from_secs(60)).success();
    std::thread::sleep(Duration::from_millis(1500));
    assert!(monitor.running(), "the monitor has ended before the program: {}", monitor.stderr());
    // The program fails, because there is no server; that does not matter here.
    let _ = late.finish(Duration::from_secs(60));
    assert!(net::wait_until(Duration::from_secs(60), || !monitor.running()).is_ok(), "the monitor stays for nobody");
}

/// A program in a mount namespace where nothing has the socket's name belongs to another monitor.
#[test]
fn a_private_monitor_does_not_stay_for_another_namespace() {
    if stock_mode() {
        return eprintln!("SKIPPED: there is no library");
    }
    let host = Host::stopped();
    let socket = host.path().join("own").join("socket");
    std::fs::DirBuilder::new().mode(0o700).create(socket.parent().expect("a directory")).expect("made");
    let with = |mut command: Command| {
        command.env("LD_PRELOAD", artifacts::library()).env("FASTSOCKET_SOCKET", &socket);
        command
    };
    let mut elsewhere = host.command(Stock, "unshare");
    let hide = "mount -t tmpfs none \"${FASTSOCKET_SOCKET%/*}\" && echo hidden && exec sleep 60";
    elsewhere.args(["-m", "sh", "-c", hide]);
    let mut elsewhere = Proc::spawn(host.logs(), "elsewhere", with(elsewhere));
    elsewhere.wait_stdout("hidden", Duration::from_secs(60));
    let mut command = Command::new(artifacts::monitor());
    command.args(["--private", "--linger", "0.3", "--socket"]).arg(&socket);
    let mut monitor = Proc::spawn(host.logs(), "fastsocketd", command);
    net::wait_until(Duration::from_secs(60), || socket.exists()).expect("it begins");
    let mut first = host.command(Stock, fsocket_testkit::PYTHON);
    first.args(["-c", "import socket; socket.socket()"]);
    Proc::spawn(host.logs(), "first", with(first)).finish(Duration::from_secs(60)).success();
    assert!(
        net::wait_until(Duration::from_secs(60), || !monitor.running()).is_ok(),
        "the monitor stays for a stranger"
    );
    assert!(elsewhere.running(), "that program has ended");
}
