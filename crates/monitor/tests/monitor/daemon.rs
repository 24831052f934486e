//! Tests of start, exit and options of `fastsocketd`.

use crate::support::*;
use fsocket_monitor::{Config, Endpoint, StartError};
use fsocket_proto::raw::Packet;
use fsocket_proto::{request, Payload};
use rustix::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

fn binary(args: &[&str], socket: &Path) -> Child {
    Command::new(env!("CARGO_BIN_EXE_fastsocketd"))
        .arg("--socket")
        .arg(socket)
        .args(args)
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

fn code(mut child: Child) -> i32 {
    let mut status = None;
    wait_until("it exits", || {
        status = child.try_wait().unwrap();
        status.is_some()
    });
    status.unwrap().code().unwrap()
}

#[test]
fn a_private_monitor_goes_after_its_last_client() {
    let d = Daemon::with(|c| c.linger = Duration::from_millis(100));
    let a = d.process();
    let mut b = d.process();
    drop(a);
    std::thread::sleep(Duration::from_millis(300));
    b.sync();
    assert!(!d.has_exited());
    drop(b);
    // A client that asks for a report does not keep the monitor alive, but gets an answer.
    let mut watcher = d.stranger();
    watcher.request(Packet::new(request::Report::KIND), None);
    wait_until("it exits", || d.has_exited());
    assert!(!d.socket.exists());
}

#[test]
fn unknown_options_are_an_error_of_the_wrapper() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(code(binary(&["--no-such-option"], &dir.path().join("p/s"))), 125);
    assert_eq!(code(binary(&["--mode", "999"], &dir.path().join("p/s"))), 125);
    assert_eq!(code(binary(&["--linger", "-1"], &dir.path().join("p/s"))), 125);
}

#[test]
fn one_monitor_per_socket_and_a_clean_exit() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("p/s");
    let first = binary(&["--private", "--linger", "60"], &socket);
    wait_until("it listens", || socket.exists());
    assert_eq!(socket.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(socket.parent().unwrap().metadata().unwrap().permissions().mode() & 0o777, 0o700);
    assert_eq!(code(binary(&["--private"], &socket)), 0, "the other one does");
    assert_eq!(code(binary(&[], &socket)), 125);
    rustix::process::kill_process(rustix::process::Pid::from_child(&first), rustix::process::Signal::TERM).unwrap();
    assert_eq!(code(first), 0);
    assert!(!socket.exists());
}

#[test]
fn a_stale_socket_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("p/s");
    let mut killed = binary(&["--private"], &socket);
    wait_until("it listens", || socket.exists());
    killed.kill().unwrap();
    killed.wait().unwrap();
    assert!(socket.exists());
    let d = Daemon::with(|c| c.socket = socket.clone());
    wait_until("the new one answers", || {
        rustix::net::connect(
            rustix::net::socket(rustix::net::AddressFamily::UNIX, rustix::net::SocketType::SEQPACKET, None).unwrap(),
            &rustix::net::SocketAddrUnix::new(&socket).unwrap(),
        )
        .is_ok()
    });
    d.process().sync();
}

#[test]
fn somebody_elses_directory_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let start = |path: &Path| {
        Endpoint::publish(&Config {
            socket: path.join("s"),
            private: true,
            linger: Duration::ZERO,
            mode: 0o600,
            keep: None,
            descriptors: u64::MAX,
            memory: u64::MAX,
            balance: Default::default(),
            rules: Default::default(),
            programs: Vec::new(),
            hosts: None,
            links: None,
            retired: false,
        })
        .map(|_| ())
    };
    let open = dir.path().join("open");
    std::fs::create_dir(&open).unwrap();
    std::fs::set_permissions(&open, std::fs::Permissions::from_mode(0o755)).unwrap();
    assert!(matches!(start(&open), Err(StartError::Directory { .. })));
    let fine = dir.path().join("fine");
    assert!(start(&fine).is_ok());
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(&fine, &link).unwrap();
    assert!(matches!(start(&link), Err(StartError::Directory { .. })));
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(&fine, Some(12345), None).unwrap();
        assert!(matches!(start(&fine), Err(StartError::Directory { .. })));
    }
    let long = dir.path().join("x".repeat(120));
    assert!(matches!(start(&long), Err(StartError::System { .. })));
}

/// The socket is on a full file system. At first there is no room for the lock, then none for the
/// socket.
#[test]
fn a_full_directory_is_125_and_one_line() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: a_full_directory_is_125_and_one_line: not root");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let lock = format!("s-{}.lock\n", fsocket_abi::VERSION);
    for (files, what, left) in [(1, "open the lock file", ""), (2, "bind the socket", lock.as_str())] {
        let script =
            "mount -t tmpfs -o nr_inodes=$2,mode=755 tmpfs $1 && cd $1 && $0 --socket $1/s; s=$?; ls -A; exit $s";
        let place = dir.path().to_str().unwrap();
        let monitor = env!("CARGO_BIN_EXE_fastsocketd");
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", script, monitor, place, &files.to_string()]);
        let done = command.output().unwrap();
        let said = String::from_utf8_lossy(&done.stderr);
        assert_eq!(done.status.code(), Some(125), "{said}");
        assert_eq!(said, format!("fastsocketd: cannot {what}: No space left on device (os error 28)\n"));
        assert_eq!(String::from_utf8_lossy(&done.stdout), left);
    }
}

#[test]
fn a_system_monitor_stays() {
    let d = Daemon::with(|c| {
        c.private = false;
        c.mode = 0o666;
        c.linger = Duration::ZERO;
    });
    d.process().sync();
    std::thread::sleep(Duration::from_millis(100));
    assert!(!d.has_exited());
    assert_eq!(d.socket.metadata().unwrap().permissions().mode() & 0o777, 0o666);
}

