//! Programs in different network namespaces of one host: their connections go over to shared memory, whatever
//! addresses they see, and end when the kernel would refuse them.

use fsocket_testkit::host::{Accel, Side, Stock};
use fsocket_testkit::netns::{Containers, NetHost};
use fsocket_testkit::{artifacts, find_program, need_hosts, net, script, stock_mode, Delta, Host, Proc, PYTHON};
use std::net::IpAddr;
use std::process::Command;
use std::time::{Duration, Instant};

const REQUESTS: &str = "800";
const CONNECTIONS: i128 = 6;

struct Pair {
    // Ended first: with it goes what the monitor has pinned.
    _server: Proc,
    host: Host,
    net: Containers,
    port: u16,
    /// Of servers with names.
    named: u16,
}

fn start(host: &Host, side: Side, place: &NetHost, name: &str, args: &[&str]) -> Proc {
    let path = script("apps/containers.py").display().to_string();
    let mut command = host.command(side, PYTHON);
    command.arg(path).args(args);
    place.place(&mut command);
    Proc::spawn(host.logs(), name, command)
}

impl Pair {
    /// A monitor on the host, and a server in its container.
    fn new(server_side: Side, address: &str) -> Pair {
        Pair::on(server_side, address, Host::on)
    }

    fn on(server_side: Side, address: &str, monitor: impl FnOnce(&NetHost) -> Host) -> Pair {
        let net = Containers::new().expect("containers");
        let host = monitor(&net.host);
        let port = net::free_port();
        let server = start(&host, server_side, &net.server, "serve", &["serve", &port.to_string(), address]);
        let known = || server_side == Stock || stock_mode() || host.knows(port);
        let listens = || net.server.within(|| net::kernel_sockets(port, "0A")) > 0 && known();
        net::wait_until(Duration::from_secs(10), listens).expect("the server listens, and the monitor knows it");
        let pair = Pair { _server: server, host, net, port, named: net::free_port() };
        if server_side == Accel && !stock_mode() {
            // The first process of a container made the monitor load its program.
            let to = pair.net.server.interfaces[0].v6;
            let to = if address == "::" { to.into() } else { pair.net.server4() };
            let over = || pair.ask(Accel, &pair.net.neighbour, to, pair.port).get("path_upgrade") != 0;
            net::wait_until(Duration::from_secs(30), over).expect("a connection goes over");
        }
        pair
    }

    fn ask(&self, side: Side, from: &NetHost, to: IpAddr, port: u16) -> Delta {
        self.ask_more(side, from, to, port, &[]).0
    }

    /// What was counted, and what the client has said.
    fn ask_more(&self, side: Side, from: &NetHost, to: IpAddr, port: u16, more: &[&str]) -> (Delta, String) {
        let (port, number, to) = (port.to_string(), CONNECTIONS.to_string(), to.to_string());
        let args = [&["ask", &port, &to, REQUESTS, &number], more].concat();
        self.count(|| start(&self.host, side, from, "ask", &args))
    }

    fn count(&self, client: impl FnOnce() -> Proc) -> (Delta, String) {
        let before = self.host.snapshot();
        let client = client();
        let said = client.finish(Duration::from_secs(60)).success().says("ok").stdout.clone();
        // The servers have closed them all.
        let open = || [self.port, self.named].iter().map(|port| net::kernel_sockets(*port, "01")).sum::<usize>();
        let closed = || [&self.net.server, &self.net.neighbour].iter().all(|server| server.within(open) == 0);
        net::wait_until(Duration::from_secs(10), closed).expect("connections are closed");
        (self.host.snapshot().since(&before), said)
    }

    /// Another program that accepts.
    fn start(&self, side: Side, place: &NetHost, args: &[&str]) -> Proc {
        let server = start(&self.host, side, place, args[0], args);
        self.accepts(side, place, args[1].parse().expect("a port"), server)
    }

    fn accepts(&self, side: Side, place: &NetHost, port: u16, server: Proc) -> Proc {
        let known = || side == Stock || stock_mode() || self.host.knows(port);
        let listens = || place.within(|| net::kernel_sockets(port, "0A")) > 0 && known();
        net::wait_until(Duration::from_secs(10), listens).expect("it listens, and the monitor knows it");
        server
    }
}

/// Every connection has gone over, on both sides, and nobody was called hostile.
#[track_caller]
fn all_over(delta: &Delta) {
    if stock_mode() {
        return eprintln!("PATH NOT ASSERTED: stock mode");
    }
    assert_eq!(delta.get("path_upgrade"), 2 * CONNECTIONS, "{delta}");
    assert_eq!(delta.get("hostile_peer") + delta.get("path_switch"), 0, "{delta}");
    // Two or eighteen requests and answers are the kernel's, more only where the machine has no time; all are 11 MB.
    assert!(delta.get("tx_bytes") > 2 * CONNECTIONS * 3_000_000, "{delta}");
}

