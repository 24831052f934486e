//! Checks what `make install` installs: programs that find each other, a unit that systemd
//! accepts, and a monitor that works with the capabilities of that unit.

use fsocket_e2e as e2e;
use fsocket_testkit::host::Accel;
use fsocket_testkit::{artifacts, find_program, helper, stock_mode, workspace, Finished, Host, Proc, PYTHON};
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Users that have no name on this machine.
const ALICE: u32 = 54321;
const BOB: u32 = 54322;
/// Capabilities by number, with their names in systemd.
const CAPABILITIES: [(i32, &str); 8] = [
    (5, "CAP_KILL"),
    (6, "CAP_SETGID"),
    (7, "CAP_SETUID"),
    (8, "CAP_SETPCAP"),
    (10, "CAP_NET_BIND_SERVICE"),
    (12, "CAP_NET_ADMIN"),
    (38, "CAP_PERFMON"),
    (39, "CAP_BPF"),
];

#[track_caller]
fn run(host: &Host, name: &str, command: Command) -> Finished {
    Proc::spawn(host.logs(), name, command).finish(Duration::from_secs(60))
}

/// Runs `install.sh` with a root directory below this host's directory.
#[track_caller]
fn make(host: &Host, what: &str, pages: &Path, agent: &Path) -> PathBuf {
    let root = host.path().join("root");
    let mut command = Command::new(workspace().join("packaging/install.sh"));
    command.arg(what).env("DESTDIR", &root).env("PREFIX", "/opt/fs");
    command.env("ARTIFACTS", artifacts::dir()).env("PAGES", pages).env("AGENT", agent).env("NO_STRIP", "1");
    run(host, what, command).success();
    root
}

fn files(root: &Path) -> Vec<PathBuf> {
    let mut command = Command::new("find");
    let output = command.arg(root).args(["-type", "f"]).output().expect("find");
    String::from_utf8_lossy(&output.stdout).lines().map(PathBuf::from).collect()
}

/// The text of the unit, with the path of the monitor replaced by the one of this build.
fn unit() -> String {
    let text = std::fs::read_to_string(workspace().join("packaging/fastsocketd.service")).expect("unit");
    text.replace("/usr/sbin/fastsocketd", &artifacts::monitor().display().to_string())
}

#[test]
fn what_is_installed_works_and_goes_again() {
    if stock_mode() {
        return eprintln!("SKIPPED: stock mode has nothing to install");
    }
    let host = Host::new();
    let pages = host.path().join("pages");
    let mut command = Command::new(artifacts::cli());
    command.arg("pages").arg(&pages);
    run(&host, "pages", command).success();
    let page = std::fs::read_to_string(pages.join("fastsocket-run.1")).expect("a page");
    assert!(page.contains("Exit status") && page.contains("FASTSOCKET_SOCKET"), "{page}");
    host.file("pages/fastsocketd.8", "");

    // An agent with RDMA is installed only if it has been built.
    let root = make(&host, "install", &pages, Path::new("/nonexistent"));
    let agent =
        [root.join("opt/fs/sbin/fastsocket-agent"), root.join("opt/fs/lib/systemd/system/fastsocket-agent.service")];
    assert!(!agent[0].exists() && !agent[1].exists());
    make(&host, "install", &pages, &artifacts::agent());
    let text = std::fs::read_to_string(&agent[1]).expect("unit");
    let there =
        |named: &str| Some(root.join(text.lines().find_map(|l| l.strip_prefix(named))?.trim_start_matches('/')));
    assert_eq!(there("ExecStart="), Some(agent[0].clone()), "{text}");
    assert!(there("Environment=LD_PRELOAD=").is_some_and(|library| library.exists()), "{text}");
    let installed = root.join("opt/fs/bin/fastsocket");
    let mut command = Command::new(&installed);
    command.args(["run", "-v", "--require", "--", "/bin/echo", "ran"]).env("FASTSOCKET_SOCKET", host.socket());
    let done = run(&host, "installed", command).success().says("ran");
    assert!(done.stderr.contains("root/opt/fs/lib/fastsocket/libfsocket.so"), "{done:?}");
    let text = std::fs::read_to_string(root.join("opt/fs/lib/systemd/system/fastsocketd.service")).expect("unit");
    assert!(text.contains("ExecStart=/opt/fs/sbin/fastsocketd\n"), "{text}");
    let mut check = Command::new(root.join("opt/fs/sbin/fastsocketd"));
    check.arg("--check").arg("--config").arg(root.join("etc/fastsocket/fastsocketd.toml"));
    run(&host, "check", check).success();

    // If the package is removed, enabled units must not keep pointing to the missing library.
    let mut enable = Command::new(&installed);
    std::fs::create_dir_all(root.join("usr/lib/systemd/system")).expect("directory");
    let nginx = host.file("root/usr/lib/systemd/system/nginx.service", "[Service]\n");
    enable.args(["enable", "nginx", "--root"]).arg(&root);
    run(&host, "enable", enable).success();
    let drop_in = root.join("etc/systemd/system/nginx.service.d/fastsocket.conf");
    let text = std::fs::read_to_string(&drop_in).expect("a drop-in");
    assert!(text.contains("/opt/fs/lib/fastsocket/libfsocket.so"), "{text}");
    make(&host, "uninstall", &pages, &artifacts::agent());
    assert_eq!(files(&root), [nginx]);
}

