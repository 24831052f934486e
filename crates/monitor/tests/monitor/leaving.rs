//! Descriptors, threads and memory that the system monitor holds for a user. All of it must be
//! bounded while the user is there, and gone some time after. These tests look at the front, the
//! process that talks to clients.

use crate::closing::{linger, switched};
use crate::rights::as_user;
use crate::support::*;
use fsocket_monitor::descriptor::is_received;
use fsocket_monitor::wire;
use fsocket_proto::raw::Packet;
use fsocket_proto::report::Report;
use fsocket_proto::{request, Payload};
use rustix::fd::AsFd;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const GREEDY: u32 = 70_001;

struct System {
    broker: Child,
    socket: PathBuf,
    _dir: tempfile::TempDir,
}

impl Drop for System {
    fn drop(&mut self) {
        // The monitor's unprivileged process (the front) exits when the privileged one (the broker) does.
        let _ = self.broker.kill();
        let _ = self.broker.wait();
    }
}

/// A cgroup that limits the number of tasks. `None`: this machine has no such controller.
struct Tasks(PathBuf);

impl Tasks {
    fn new() -> Option<Tasks> {
        let name = format!("fastsocket-test-{}", std::process::id());
        let made = ["/sys/fs/cgroup/pids", "/sys/fs/cgroup"].map(|root| Tasks(PathBuf::from(root).join(&name)));
        made.into_iter().find(|t| std::fs::create_dir(&t.0).is_ok() && t.0.join("pids.max").exists())
    }

    fn write(&self, file: &str, text: &str) {
        std::fs::write(self.0.join(file), text).unwrap();
    }
}

impl Drop for Tasks {
    fn drop(&mut self) {
        wait_until("the cgroup is empty", || !self.0.exists() || std::fs::remove_dir(&self.0).is_ok());
    }
}

impl System {
    /// Starts a monitor with this limit of descriptors. `None`: the test does not run as root.
    fn start(test: &str, descriptors: u64) -> Option<System> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIPPED: {test}: not root");
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        let (socket, file) = (dir.path().join("monitor.sock"), dir.path().join("monitor.toml"));
        std::fs::write(&file, "[[rule]]\naction = \"allow\"\n").unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_fastsocketd"));
        command.arg("--config").arg(file).arg("--socket").arg(&socket).stderr(Stdio::null());
        // SAFETY: between fork and exec, the closure makes only system calls.
        unsafe {
            command.pre_exec(move || {
                let limit = libc::rlimit { rlim_cur: descriptors, rlim_max: descriptors };
                match libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) {
                    0 => Ok(()),
                    _ => Err(std::io::Error::last_os_error()),
                }
            })
        };
        let system = System { broker: command.spawn().unwrap(), socket, _dir: dir };
        wait_until("the front serves", || {
            system.socket.exists() && system.front().is_some_and(|pid| status(pid, "Seccomp:") == 2)
        });
        Some(system)
    }

    fn front(&self) -> Option<i32> {
        let children = format!("/proc/{0}/task/{0}/children", self.broker.id());
        std::fs::read_to_string(children).ok()?.split_whitespace().next()?.parse().ok()
    }

    fn stranger(&self) -> Proc {
        let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let fd = fd.unwrap();
        rustix::net::connect(&fd, &SocketAddrUnix::new(&self.socket).unwrap()).unwrap();
        Proc::on(fd)
    }

    fn process(&self) -> Proc {
        let mut p = self.stranger();
        p.hello();
        p
    }

    fn report(&self) -> Report {
        let (answer, fd) = self.stranger().request(Packet { arg2: 1, ..Packet::new(request::Report::KIND) }, None);
        let mut text = vec![0; answer.arg0 as usize];
        rustix::io::pread(fd.unwrap(), &mut text, 0).unwrap();
        serde_json::from_slice(&text).unwrap()
    }

    fn held(&self, uid: u32) -> u64 {
        self.report().held.iter().find(|h| h.uid == uid).map_or(0, |h| h.descriptors)
    }

    fn of_front(&self, what: &str) -> u64 {
        status(self.front().unwrap(), what)
    }
}