/// The process number of a system monitor's front, and its /proc/PID/status.
fn front(of: &Child) -> Option<(i32, String)> {
    let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", of.id())).ok()?;
    let pid: i32 = children.split_whitespace().next()?.parse().ok()?;
    Some((pid, std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?))
}

#[test]
fn the_two_halves_end_together() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: the_two_halves_end_together: not root");
        return;
    }
    use rustix::process::{kill_process, Pid, Signal};
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    // The columns: whether the front gets the signal, the signal, the exit status of the broker.
    for (front_too, signal, status) in [
        (false, Signal::TERM, Some(0)),
        (true, Signal::TERM, Some(0)),
        (false, Signal::KILL, None),
        (true, Signal::KILL, Some(1)),
    ] {
        let mut broker = binary(&[], &socket);
        wait_until("it serves", || socket.exists() && front(&broker).is_some_and(|f| f.1.contains("NoNewPrivs:\t1")));
        let confined = ["CapPrm:\t0000000000000000", "CapEff:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2"];
        wait_until("it is confined", || front(&broker).is_some_and(|f| confined.iter().all(|line| f.1.contains(line))));
        let (pid, status_now) = front(&broker).unwrap();
        assert!(["CapInh:", "CapBnd:", "CapAmb:"].iter().all(|l| status_now.contains(&format!("{l}\t{:016x}", 0))));
        assert!(
            !status_now.contains("Uid:\t0\t")
                || !std::fs::read_to_string("/proc/self/uid_map").unwrap().contains("4294967295")
        );
        let whom = if front_too { pid } else { broker.id() as i32 };
        // (The process may not be waiting for signals yet, but they are blocked from its start.)
        kill_process(Pid::from_raw(whom).unwrap(), signal).unwrap();
        let mut ended = None;
        wait_until("it ends", || {
            ended = broker.try_wait().unwrap();
            ended.is_some()
        });
        assert_eq!(ended.unwrap().code(), status, "{signal:?} of {whom}");
        wait_until("the front ends", || !Path::new(&format!("/proc/{pid}")).exists());
        assert_eq!(socket.exists(), signal == Signal::KILL && !front_too);
    }
}

/// If standard error is no terminal, messages have no colour. They name a process by number and
/// program.
#[test]
fn messages_are_plain_text() {
    let dir = tempfile::tempdir().unwrap();
    let (socket, said) = (dir.path().join("p/s"), dir.path().join("said"));
    let mut monitor = Command::new(env!("CARGO_BIN_EXE_fastsocketd"))
        .args(["--private", "-v", "--socket"])
        .arg(&socket)
        .env("JOURNAL_STREAM", "1:2")
        .stderr(std::fs::File::create(&said).unwrap())
        .spawn()
        .unwrap();
    wait_until("it listens", || socket.exists());
    let mut process = Proc::on(connected_to(&socket));
    process.hello();
    let (listener, port) = listener();
    process.listen(&listener);
    let text = || std::fs::read_to_string(&said).unwrap();
    wait_until("it says so", || text().contains("listens"));
    let line = text().lines().find(|l| l.contains("listens")).unwrap().to_owned();
    assert!(line.contains(&format!("process={}", std::process::id())), "{line}");
    assert!(line.contains(&format!("127.0.0.1:{port}")) && !text().contains('\x1b'), "{line}");
    monitor.kill().unwrap();
    monitor.wait().unwrap();
}

fn connected_to(path: &Path) -> OwnedFd {
    use rustix::net::{connect, socket_with, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
    let fd = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    connect(&fd, &SocketAddrUnix::new(path).unwrap()).unwrap();
    fd
}

/// The command of a monitor whose socket, of type `kind`, a service manager has made.
fn activated(kind: rustix::net::SocketType, socket: &Path) -> (OwnedFd, Command) {
    use rustix::net::{bind, listen, socket_with, AddressFamily, SocketAddrUnix, SocketFlags};
    let fd = socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
    bind(&fd, &SocketAddrUnix::new(socket).unwrap()).unwrap();
    listen(&fd, 8).unwrap();
    let mut command = Command::new("/bin/sh");
    // (LISTEN_PID is right, because the shell turns into the monitor by `exec`.)
    let script =
        format!("exec 3<&0 </dev/null; LISTEN_FDS=1 LISTEN_PID=$$ exec {} \"$@\"", env!("CARGO_BIN_EXE_fastsocketd"));
    command.args(["-c", &script, "sh", "--private", "--linger", "0.2", "--socket"]).arg(socket);
    command.stdin(Stdio::from(fd.try_clone().unwrap())).stderr(Stdio::piped());
    (fd, command)
}

/// A client that connects before the monitor runs waits, and is served later.
#[test]
fn it_takes_the_socket_of_a_service_manager() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let (fd, mut command) = activated(rustix::net::SocketType::SEQPACKET, &socket);
    let early = connected_to(&socket);
    let mut monitor = command.spawn().unwrap();
    let mut early = Proc::on(early);
    early.hello();
    drop(early);
    let mut status = None;
    wait_until("it goes after its last client", || {
        status = monitor.try_wait().unwrap();
        status.is_some()
    });
    assert_eq!(status.unwrap().code(), Some(0));
    assert!(socket.exists(), "the socket is the service manager's");
    // The service manager starts another monitor for the next client.
    let _late = connected_to(&socket);
    drop(fd);
}

#[test]
fn another_kind_of_socket_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (_fd, mut command) = activated(rustix::net::SocketType::STREAM, &dir.path().join("s"));
    let done = command.output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr);
    assert_eq!(done.status.code(), Some(125), "{said}");
    assert!(said.contains("is not a listening SOCK_SEQPACKET socket"), "{said}");
}
