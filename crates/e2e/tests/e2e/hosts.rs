//! Real servers in one host and clients in another, with a network between them. Each test runs on
//! stock sockets and with zones. The clients are always stock, as clients in the internet are.

use fsocket_e2e as e2e;
use fsocket_testkit::load::{Load, Outcome, Plan};
use fsocket_testkit::netns::{Chain, Receive};
use fsocket_testkit::servers::{self, Way};
use fsocket_testkit::workers::{children, Killed};
use fsocket_testkit::{find_program, need, need_hosts, net, stock_mode, Host, Proc, Side, Snapshot};
use std::net::SocketAddr;
use std::process::Command;
use std::time::Duration;

const CPUS: usize = 2;
const PORT: u16 = 80;

/// Skips the test, with a message, if there are no hosts or if a program that most tests need is
/// missing.
macro_rules! needs {
    () => {
        need_hosts!();
        need!("nginx");
        need!("curl");
        need!("ab");
        need!("wrk");
    };
}

/// The hosts, each with a directory of its own. The middle one has a monitor.
struct Stage {
    client: Host,
    middle: Host,
    backend: Host,
    way: Way,
    before: Snapshot,
    chain: Chain,
}

impl Stage {
    fn new(way: Way) -> Stage {
        let cpus = std::thread::available_parallelism().map_or(1, |n| n.get().min(CPUS));
        let receive = Receive::Threads((0..cpus).collect());
        let chain = Chain::new(CPUS, &receive).expect("hosts");
        let middle = if way.is_ours() { Host::on(&chain.middle) } else { Host::without_monitor(&chain.middle) };
        if way == Way::Steered && !stock_mode() {
            servers::steer(&middle, &chain.middle.interfaces[1].device);
        }
        let client = Host::without_monitor(&chain.client);
        let backend = Host::without_monitor(&chain.backend);
        e2e::document_root(&middle);
        e2e::document_root(&backend);
        let before = if way.is_ours() { middle.snapshot() } else { Snapshot::default() };
        Stage { client, middle, backend, way, before, chain }
    }

    fn front(&self) -> SocketAddr {
        (self.chain.middle_front(), PORT).into()
    }

    fn front6(&self) -> SocketAddr {
        (self.chain.middle_front6(), PORT).into()
    }

    fn back(&self) -> SocketAddr {
        (self.chain.backend_address(), PORT).into()
    }

    /// Runs curl in the client host for files of every size, and compares every byte.
    fn curl(&self, address: SocketAddr) {
        for size in ["0", "1", "64", "1000", "4096", "65536", "1000000", "20000000"] {
            let original = self.backend.path().join("www").join(size);
            e2e::curl_compare(&self.client, Side::Stock, &format!("http://{address}/{size}"), &original, &[]);
        }
    }

    /// Runs ab and wrk in the client host, with one connection per request. Returns the number of
    /// ab's requests, which is a lower bound for all connections.
    fn ab_and_wrk(&self, address: SocketAddr) -> u64 {
        let url = format!("http://{address}/1000");
        let ab = find_program("ab").expect("ab");
        let done = self.client.run(Side::Stock, "ab", 60, ab, &["-q", "-n", "3000", "-c", "20", &url]).success();
        e2e::ab_clean(&done.stdout);
        assert_eq!(e2e::ab_number(&done.stdout, "Complete requests:"), 3000);
        assert_eq!(e2e::ab_number(&done.stdout, "HTML transferred:"), 3000 * 1000);
        let wrk = find_program("wrk").expect("wrk");
        let args = ["-t2", "-c32", "-d1s", "--timeout", "30s", "-H", "Connection: close", &url];
        e2e::wrk_clean(&self.client.run(Side::Stock, "wrk", 60, wrk, &args).success().stdout);
        3000
    }

    /// At least `connections` connections must come from listen sockets with zones, and most of
    /// them from the worker's own socket.
    #[track_caller]
    fn assert_zones(&self, connections: u64) {
        if !self.way.is_ours() || stock_mode() {
            return eprintln!("PATH NOT ASSERTED: {} mode", self.way.name());
        }
        let delta = self.middle.snapshot().since(&self.before);
        let accepted = ["accept_local", "accept_global", "accept_remote", "accept_stolen"].map(|name| delta.get(name));
        assert!(accepted.iter().sum::<i128>() >= connections.into(), "wanted {connections} accepts\n{delta}");
        assert!(accepted[0] * 2 > accepted.iter().sum(), "local accepts are not the most\n{delta}");
        assert!(delta.get("accept_shm") == 0, "shared memory was used\n{delta}");
        let sliced = delta.get("connect_slice");
        assert!(
            self.way != Way::Steered || sliced >= connections.into(),
            "source ports from slices: {sliced}\n{delta}"
        );
    }