#[test]
fn systemd_understands_the_unit() {
    let Some(analyze) = find_program("systemd-analyze") else {
        return eprintln!("SKIPPED: systemd-analyze is not installed");
    };
    let host = Host::new();
    let file = host.file("fastsocketd.service", unit());
    let mut command = Command::new(analyze);
    command.args(["verify", "--man=no"]).arg(file);
    let done = run(&host, "verify", command).success();
    assert_eq!(done.stdout + &done.stderr, "");
}

/// Drops capabilities before the program starts, as systemd does.
fn bound(command: &mut Command) {
    let unit = unit();
    let line = unit.lines().find_map(|l| l.strip_prefix("CapabilityBoundingSet=")).expect("a bounding set").to_owned();
    let number = |name: &str| CAPABILITIES.iter().find(|(_, n)| *n == name).unwrap_or_else(|| panic!("{name}")).0;
    let kept: Vec<i32> = line.split_whitespace().map(number).collect();
    // SAFETY: between fork and exec the closure makes system calls only; it does not allocate,
    // because the list was made before.
    unsafe {
        command.pre_exec(move || {
            for capability in (0..64).filter(|c| !kept.contains(c)) {
                libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0);
            }
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
            Ok(())
        })
    };
}

/// Two users share memory, a connection moves to the kernel (the broker makes its sockets), and
/// the monitor tells the service manager that it is ready.
#[test]
fn the_capabilities_of_the_unit_are_enough() {
    // SAFETY: `geteuid` takes no arguments.
    if stock_mode() || unsafe { libc::geteuid() } != 0 {
        return eprintln!("SKIPPED: needs root, and the library");
    }
    let directory = Host::stopped();
    let manager = directory.path().join("notify");
    let heard = UnixDatagram::bind(&manager).expect("socket");
    heard.set_read_timeout(Some(Duration::from_secs(10))).expect("limit");
    // With a rule in its settings, the monitor also reads the host's policies.
    let settings = format!("share = [[{ALICE}, {BOB}]]\n[[rule]]\naction = \"deny\"\nport = 1\n");
    let mut host = Host::for_all_users_with(&settings, |command| {
        command.env("NOTIFY_SOCKET", &manager);
        bound(command);
    });
    let mut said = [0; 64];
    let n = heard.recv(&mut said).expect("a word");
    assert_eq!(&said[..n], b"READY=1\n");
    let line = host.monitor().expect("running").stderr();
    assert!(line.lines().count() == 1 && line.contains("net_admin perfmon bpf"), "{line}");

    let path = helper("process_ways.py").display().to_string();
    let as_user = |user: u32, verb: &str, port: u16| {
        let mut command = host.command(Accel, PYTHON);
        command.args([&path, verb, &port.to_string()]).uid(user).gid(user);
        Proc::spawn(host.logs(), verb, command)
    };
    let port = fsocket_testkit::net::free_port();
    let before = host.snapshot();
    let mut server = as_user(ALICE, "serve", port);
    let known = |port: u16| {
        host.snapshot().report.is_some_and(|r| r.listeners.iter().any(|l| l.local.ends_with(&format!(":{port}"))))
    };
    fsocket_testkit::net::wait_until(Duration::from_secs(60), || known(port)).expect("it listens");
    as_user(BOB, "ask", port).finish(Duration::from_secs(60)).success().says("ok");
    server.wait_stdout("ok", Duration::from_secs(60));
    let delta = host.snapshot().since(&before);
    assert!(delta.get("connect_shm") > 0 && delta.get("path_switch") > 0, "{delta}");
    assert_eq!(delta.get("fallback.switch"), 0, "{delta}");
    assert_eq!(delta.get("fallback.kernel_first"), 0, "it cannot look: {delta}");

    // For a worker's local listen socket the monitor must load a BPF program.
    let (_server, port) = e2e::echo_server(&host, Accel, "threaded", "127.0.0.1");
    e2e::python(&host, Accel, 60, "echo_client.py", &["seq", &port.to_string(), "--connections", "3"]);

    // The broker must be able to end its front, which runs as another user by then.
    let monitor = host.monitor().expect("running");
    // SAFETY: `kill` takes no pointers, and the process is a child of this one.
    unsafe { libc::kill(monitor.pid() as libc::pid_t, libc::SIGTERM) };
    fsocket_testkit::net::wait_until(Duration::from_secs(60), || !monitor.running()).expect("it ends");
    assert_eq!(monitor.stderr().lines().count(), 1, "{}", monitor.stderr());
}
