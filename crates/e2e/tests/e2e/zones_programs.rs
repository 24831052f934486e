//! Local listen sockets under real programs. Clients have no library, so they use the kernel.

use fsocket_e2e as e2e;
use fsocket_e2e::need_two_cpus;
use fsocket_e2e::zones::{accepted, counter, pin, selected};
use fsocket_testkit::host::{Accel, Stock};
use fsocket_testkit::workers::children;
use fsocket_testkit::{need, net, stock_mode, Finished, Host, Proc};
use std::time::Duration;

const NO_SHM: (&str, &str) = ("FASTSOCKET_DISABLE", "shm");

/// nginx with two pinned workers; `events` and `main` go into its configuration.
#[track_caller]
fn nginx(host: &Host, main: &str, events: &str, env: &[(&str, &str)]) -> (Proc, u16) {
    nginx_listening(host, main, events, "", env)
}

/// The same, with `how` appended to the `listen` directive.
#[track_caller]
fn nginx_listening(host: &Host, main: &str, events: &str, how: &str, env: &[(&str, &str)]) -> (Proc, u16) {
    let port = net::free_port();
    let root = e2e::document_root(host);
    let dir = host.path().display();
    host.file("nginx/placeholder", "");
    let temp: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .iter()
        .map(|n| format!("  {n}_temp_path {dir}/nginx/{n};\n"))
        .collect();
    let config = format!(
        "worker_processes 2;\nworker_cpu_affinity auto;\npid {dir}/nginx/pid;\nerror_log {dir}/nginx/error.log info;\n\
         {main}\nevents {{ worker_connections 1024; {events} }}\nhttp {{\n  access_log off;\n{temp}  \
         server {{ listen 127.0.0.1:{port} {how}; root {}; }}\n}}\n",
        root.display()
    );
    let config = host.file("nginx/nginx.conf", config).display().to_string();
    let prefix = host.path().join("nginx").display().to_string();
    let mut command = host.command(Accel, fsocket_testkit::find_program("nginx").expect("nginx"));
    command.args(["-p", &prefix, "-c", &config]).envs(env.iter().copied());
    let server = Proc::spawn(host.logs(), "nginx", command);
    let up = net::wait_until(Duration::from_secs(60), || net::kernel_sockets(port, "0A") > 0);
    assert!(up.is_ok() && net::kernel_sockets(port, "0A") > 0, "nginx does not listen: {}", server.stderr());
    (server, port)
}

/// Makes requests from each CPU for about a tenth of a second; all must be answered.
#[track_caller]
fn ab_from_both(host: &Host, port: u16, n: u64) {
    let ab = fsocket_testkit::find_program("ab").expect("ab");
    for cpu in 0..2 {
        std::thread::scope(|s| {
            s.spawn(|| {
                pin(cpu);
                let url = format!("http://127.0.0.1:{port}/64");
                let n_text = n.to_string();
                // No connection may wait for long, either.
                let args = ["-q", "-s", "5", "-n", &n_text, "-c", "8", &url];
                let done = host.run(Stock, "ab", 60, &ab, &args).success();
                e2e::ab_clean(&done.stdout);
                assert_eq!(e2e::ab_number(&done.stdout, "Complete requests:"), n);
            })
            .join()
            .expect("ab");
        });
    }
}

/// A host where flow groups do not move. In these tests one CPU alone receives for a while, and
/// after two seconds half of its groups would move to the other CPU (docs/network.md).
#[track_caller]
fn strict() -> Host {
    Host::configured(None, "[balance]\nmigrate = false\n")
}

/// Waits until both workers have their own socket beside the one that the program made.
#[track_caller]
fn each_has_a_socket(port: u16, server: &Proc) {
    let sockets = || net::kernel_sockets(port, "0A");
    let wanted = || if stock_mode() { sockets() > 0 } else { sockets() == 3 };
    let both = net::wait_until(Duration::from_secs(60), wanted).is_ok();
    assert!(both, "{} listen sockets: {}", sockets(), server.stderr());
}

/// In both zones, workers must have accepted about `n` connections from their own socket. (If a
/// worker gets no CPU time, the other one takes some of its connections.)
#[track_caller]
fn assert_local(host: &Host, n: u64) {
    if stock_mode() {
        return eprintln!("PATH NOT ASSERTED: stock mode");
    }
    let zones = host.zones();
    for cpu in 0..2 {
        let [local, global] = ["local", "global"].map(|from| accepted(&zones, cpu, from));
        assert!(local >= n * 3 / 4 && global == 0, "zone {cpu}: {zones:#}");
    }
}