    fn load(&self, concurrency: usize) -> Load {
        let body = std::fs::read(self.middle.path().join("www/64")).expect("file");
        Load::start(&Plan::get(self.front(), "/64", &body, concurrency), Some(&self.chain.client), None)
    }
}

fn nginx_serves(way: Way) {
    let stage = Stage::new(way);
    let _nginx = servers::nginx(&stage.middle, way, &[stage.front(), stage.front6()], 2);
    stage.curl(stage.front());
    stage.curl(stage.front6());
    let requests = stage.ab_and_wrk(stage.front()) + stage.ab_and_wrk(stage.front6());
    stage.assert_zones(requests + 16);
}

fn haproxy_serves(way: Way) {
    let stage = Stage::new(way);
    let _nginx = servers::nginx(&stage.backend, Way::Stock, &[stage.back()], 2);
    let _haproxy = servers::haproxy(&stage.middle, way, stage.front(), stage.back(), 2);
    stage.curl(stage.front());
    let requests = stage.ab_and_wrk(stage.front());
    stage.assert_zones(requests + 8);
}

fn lighttpd_serves(way: Way) {
    let stage = Stage::new(way);
    let _lighttpd = servers::lighttpd(&stage.middle, way, stage.front(), 2);
    stage.curl(stage.front());
    let requests = stage.ab_and_wrk(stage.front());
    stage.assert_zones(requests + 8);
}

fn demo_proxies(way: Way, workers: usize) {
    let stage = Stage::new(way);
    let _nginx = servers::nginx(&stage.backend, Way::Stock, &[stage.back()], 2);
    let proxy = ["--proxy", &stage.back().to_string()];
    let _demo = servers::demo(&stage.middle, way, &[stage.front(), stage.front6()], workers, &proxy);
    stage.curl(stage.front());
    stage.curl(stage.front6());
    let requests = stage.ab_and_wrk(stage.front());
    stage.assert_zones(requests + 16);
}

/// Kills a worker five times under load. Only requests that the killed worker had accepted may
/// fail, but none that waited in a queue.
fn workers_are_killed(stage: &Stage, server: &Proc) -> (Outcome, Killed) {
    net::wait_until(Duration::from_secs(60), || children(server.pid()).len() == CPUS).expect("workers");
    let load = stage.load(32);
    let mut killed = Killed::default();
    for _ in 0..5 {
        std::thread::sleep(Duration::from_millis(600));
        killed.kill_oldest(&stage.chain.middle, server.pid(), PORT);
    }
    std::thread::sleep(Duration::from_millis(600));
    let outcome = load.stop();
    assert!(outcome.answered > 200, "a load: {outcome:?}");
    (outcome, killed)
}

fn a_kill_loses_no_queue(way: Way) {
    let stage = Stage::new(way);
    let nginx = servers::nginx(&stage.middle, way, &[stage.front()], CPUS);
    let (outcome, killed) = workers_are_killed(&stage, &nginx);
    assert!(outcome.failures() <= killed.accepted, "nginx: {outcome:?} {killed:?}");
    stage.assert_zones(outcome.answered);
    drop((nginx, stage));

    let stage = Stage::new(way);
    stage.middle.file("www/64", [b'x'; 64]);
    let demo = servers::demo(&stage.middle, way, &[stage.front()], CPUS, &["--quiet"]);
    let (outcome, killed) = workers_are_killed(&stage, &demo);
    assert!(outcome.failures() <= killed.accepted, "demo: {outcome:?} {killed:?}");
    stage.assert_zones(outcome.answered);
}

fn a_reload_fails_no_request(way: Way) {
    let stage = Stage::new(way);
    let mut nginx = servers::nginx(&stage.middle, way, &[stage.front()], CPUS);
    let load = stage.load(32);
    let dir = stage.middle.path().join("nginx");
    for _ in 0..5 {
        std::thread::sleep(Duration::from_millis(600));
        let mut command = Command::new(find_program("nginx").expect("nginx"));
        command.arg("-p").arg(&dir).arg("-c").arg(dir.join("nginx.conf")).arg("-e").arg(dir.join("error.log"));
        command.args(["-s", "reload"]);
        Proc::spawn(stage.middle.logs(), "nginx-reload", command).finish(Duration::from_secs(60)).success();
        assert!(nginx.running(), "nginx ended: {}", nginx.stderr());
    }
    std::thread::sleep(Duration::from_millis(600));
    let outcome = load.stop();
    assert!(outcome.answered > 1000 && outcome.failures() == 0, "{outcome:?}");
    stage.assert_zones(outcome.answered);
}