#[test]
fn over_bridges_without_blocking_greeted_and_steered() {
    need_hosts!();
    let pair = Pair::new(Accel, "0.0.0.0");
    all_over(&pair.ask(Accel, &pair.net.neighbour, pair.net.server4(), pair.port));
    all_over(&pair.ask(Accel, &pair.net.client, pair.net.server4(), pair.port));
    // From the host itself.
    all_over(&pair.ask(Accel, &pair.net.host, pair.net.server4(), pair.port));

    // Clients that do not block, and servers that speak first.
    let port = pair.named.to_string();
    let _greets = pair.start(Accel, &pair.net.server, &["serve", &port, "0.0.0.0", "a"]);
    let ask = |port, more: &[&str]| pair.ask_more(Accel, &pair.net.client, pair.net.server4(), port, more).0;
    all_over(&ask(pair.named, &["greeted"]));
    all_over(&ask(pair.named, &["nonblocking", "greeted"]));

    // Packets arrive on another CPU than the sender's, and `connect` returns before the other end is established.
    let all = "for f in /sys/class/net/*/queues/rx-*/rps_cpus; do echo 3 > $f; done";
    for host in [&pair.net.host, &pair.net.client, &pair.net.server] {
        host.inside("sh", &["-c", all]).expect("rps_cpus");
    }
    all_over(&ask(pair.port, &["nonblocking"]));
}

#[test]
fn ipv6() {
    need_hosts!();
    let pair = Pair::new(Accel, "::");
    all_over(&pair.ask(Accel, &pair.net.client, pair.net.server6(), pair.port));
}

#[test]
fn a_published_port_masquerade_and_hairpin() {
    need_hosts!();
    let pair = Pair::new(Accel, "0.0.0.0");
    pair.net.publish(8080, pair.port).expect("rules");
    all_over(&pair.ask(Accel, &pair.net.client, pair.net.gateway(), 8080));
    pair.net.masquerade().expect("rules");
    all_over(&pair.ask(Accel, &pair.net.client, pair.net.gateway(), 8080));
    all_over(&pair.ask(Accel, &pair.net.client, pair.net.server4(), pair.port));

    // A container reaches its neighbour, and itself, by the port that is published on the host.
    let rule = "table ip hairpin { chain out { type nat hook postrouting priority 100; \
                ip saddr 10.88.2.0/24 ip daddr 10.88.2.0/24 masquerade; }; }";
    pair.net.nft(rule).expect("rules");
    // Where bridges ask netfilter, the packet leaves by the port that it came from.
    let port = ["link", "set", "veth-server", "type", "bridge_slave", "hairpin", "on"];
    pair.net.host.inside("ip", &port).expect("hairpin");
    let gateway = pair.net.host.interfaces[1].v4.into();
    all_over(&pair.ask(Accel, &pair.net.neighbour, gateway, 8080));
    all_over(&pair.ask(Accel, &pair.net.server, gateway, 8080));
}

/// A client in a container, and a server on the host.
#[test]
fn a_server_on_the_host() {
    need_hosts!();
    let pair = Pair::new(Accel, "0.0.0.0");
    let port = net::free_port();
    let gateway = pair.net.gateway().to_string();
    let _server = pair.start(Accel, &pair.net.host, &["serve", &port.to_string(), &gateway]);
    all_over(&pair.ask(Accel, &pair.net.client, pair.net.gateway(), port));
}

/// One address, two servers behind it: each connection is with the one that the kernel has chosen.
#[test]
fn balanced_addresses() {
    need_hosts!();
    let pair = Pair::new(Accel, "0.0.0.0");
    let (net, port) = (&pair.net, pair.named.to_string());
    let _servers = [(&net.server, "a"), (&net.neighbour, "b")]
        .map(|(place, name)| pair.start(Accel, place, &["serve", &port, "0.0.0.0", name]));
    let backends = [&net.server, &net.neighbour].map(|n| n.interfaces[0].v4);
    let map = format!("map {{ 0 : {}, 1 : {} }}", backends[0], backends[1]);
    for (how, turns) in [("numgen inc mod 2", true), ("jhash ip saddr . tcp sport mod 2", false)] {
        net.nft(&format!(
            "table ip balanced {{ chain in {{ type nat hook prerouting priority -100; tcp dport {port} dnat to {how} {map}; }}; \
             chain counts {{ type filter hook forward priority 0; ct state new tcp dport {port} counter name ip daddr \
             map {{ {} : a, {} : b }}; }}; counter a {{ }}; counter b {{ }}; }}",
            backends[0], backends[1]
        ))
        .expect("rules");
        let (delta, said) = pair.ask_more(Accel, &net.client, net.gateway(), pair.named, &["greeted"]);
        all_over(&delta);
        let by = said.lines().find_map(|l| l.strip_prefix("by ")).expect("who has served");
        assert!(!turns || by == "ababab" || by == "bababa", "{by}");
        for name in ["a", "b"] {
            let kernels = net.host.output("nft", &["list", "counter", "ip", "balanced", name]).expect("nft");
            let number = by.matches(name).count();
            assert!(kernels.contains(&format!("packets {number} ")), "{how}: {by}, the kernel: {kernels}");
        }
        net.nft("delete table ip balanced").expect("rules");
    }
}