/// Runs ab while `disturb` is called `times` times.
#[track_caller]
fn ab_while(host: &Host, port: u16, times: u64, options: &[&str], disturb: impl Fn()) -> Finished {
    let ab = fsocket_testkit::find_program("ab").expect("ab");
    let (url, seconds) = (format!("http://127.0.0.1:{port}/64"), (times + 1).to_string());
    let args = ["-q", "-t", &seconds, "-n", "1000000", "-c", "16", &url];
    let mut load = host.start(Stock, "ab", ab, &[options, &args].concat());
    for i in 0..times {
        std::thread::sleep(Duration::from_millis(900));
        assert!(load.running(), "ab ended before disturbance {i}: {}", load.stderr());
        disturb();
    }
    load.finish(Duration::from_secs(60)).success()
}

#[test]
fn nginx_serves_each_cpu_from_its_own_queue() {
    need!("nginx");
    need!("ab");
    need_two_cpus!();
    for env in [&[NO_SHM][..], &[]] {
        let host = strict();
        let (nginx, port) = nginx(&host, "daemon off;", "", env);
        each_has_a_socket(port, &nginx);
        let workers = || host.zones()["groups"][0]["workers"].as_array().map_or(0, Vec::len);
        net::wait_until(Duration::from_secs(60), || stock_mode() || workers() == 2).expect("workers");
        ab_from_both(&host, port, 2000);
        assert_local(&host, 2000);
    }
}

#[test]
fn nginx_that_takes_turns_does_not_hang() {
    need!("nginx");
    need!("ab");
    need_two_cpus!();
    let host = Host::new();
    let (_nginx, port) = nginx(&host, "daemon off;", "accept_mutex on;", &[NO_SHM]);
    ab_from_both(&host, port, 1000);
    std::thread::sleep(Duration::from_secs(2));
    // Any worker may hold nginx's accept mutex. No connection may wait in the queue of a worker
    // that does not poll.
    ab_from_both(&host, port, 1000);
}

#[test]
fn nginx_reload_and_killed_workers() {
    need!("nginx");
    need!("ab");
    need_two_cpus!();
    let host = Host::new();
    let (nginx, port) = nginx(&host, "daemon off;", "", &[NO_SHM]);
    let done = ab_while(&host, port, 4, &[], || nginx.signal(libc::SIGHUP));
    e2e::ab_clean(&done.stdout);
    // A worker is killed: only the connections that it had accepted may fail, at most 16 each
    // time.
    let done = ab_while(&host, port, 4, &["-r"], || signal(children(nginx.pid())[0], libc::SIGKILL));
    let failed = e2e::ab_number(&done.stdout, "Failed requests:");
    // ab counts one failed request under up to three headings.
    assert!(failed <= 4 * 16 * 3, "{failed}\n{}", done.stdout);
    ab_from_both(&host, port, 500);
    if !stock_mode() {
        assert!(counter(&host.zones(), "zone_joins") >= 2 + 8 + 4);
    }
}

/// On USR2 a new binary inherits the listen sockets and serves beside the old one; then the old
/// one ends.
#[test]
fn nginx_binary_upgrade_fails_no_request() {
    need!("nginx");
    let ab = need!("ab");
    need_two_cpus!();
    for (listen, sockets, env) in [("", 3, &[NO_SHM][..]), ("", 3, &[]), ("reuseport", 2, &[NO_SHM])] {
        let host = strict();
        // nginx ignores the signal if it runs in the foreground.
        let (_starter, port) = nginx_listening(&host, "daemon on;", "", listen, env);
        let pid_file = host.path().join("nginx/pid");
        let master = || std::fs::read_to_string(&pid_file).ok().and_then(|t| t.trim().parse::<i32>().ok());
        net::wait_until(Duration::from_secs(60), || master().is_some()).expect("it runs");
        let old = master().expect("pid");
        let _end = End(pid_file.clone());
        let listening =
            |n| net::wait_until(Duration::from_secs(60), || stock_mode() || net::kernel_sockets(port, "0A") == n);
        listening(sockets).expect("zones");
        let url = format!("http://127.0.0.1:{port}/64");
        let load = host.start(Stock, "ab", &ab, &["-q", "-t", "3", "-n", "1000000", "-c", "16", &url]);
        std::thread::sleep(Duration::from_millis(700));
        signal(old, libc::SIGUSR2);
        net::wait_until(Duration::from_secs(60), || master().is_some_and(|m| m != old)).expect("the new binary runs");
        std::thread::sleep(Duration::from_millis(500));
        signal(old, libc::SIGQUIT);
        let done = load.finish(Duration::from_secs(60)).success();
        e2e::ab_clean(&done.stdout);
        let gone = || !std::path::Path::new(&format!("/proc/{old}")).exists();
        net::wait_until(Duration::from_secs(60), gone).expect("gone");
        listening(sockets).expect("zones of the new one");
        if stock_mode() {
            continue;
        }
        let before = host.zones();
        ab_from_both(&host, port, 1000);
        let zones = host.zones();
        let since = |kind| selected(&zones, kind) - selected(&before, kind);
        assert!(since("lookups") >= 2000 && since("self") == since("lookups"), "{listen} {env:?}: {zones:#}");
    }
}