/// The parent of the demo server holds the listener but never accepts. For a moment no worker
/// accepts, either.
fn a_renewal_fails_no_request(way: Way) {
    let stage = Stage::new(way);
    stage.middle.file("www/64", [b'x'; 64]);
    let demo = servers::demo(&stage.middle, way, &[stage.front()], CPUS, &["--quiet"]);
    let load = stage.load(32);
    for _ in 0..15 {
        std::thread::sleep(Duration::from_millis(300));
        demo.signal(libc::SIGHUP);
    }
    std::thread::sleep(Duration::from_millis(600));
    let outcome = load.stop();
    assert!(outcome.answered > 1000 && outcome.failures() == 0, "{outcome:?}");
    stage.assert_zones(outcome.answered);
}

#[test]
fn stock_nginx_serves() {
    needs!();
    nginx_serves(Way::Stock);
}

#[test]
fn zones_nginx_serves() {
    needs!();
    nginx_serves(Way::Ours);
}

#[test]
fn stock_haproxy_serves() {
    needs!();
    need!("haproxy");
    haproxy_serves(Way::Stock);
}

#[test]
fn zones_haproxy_serves() {
    needs!();
    need!("haproxy");
    haproxy_serves(Way::Ours);
}

#[test]
fn zones_haproxy_serves_steered() {
    needs!();
    need!("haproxy");
    haproxy_serves(Way::Steered);
}

#[test]
fn stock_lighttpd_serves() {
    needs!();
    need!("lighttpd");
    lighttpd_serves(Way::Stock);
}

#[test]
fn zones_lighttpd_serves() {
    needs!();
    need!("lighttpd");
    lighttpd_serves(Way::Ours);
}

#[test]
fn stock_demo_proxies() {
    needs!();
    demo_proxies(Way::Stock, CPUS);
}

#[test]
fn zones_demo_proxies() {
    needs!();
    demo_proxies(Way::Ours, CPUS);
}

#[test]
fn zones_demo_proxies_steered() {
    needs!();
    demo_proxies(Way::Steered, CPUS);
}

#[test]
fn stock_kill_loses_no_shared_queue() {
    needs!();
    a_kill_loses_no_queue(Way::Stock);
}

#[test]
fn zones_kill_loses_no_queue() {
    needs!();
    a_kill_loses_no_queue(Way::Ours);
}

/// Shows that the test can detect a loss: without zones, the queue of a worker's own SO_REUSEPORT
/// socket is lost with the worker.
#[test]
fn stock_reuseport_loses_the_queue_of_a_killed_worker() {
    need_hosts!();
    let stage = Stage::new(Way::Reuseport);
    stage.middle.file("www/64", [b'x'; 64]);
    let demo = servers::demo(&stage.middle, Way::Reuseport, &[stage.front()], CPUS, &["--quiet"]);
    let (outcome, killed) = workers_are_killed(&stage, &demo);
    assert!(killed.queued > 0 && outcome.failures() > killed.accepted, "{outcome:?} {killed:?}");
}

#[test]
fn stock_reload_fails_no_request() {
    needs!();
    a_reload_fails_no_request(Way::Stock);
}

#[test]
fn zones_reload_fails_no_request() {
    needs!();
    a_reload_fails_no_request(Way::Ours);
}

#[test]
fn stock_renewal_fails_no_request() {
    needs!();
    a_renewal_fails_no_request(Way::Stock);
}

#[test]
fn zones_renewal_fails_no_request() {
    needs!();
    a_renewal_fails_no_request(Way::Ours);
}

/// If there are more workers than CPUs, they share zones. If there are fewer, the global socket
/// serves the other CPUs.
#[test]
fn zones_with_more_and_fewer_workers_than_cpus() {
    needs!();
    for workers in [1, 5] {
        let stage = Stage::new(Way::Ours);
        let nginx = servers::nginx(&stage.middle, Way::Ours, &[stage.front()], workers);
        net::wait_until(Duration::from_secs(60), || children(nginx.pid()).len() == workers).expect("workers");
        stage.curl(stage.front());
        stage.ab_and_wrk(stage.front());
        let load = stage.load(32);
        std::thread::sleep(Duration::from_secs(2));
        let outcome = load.stop();
        assert!(outcome.answered > 100 && outcome.failures() == 0, "{workers} workers: {outcome:?}");
    }
}

/// The load tool must count causes correctly: without a server all requests are refused.
#[test]
fn a_load_without_a_server_is_refused() {
    need_hosts!();
    let stage = Stage::new(Way::Stock);
    let load = stage.load(2);
    std::thread::sleep(Duration::from_millis(200));
    let outcome = load.stop();
    assert!(outcome.answered == 0 && outcome.failures() > 0, "{outcome:?}");
    assert_eq!(outcome.failed.keys().collect::<Vec<_>>(), ["connect: refused"]);
}