/// Docker's proxy is a program in between: with the library both its connections go over, without it none.
#[test]
fn a_proxy_stays_a_proxy() {
    need_hosts!();
    let pair = Pair::new(Accel, "0.0.0.0");
    let to = [pair.port.to_string(), pair.net.server4().to_string()];
    for (side, upgrades) in [(Stock, 0), (Accel, 4 * CONNECTIONS)] {
        let port = net::free_port();
        let args = ["proxy", &port.to_string(), "0.0.0.0", &to[0], &to[1]];
        let _proxy = pair.start(side, &pair.net.host, &args);
        let delta = pair.ask(Accel, &pair.net.client, pair.net.gateway(), port);
        assert!(stock_mode() || delta.get("path_upgrade") == upgrades, "{side:?}: {delta}");
    }
}

/// The library in a program that something else starts, which has it not.
fn behind(host: &Host, place: &NetHost, starter: &[&str], program: &[&str]) -> Command {
    let mut command = host.command(Stock, starter[0]);
    command.args(&starter[1..]).arg("env");
    if !stock_mode() {
        let (library, socket) = (artifacts::library(), host.socket());
        command.arg(format!("LD_PRELOAD={}", library.display()));
        command.arg(format!("FASTSOCKET_SOCKET={}", socket.display()));
    }
    command.args(program);
    place.place(&mut command);
    command
}

/// What docker's and podman's default profile leaves: seccomp, capabilities, namespaces, read-only files.
#[test]
fn default_profiles() {
    need_hosts!();
    let pair = Pair::new(Accel, "0.0.0.0");
    let (net, host) = (&pair.net, &pair.host);
    let [confined, app] = ["apps/confined.py", "apps/containers.py"].map(|name| script(name).display().to_string());
    let run = |place: &NetHost, name: &str, program: &[&str]| {
        Proc::spawn(host.logs(), name, behind(host, place, &[PYTHON, &confined], program))
    };
    let (port, to) = (pair.named.to_string(), pair.net.server4().to_string());
    let serve = run(&net.server, "serve", &[PYTHON, &app, "serve", &port, "0.0.0.0"]);
    let _server = pair.accepts(Accel, &net.server, pair.named, serve);
    let ask = [PYTHON, &app, "ask", &port, &to, REQUESTS, &CONNECTIONS.to_string()];
    all_over(&pair.count(|| run(&net.client, "ask", &ask)).0);

    let (Some(redis), Some(bench)) = (find_program("redis-server"), find_program("redis-benchmark")) else {
        assert!(std::env::var_os("FASTSOCKET_TEST_STRICT").is_none(), "redis is not installed");
        return eprintln!("SKIPPED: redis is not installed (make deps)");
    };
    let (port, redis) = (net::free_port(), redis.display().to_string());
    let text = port.to_string();
    let server = [&redis, "--port", &text, "--bind", "0.0.0.0", "--protected-mode", "no", "--save", ""];
    let _redis = pair.accepts(Accel, &net.server, port, run(&net.server, "redis", &server));
    let before = host.snapshot();
    let bench = bench.display().to_string();
    let bench = [&bench, "-h", &to, "-p", &text, "-c", "5", "-n", "3000", "-t", "get", "--csv"];
    run(&net.client, "redis-benchmark", &bench).finish(Duration::from_secs(60)).success();
    let delta = host.snapshot().since(&before);
    // It asks for the server's configuration before, on a connection for two requests.
    let over = delta.get("path_upgrade");
    assert!(stock_mode() || over >= 10 && delta.get("connect_kernel") - over / 2 <= 1, "{delta}");
}