fn signal(pid: i32, signal: i32) {
    // SAFETY: `kill` takes no pointers, and the process belongs to this test.
    unsafe { libc::kill(pid, signal) };
}

/// Ends the nginx that a pid file names.
struct End(std::path::PathBuf);
impl Drop for End {
    fn drop(&mut self) {
        for name in ["pid", "pid.oldbin"] {
            let text = std::fs::read_to_string(self.0.with_file_name(name)).unwrap_or_default();
            if let Ok(pid @ 2..) = text.trim().parse() {
                signal(pid, libc::SIGTERM);
                let gone = || !std::path::Path::new(&format!("/proc/{pid}")).exists();
                let _ = net::wait_until(Duration::from_secs(60), gone);
            }
        }
    }
}

#[test]
fn haproxy_threads() {
    let haproxy = need!("haproxy");
    need!("ab");
    need!("nginx");
    need_two_cpus!();
    let host = strict();
    let (_nginx, backend) = e2e::nginx(&host, Stock);
    let port = net::free_port();
    let config = host.file(
        "haproxy.cfg",
        format!(
            "global\n  maxconn 500\n  nbthread 2\n  cpu-map auto:1/1-2 0-1\n  noreuseport\ndefaults\n  mode http\n  \
             timeout connect 5s\n  timeout client 20s\n  timeout server 20s\nfrontend f\n  bind 127.0.0.1:{port}\n  \
             default_backend b\nbackend b\n  server s1 127.0.0.1:{backend}\n"
        ),
    );
    let mut command = host.command(Accel, &haproxy);
    command.args(["-db", "-f", &config.display().to_string()]).env(NO_SHM.0, NO_SHM.1);
    let server = Proc::spawn(host.logs(), "haproxy", command);
    each_has_a_socket(port, &server);
    ab_from_both(&host, port, 1000);
    assert_local(&host, 800);
}

/// Threads begin to watch the listener at the same moment. At every start, each must get a queue.
#[test]
fn each_thread_of_haproxy_has_a_queue_at_every_start() {
    let haproxy = need!("haproxy");
    need_two_cpus!();
    if stock_mode() {
        return eprintln!("PATH NOT ASSERTED: stock mode");
    }
    let host = Host::new();
    for _ in 0..20 {
        let port = net::free_port();
        let config = host.file(
            "haproxy.cfg",
            format!(
                "global\n  maxconn 500\n  nbthread 2\n  cpu-map auto:1/1-2 0-1\n  noreuseport\ndefaults\n  mode http\n  \
                 timeout connect 5s\n  timeout client 20s\n  timeout server 20s\nfrontend f\n  bind 127.0.0.1:{port}\n  \
                 http-request return status 200 content-type text/plain string hello\n"
            ),
        );
        let mut command = host.command(Accel, &haproxy);
        command.args(["-db", "-f", &config.display().to_string()]).env(NO_SHM.0, NO_SHM.1);
        let server = Proc::spawn(host.logs(), "haproxy", command);
        each_has_a_socket(port, &server);
    }
}

