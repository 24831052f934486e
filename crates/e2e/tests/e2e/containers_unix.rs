//! Unix sockets on a volume that two containers share. Their connections move to shared memory
//! where the policy allows that. Otherwise they stay in the kernel, and a reason is counted.

use fsocket_e2e::containers::behind;
use fsocket_testkit::host::{Accel, Side, Stock};
use fsocket_testkit::netns::{Containers, NetHost};
use fsocket_testkit::{need, need_hosts, net, stock_mode, Delta, Host, Proc};
use std::path::Path;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);
const CLIENTS: i128 = 5;
/// Another user than the server's.
const ALICE: [&str; 4] = ["setpriv", "--reuid=54321", "--regid=54321", "--clear-groups"];

/// A redis server in a container, its socket, and the monitor on the host.
struct Volume {
    redis: Proc,
    path: String,
    host: Host,
    net: Containers,
}

impl Volume {
    fn new(server: Side, monitor: impl FnOnce(&NetHost) -> Host) -> Volume {
        let net = Containers::new().expect("containers");
        let host = monitor(&net.host);
        let path = host.path().join("redis.sock").display().to_string();
        let program = fsocket_testkit::find_program("redis-server").expect("redis");
        let mut command = host.command(server, program);
        command.args(["--port", "0", "--unixsocket", &path, "--unixsocketperm", "777", "--save", ""]);
        net.server.place(&mut command);
        let redis = Proc::spawn(host.logs(), "redis", command);
        let listens = || net.server.within(|| net::unix_listens(Path::new(&path)));
        net::wait_until(LIMIT, listens).expect("it listens");
        Volume { redis, path, host, net }
    }

    /// Runs a client in the other container, started by `starter`. Returns the changes of the
    /// counters.
    fn ask(&self, starter: &[&str]) -> Delta {
        let before = self.host.snapshot();
        let program = fsocket_testkit::find_program("redis-benchmark").expect("redis").display().to_string();
        let clients = CLIENTS.to_string();
        let load = [&program, "-s", &self.path, "-n", "6000", "-c", &clients, "-t", "set,get", "-q"];
        let command = behind(&self.host, &self.net.client, starter, &load);
        let done = Proc::spawn(self.host.logs(), "benchmark", command).finish(LIMIT).success();
        assert!(done.stdout.contains("GET:"), "{}", done.stdout);
        self.host.snapshot().since(&before)
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        self.redis.signal(libc::SIGTERM);
    }
}

/// Asserts that connections moved to shared memory. The benchmark opens new connections for each
/// command.
#[track_caller]
fn over(delta: &Delta) {
    if !stock_mode() {
        assert!(delta.get("path_upgrade") >= 2 * CLIENTS && delta.get("hostile_peer") == 0, "{delta}");
    }
}

#[track_caller]
fn in_the_kernel(delta: &Delta, counted: &str) {
    if !stock_mode() {
        assert!(delta.get("path_upgrade") == 0 && delta.get(counted) >= CLIENTS, "{counted}: {delta}");
    }
}

#[test]
fn redis_on_a_shared_volume() {
    need_hosts!();
    let _ = (need!("redis-server"), need!("redis-benchmark"));
    over(&Volume::new(Accel, Host::on).ask(&["env"]));
    in_the_kernel(&Volume::new(Stock, Host::on).ask(&["env"]), "fallback.namespace");
}

/// Two users may share memory between containers if the administrator has named both. Root of a
/// user namespace counts as the user outside, even if the network namespace belongs to that user
/// namespace. The kernel tells the monitor which sockets are connected, and root of a container
/// cannot forge that.
#[test]
fn other_users_and_user_namespaces() {
    need_hosts!();
    let _ = (need!("redis-server"), need!("redis-benchmark"));
    let namespace = [&ALICE[..], &["unshare", "--user", "--map-root-user"]].concat();
    let rootless = [&namespace[..], &["--net"]].concat();
    for shared in [false, true] {
        let settings = if shared { "share = [[54321, 0]]\n" } else { "" };
        let volume = Volume::new(Accel, |place| Host::for_all_users_on(place, settings));
        for starter in [&ALICE[..], &namespace, &rootless] {
            let delta = volume.ask(starter);
            match shared {
                true => over(&delta),
                false => in_the_kernel(&delta, "fallback.other_user"),
            }
        }
    }
}

#[test]
fn a_rule_denies_the_path() {
    need_hosts!();
    let _ = (need!("redis-server"), need!("redis-benchmark"));
    // The monitor reads the rules before the directory of this host exists, so the path is a fixed
    // one.
    let rule = "[[rule]]\naction = \"deny\"\npath = \"/\"\n";
    let volume = Volume::new(Accel, |place| Host::for_all_users_on(place, rule));
    in_the_kernel(&volume.ask(&["env"]), "fallback.policy");
}
