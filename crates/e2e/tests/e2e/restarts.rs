//! The monitor is killed, restarted and replaced under load. No request may fail, and within a
//! second new connections must use shared memory again.
//!
//! `FASTSOCKET_RESTARTS=60` restarts it 60 times, once a second (`make restarts TIME=60`).

use fsocket_e2e as e2e;
use fsocket_testkit::host::Accel;
use fsocket_testkit::{helper, need, net, stock_mode, Host, Proc, PYTHON};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

pub const LIMIT: Duration = Duration::from_secs(60);
/// Time between the kill of a monitor and the start of the next one.
const AWAY: Duration = Duration::from_millis(100);
const SECOND: Duration = Duration::from_secs(1);

/// Variable with the number of restarts. If it is set, connections must be back within a second.
const TIMES: &str = "FASTSOCKET_RESTARTS";

fn times() -> u32 {
    std::env::var(TIMES).ok().and_then(|n| n.parse().ok()).unwrap_or(5)
}

/// Number of connections over shared memory that each process has opened. `None`: the monitor does
/// not know the process.
fn opened(host: &Host, pids: [u32; 2]) -> [Option<u64>; 2] {
    let processes = host.snapshot().report.map(|r| r.processes).unwrap_or_default();
    pids.map(|pid| processes.iter().find(|p| p.pid == pid)?.counters.get("connect_shm").copied())
}

/// Waits until each process, which this monitor did not know, has opened a connection. Returns the
/// time that this took.
#[track_caller]
fn accelerated_again(host: &Host, load: &mut Load) -> Duration {
    let began = Instant::now();
    let mut first = [None; 2];
    let done = net::wait_until(LIMIT, || {
        assert!(load.client.running(), "the load has ended:\n{}", load.client.stderr());
        opened(host, load.opens()).into_iter().zip(&mut first).fold(true, |all, (now, first)| {
            *first = first.or(now);
            all & now.zip(*first).is_some_and(|(now, first)| now > first)
        })
    });
    assert!(done.is_ok(), "never accelerated again\n{:#?}", host.snapshot().report);
    began.elapsed()
}

pub struct Load {
    _servers: [Proc; 2],
    haproxy: Proc,
    pub client: Proc,
}

impl Load {
    /// Starts redis, nginx, and haproxy in front of nginx, with clients.
    #[track_caller]
    pub fn start(host: &Host) -> Load {
        let (redis, redis_port) = e2e::redis(host, Accel);
        let (nginx, nginx_port) = e2e::nginx(host, Accel);
        let page = host.file("www/page", e2e::noise(1, 3000));
        let port = net::free_port();
        let config = format!(
            "global\n  nbthread 1\ndefaults\n  mode http\n  retries 0\n  timeout connect 5s\n  timeout client 20s\n  \
             timeout server 20s\nfrontend f\n  bind 127.0.0.1:{port}\n  default_backend b\nbackend b\n  \
             http-reuse never\n  server s 127.0.0.1:{nginx_port}\n"
        );
        let config = host.file("haproxy.cfg", config).display().to_string();
        let program = fsocket_testkit::find_program("haproxy").expect("haproxy");
        let haproxy = host.server(Accel, "haproxy", port, program, &["-db", "-f", &config]);
        let path = helper("restarts.py").display().to_string();
        let args = [path, redis_port.to_string(), port.to_string(), page.display().to_string()];
        let mut client = host.start(Accel, "load", PYTHON, &args.each_ref().map(String::as_str));
        client.wait_stdout("started", LIMIT);
        Load { _servers: [redis, nginx], haproxy, client }
    }

    /// Pids of the processes that open connections.
    pub fn opens(&self) -> [u32; 2] {
        [self.client.pid(), self.haproxy.pid()]
    }

    /// Ends the load, and asserts that nothing has failed.
    #[track_caller]
    pub fn end(self) {
        self.client.signal(libc::SIGTERM);
        let done = self.client.finish(LIMIT).success();
        eprintln!("{}", done.stdout.trim());
    }
}

/// Only one load may run at a time, because times are measured.
static ALONE: Mutex<()> = Mutex::new(());

/// Runs the load while `restart` ends the monitor and starts another one.
#[track_caller]
fn restarted(host: &mut Host, restart: impl Fn(&mut Host)) {
    restarted_often(host, times(), restart);
}