/// haproxy in its default configuration uses SO_REUSEPORT on every socket.
#[test]
fn haproxy_by_default() {
    let haproxy = need!("haproxy");
    need!("ab");
    need_two_cpus!();
    for shards in ["1", "by-thread"] {
        let host = strict();
        let port = net::free_port();
        let config = host.file(
            "haproxy.cfg",
            format!(
                "global\n  maxconn 500\n  nbthread 2\n  cpu-map auto:1/1-2 0-1\ndefaults\n  mode http\n  timeout connect 5s\n  \
                 timeout client 20s\n  timeout server 20s\nfrontend f\n  bind 127.0.0.1:{port} shards {shards}\n  \
                 http-request return status 200 content-type text/plain string hello\n"
            ),
        );
        let mut command = host.command(Accel, &haproxy);
        command.args(["-db", "-f", &config.display().to_string()]).env(NO_SHM.0, NO_SHM.1);
        let mut server = Proc::spawn(host.logs(), "haproxy", command);
        let up = || !server.running() || net::kernel_sockets(port, "0A") > 0;
        net::wait_until(Duration::from_secs(60), up).expect("up");
        assert!(server.running(), "{}", server.stderr());
        // A thread gets its queue when it first has to wait.
        for _ in 0..10 {
            ab_from_both(&host, port, 1000);
            if stock_mode() || counter(&host.zones(), "zone_joins") >= 2 {
                break;
            }
        }
        if !stock_mode() {
            let before = host.zones();
            ab_from_both(&host, port, 1000);
            let zones = host.zones();
            // All connections since both threads wait. (ab opens some more than it uses.)
            let since = |kind| selected(&zones, kind) - selected(&before, kind);
            assert!(since("lookups") >= 2000 && since("self") == since("lookups"), "shards {shards}: {zones:#}");
            assert_eq!(counter(&zones, "fallback.zone_shared"), 0, "{zones:#}");
        }
    }
}

#[test]
fn nginx_reuseport() {
    need!("nginx");
    need!("ab");
    need_two_cpus!();
    let host = strict();
    let (nginx, port) = nginx_listening(&host, "daemon off;", "", "reuseport", &[NO_SHM]);
    ab_from_both(&host, port, 1000);
    let check = |what: &str| {
        let before = host.zones();
        ab_from_both(&host, port, 1000);
        if stock_mode() {
            return;
        }
        let zones = host.zones();
        let since = |kind| selected(&zones, kind) - selected(&before, kind);
        assert!(since("lookups") >= 2000 && since("self") == since("lookups"), "{what}: {zones:#}");
        let both = |z: &_, kind| accepted(z, 0, kind) + accepted(z, 1, kind);
        let by = |kind| both(&zones, kind) - both(&before, kind);
        // The other worker may take connections of a worker that gets no CPU time.
        assert!(by("local") >= 1500 && by("local") + by("stolen") >= 2000, "{what}: {zones:#}");
        assert_eq!(net::kernel_sockets(port, "0A"), 2, "{what}: nothing was made beside them");
    };
    check("started");
    let done = ab_while(&host, port, 3, &[], || nginx.signal(libc::SIGHUP));
    e2e::ab_clean(&done.stdout);
    check("after reloads");
    signal(children(nginx.pid())[0], libc::SIGKILL);
    net::wait_until(Duration::from_secs(60), || children(nginx.pid()).len() == 2).expect("a new worker");
    ab_from_both(&host, port, 200);
    check("after a kill");
}

#[test]
fn lighttpd_workers() {
    let lighttpd = need!("lighttpd");
    need!("ab");
    need_two_cpus!();
    let host = strict();
    let port = net::free_port();
    let root = e2e::document_root(&host);
    let config = host.file(
        "lighttpd.conf",
        format!(
            "server.document-root = \"{}\"\nserver.port = {port}\nserver.bind = \"127.0.0.1\"\n\
             server.max-worker = 2\nserver.event-handler = \"linux-sysepoll\"\n",
            root.display()
        ),
    );
    let mut command = host.command(Accel, &lighttpd);
    command.args(["-D", "-f", &config.display().to_string()]).env(NO_SHM.0, NO_SHM.1).env("FASTSOCKET_PIN", "auto");
    let server = Proc::spawn(host.logs(), "lighttpd", command);
    each_has_a_socket(port, &server);
    ab_from_both(&host, port, 1000);
    assert_local(&host, 900);
    if !stock_mode() {
        // The workers did not pin themselves, and there is one for each CPU, so the library must
        // have pinned them.
        for pid in children(server.pid()) {
            let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("status");
            let list =
                status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:")).expect("affinity").trim().to_owned();
            assert!(list.parse::<u32>().is_ok(), "worker {pid} may run on {list}");
        }
    }
}

#[test]
fn a_taken_port_is_refused_as_stock() {
    let nginx = need!("nginx");
    let host = Host::new();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("address").port();
    let config = host.file(
        "nginx.conf",
        format!("daemon off;\nerror_log stderr;\nevents {{}}\nhttp {{ server {{ listen 127.0.0.1:{port}; }} }}\n"),
    );
    let args = ["-c", &config.display().to_string(), "-g", &format!("pid {}/pid;", host.path().display())];
    let done = host.run(Accel, "nginx", 60, nginx, &args);
    assert_eq!(done.code, Some(1), "{}", done.stderr);
    assert!(done.stderr.contains("98: Address already in use"), "{}", done.stderr);
}