/// A number from /proc/PID/status.
fn status(pid: i32, what: &str) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = text.lines().find_map(|l| l.strip_prefix(what));
    line.and_then(|l| l.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

/// The kernel limits the descriptors that the monitor has sent and no process has received. A user
/// with as many processes as allowed, none of which receives, must not use up that limit.
#[test]
fn what_a_user_does_not_receive_is_sent_to_others() {
    let Some(system) = System::start("what_a_user_does_not_receive_is_sent_to_others", 2048) else { return };
    // Each answer has a descriptor.
    let ask = |_| {
        as_user(GREEDY, || {
            let p = system.stranger();
            for _ in 0..100 {
                let asked = Packet { arg2: 1, seq: 1, ..Packet::new(request::Report::KIND) };
                // (The monitor drops processes beyond the user's share.)
                let _ = wire::send(p.fd.as_fd(), &asked.into(), None);
            }
            p
        })
    };
    // Waits until the monitor reads no more of these requests.
    let settles = |all: &[Proc]| {
        let mut before = usize::MAX;
        wait_until("as much is read as ever will be", || {
            (0..20).for_each(|_| drop(system.process()));
            std::thread::sleep(Duration::from_millis(100));
            let now = all.iter().filter(|p| is_received(p.fd.as_fd())).count();
            std::mem::replace(&mut before, now) == now
        });
    };
    let mut greedy: Vec<Proc> = (0..200).map(ask).collect();
    settles(&greedy);
    assert!(system.held(GREEDY) > 500, "it has its share");
    // The monitor drops these processes, but their unreceived messages stay in the sockets.
    greedy.iter().for_each(|p| _ = rustix::io::write(&p.fd, b"no message"));
    greedy.extend((0..200).map(ask));
    settles(&greedy);
    drop(greedy);
    wait_until("nothing counts for it", || system.held(GREEDY) == 0);
}

/// The monitor can start no thread while a user's processes end (`pids.max`, like TasksMax of a
/// unit). It must close the user's descriptors as soon as it gets a thread.
#[test]
fn what_waits_for_a_thread_is_closed_when_there_is_one() {
    let test = "what_waits_for_a_thread_is_closed_when_there_is_one";
    let Some(tasks) = Tasks::new() else { return eprintln!("SKIPPED: {test}: no cgroup that counts tasks") };
    let Some(system) = System::start(test, 4096) else { return };
    tasks.write("cgroup.procs", &system.front().unwrap().to_string());
    tasks.write("pids.max", "1");
    let (l, _) = listener();
    let greedy = as_user(GREEDY, || {
        let p = system.process();
        let ends: Vec<_> = (0..50)
            .map(|_| {
                let c = TcpStream::connect(l.local_addr().unwrap()).unwrap();
                let (s, _) = l.accept().unwrap();
                linger(&c);
                p.tell(Packet { id: 1, ..Packet::new(request::Unlisten::KIND) }, Some(c.as_fd()));
                s
            })
            .collect();
        (p, ends)
    });
    let (mut p, ends) = greedy;
    as_user(GREEDY, || p.sync());
    drop((p, ends));
    // (Other users are served meanwhile.)
    system.process();
    assert!(system.held(GREEDY) > 0, "there is no thread that closes");
    tasks.write("pids.max", "max");
    wait_until("nothing counts for it", || system.held(GREEDY) == 0);
}

/// Users come, take as much as they can, and go.
#[test]
fn no_memory_and_no_threads_stay_of_users_that_have_gone() {
    let Some(system) = System::start("no_memory_and_no_threads_stay_of_users_that_have_gone", 4096) else { return };
    let round = |uid: u32| {
        let all = as_user(uid, || {
            let (mut s, mut c, l, ch) = acquaint(system.process(), system.process());
            let ends: Vec<_> = (0..40).map(|i| switched(&mut s, &mut c, &ch, i)).collect();
            let others: Vec<_> = (0..20)
                .map(|_| {
                    let mut p = system.process();
                    p.make_arena();
                    let asked = Packet { arg2: 1, seq: 1, ..Packet::new(request::Report::KIND) };
                    (0..60).for_each(|_| _ = wire::send(p.fd.as_fd(), &asked.into(), None));
                    p
                })
                .collect();
            (s, c, l, ch, ends, others)
        });
        assert!(system.held(uid) > 100);
        drop(all);
        wait_until("nothing counts for it", || system.held(uid) == 0);
        (system.of_front("RssAnon:") + system.of_front("RssShmem:"), system.of_front("Threads:"))
    };
    // The first rounds fill caches, and start the threads that stay.
    let before = (0..5).fold((0, 0), |_, i| round(GREEDY + i));
    let after = (5..25).fold((0, 0), |_, i| round(GREEDY + i));
    // In KiB. Each round takes more than this while its processes live.
    assert!(after.0 < before.0 + 256, "{before:?} {after:?}");
    assert!(after.1 <= before.1 + 1, "{before:?} {after:?}");
}