/// Users share memory between containers as elsewhere: if the administrator has named both. One that is root in a
/// user namespace is who it is outside.
#[test]
fn users() {
    need_hosts!();
    let app = script("apps/containers.py").display().to_string();
    for (settings, shared) in [("", false), ("share = [[54321, 0]]\n", true)] {
        let pair = Pair::on(Accel, "0.0.0.0", |place| Host::for_all_users_on(place, settings));
        let (port, to, number) = (pair.port.to_string(), pair.net.server4().to_string(), CONNECTIONS.to_string());
        let ask = [PYTHON, &app, "ask", &port, &to, REQUESTS, &number];
        let alice = ["setpriv", "--reuid=54321", "--regid=54321", "--clear-groups"];
        for starter in [&alice[..], &[&alice[..], &["unshare", "--user", "--map-root-user"]].concat()] {
            let command = behind(&pair.host, &pair.net.client, starter, &ask);
            let (delta, _) = pair.count(|| Proc::spawn(pair.host.logs(), "ask", command));
            let paired = pair.host.snapshot().report.map_or(0, |r| r.totals["pairs.paired"]);
            assert!(stock_mode() || paired > 0, "`fastsocket stat` shows what is recorded");
            if shared {
                all_over(&delta);
            } else if !stock_mode() {
                let counted = (delta.get("path_upgrade"), delta.get("fallback.other_user"));
                assert_eq!(counted, (0, CONNECTIONS), "{starter:?}: {delta}");
            }
        }
    }
}

#[test]
fn strangers_stay_in_the_kernel() {
    need_hosts!();
    for (server, client) in [(Accel, Stock), (Stock, Accel)] {
        let pair = Pair::new(server, "0.0.0.0");
        let delta = pair.ask(client, &pair.net.client, pair.net.server4(), pair.port);
        assert_eq!(delta.get("path_upgrade"), 0, "{delta}");
        // From the second question on; the first process of a container makes the monitor load its program.
        let client = || pair.ask(client, &pair.net.client, pair.net.server4(), pair.port);
        let told = || client().get("fallback.namespace") == CONNECTIONS;
        if server == Stock && !stock_mode() {
            net::wait_until(Duration::from_secs(30), told).expect("why they stay in the kernel is counted");
        }
    }
}

/// A descriptor that is passed on is the kernel's: its connection goes back, with what waits to be read.
#[test]
fn back_to_the_kernel() {
    need_hosts!();
    let pair = Pair::new(Accel, "0.0.0.0");
    pair.net.publish(8080, pair.port).expect("rules");
    pair.net.masquerade().expect("rules");
    let before = pair.host.snapshot();
    let args = ["ask", "8080", &pair.net.gateway().to_string(), REQUESTS, "6", "pass"];
    start(&pair.host, Accel, &pair.net.client, "ask", &args).finish(Duration::from_secs(60)).success().says("ok");
    let delta = pair.host.snapshot().since(&before);
    assert!(stock_mode() || delta.get("path_upgrade") == 12, "{delta}");
    assert!(stock_mode() || delta.get("path_switch") >= 12, "{delta}");
    assert_eq!(delta.get("fallback.switch") + delta.get("hostile_peer"), 0, "{delta}");
}

/// What ends an idle connection in the kernel ends it in shared memory, within five seconds.
#[test]
fn a_rule_or_a_link_that_comes_later() {
    need_hosts!();
    type Way = (&'static str, fn(&Containers));
    let ways: [Way; 3] = [
        ("drop", |net| net.nft("table ip late { chain f { type filter hook forward priority 0; drop; }; }").unwrap()),
        ("reject", |net| {
            let rule = "table ip late { chain f { type filter hook forward priority 0; \
                        meta l4proto tcp reject with tcp reset; }; }";
            net.nft(rule).unwrap();
        }),
        ("down", |net| net.host.inside("ip", &["link", "set", "br2", "down"]).unwrap()),
    ];
    for (name, end) in ways {
        let pair = Pair::new(Accel, "0.0.0.0");
        let args = ["ask", &pair.port.to_string(), &pair.net.server4().to_string(), REQUESTS, "1", "wait"];
        let before = pair.host.snapshot();
        let mut client = start(&pair.host, Accel, &pair.net.client, "ask", &args);
        client.wait_stdout("asked", Duration::from_secs(20));
        let delta = pair.host.snapshot().since(&before);
        assert!(stock_mode() || delta.get("path_upgrade") == 2, "{name}: {delta}");
        end(&pair.net);
        let began = Instant::now();
        let done = client.finish(Duration::from_secs(60)).success();
        if stock_mode() {
            eprintln!("PATH NOT ASSERTED: stock mode");
            continue;
        }
        assert!(began.elapsed() < Duration::from_secs(5), "{name}: {}", done.stdout);
        assert!(done.stdout.contains("Connection reset by peer"), "{name}: {}", done.stdout);
    }
}