#[track_caller]
fn restarted_often(host: &mut Host, times: u32, restart: impl Fn(&mut Host)) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let _ = (need!("redis-server"), need!("nginx"), need!("haproxy"));
    if stock_mode() {
        return eprintln!("SKIPPED: there is no monitor");
    }
    // SAFETY: `geteuid` takes no arguments.
    if unsafe { libc::geteuid() } != 0 {
        return eprintln!("SKIPPED: needs root for a monitor of all users");
    }
    let mut load = Load::start(host);
    let mut took = Vec::new();
    for _ in 0..times {
        let began = Instant::now();
        restart(host);
        took.push(accelerated_again(host, &mut load));
        std::thread::sleep(SECOND.saturating_sub(began.elapsed()));
    }
    let all = host.snapshot();
    load.end();
    let (longest, sum) = (took.iter().max().copied().unwrap_or_default(), took.iter().sum::<Duration>());
    eprintln!("{} restarts, accelerated again after {:?}, at most {longest:?}", took.len(), sum / took.len() as u32);
    // If the machine is busy with other tests, a longer limit applies.
    assert!(longest <= if std::env::var_os(TIMES).is_some() { SECOND } else { LIMIT }, "{took:?}");
    assert_eq!(all.total("hostile_peer"), 0, "{:?}", all.report);
}

/// A monitor as on a production system: for all users, in two processes. (nginx's workers run as
/// another user.)
pub fn system() -> Host {
    Host::for_all_users("share = [[\"root\", \"www-data\", \"nobody\"]]\n")
}

fn kill(host: &mut Host) {
    host.kill_monitor();
    std::thread::sleep(AWAY);
    host.start_monitor();
}

#[test]
fn killed() {
    restarted(&mut system(), kill);
}

/// Servers and clients start before the first monitor.
#[test]
fn started_before_the_monitor() {
    let mut host = system();
    host.kill_monitor();
    let _ = std::fs::remove_file(host.socket());
    restarted_often(&mut host, 1, Host::start_monitor);
}

#[test]
fn stopped_in_good_order() {
    restarted(&mut system(), |host| {
        let monitor = host.monitor().expect("a monitor");
        monitor.signal(libc::SIGTERM);
        net::wait_until(LIMIT, || !monitor.running()).expect("its end");
        host.kill_monitor();
        host.start_monitor();
    });
}

fn starts(monitor: &Proc) -> usize {
    monitor.stderr().matches("(ABI ").count()
}

#[test]
fn told_to_read_its_configuration_again() {
    restarted(&mut system(), |host| {
        let monitor = host.monitor().expect("a monitor");
        let before = starts(monitor);
        monitor.signal(libc::SIGHUP);
        net::wait_until(LIMIT, || starts(monitor) > before).expect("it begins again");
    });
}

/// A changed configuration file takes effect at once, but not if it has errors.
#[test]
fn a_configuration_is_read_again() {
    if stock_mode() {
        return eprintln!("SKIPPED: there is no monitor");
    }
    let mut host = Host::for_all_users("[[rule]]\naction = \"allow\"\n");
    let (_server, port) = e2e::echo_server(&host, Accel, "epoll", "127.0.0.1");
    let args = ["seq", &port.to_string(), "--connections", "3", "--bytes", "100"];
    let denied = |host: &Host| {
        let before = host.snapshot();
        e2e::python(host, Accel, 60, "echo_client.py", &args);
        let delta = host.snapshot().since(&before);
        let denied = delta.get("fallback.policy") > 0;
        assert_eq!(delta.get("connect_shm"), if denied { 0 } else { 3 }, "{delta}");
        denied
    };
    assert!(!denied(&host));
    for (settings, denies) in [("nonsense", false), ("[[rule]]\naction = \"deny\"\n", true)] {
        host.file("fastsocketd.toml", settings);
        let monitor = host.monitor().expect("a monitor");
        let before = starts(monitor);
        monitor.signal(libc::SIGHUP);
        let seen = net::wait_until(LIMIT, || match denies {
            false => monitor.stderr().contains("not reloaded"),
            true => starts(monitor) > before,
        });
        assert!(seen.is_ok(), "{settings}");
        // The server must find the new monitor first.
        let known = net::wait_until(LIMIT, || host.snapshot().report.is_some_and(|r| !r.listeners.is_empty()));
        assert!(known.is_ok(), "{settings}");
        assert_eq!(denied(&host), denies, "{settings}");
    }
}
