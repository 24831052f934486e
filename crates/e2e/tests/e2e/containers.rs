//! Programs in different network namespaces of one host: their connections go over to shared memory, whatever
//! addresses they see.

use fsocket_e2e::containers::{all_over, start, Pair, CONNECTIONS, REQUESTS};
use fsocket_testkit::host::{Accel, Side, Stock};
use fsocket_testkit::netns::NetHost;
use fsocket_testkit::{artifacts, helper, need_hosts, net, stock_mode, Delta, Proc, PYTHON};
use std::process::Command;
use std::time::Duration;

#[test]
fn over_bridges_without_blocking_greeted_and_steered() {
    need_hosts!();
    let pair = Pair::new(Accel, "0.0.0.0");
    all_over(&pair.ask(Accel, &pair.net.neighbour, pair.net.server4(), pair.port));
    all_over(&pair.ask(Accel, &pair.net.client, pair.net.server4(), pair.port));
    // A client on the host itself.
    all_over(&pair.ask(Accel, &pair.net.host, pair.net.server4(), pair.port));

    // Non-blocking clients, and servers that send first.
    let port = pair.named.to_string();
    let _greets = pair.start(Accel, &pair.net.server, &["serve", &port, "0.0.0.0", "a"]);
    let ask = |port, more: &[&str]| pair.ask_more(Accel, &pair.net.client, pair.net.server4(), port, more).0;
    all_over(&ask(pair.named, &["greeted"]));
    all_over(&ask(pair.named, &["nonblocking", "greeted"]));

    // Packets arrive on another CPU than the sender's (if there is one), so `connect` returns
    // before the other end is established.
    let all = "[ $(nproc) -gt 1 ] && cpus=3 || cpus=1; for f in /sys/class/net/*/queues/rx-*/rps_cpus; do echo $cpus > $f; done";
    for host in [&pair.net.host, &pair.net.client, &pair.net.server] {
        host.inside("sh", &["-c", all]).expect("rps_cpus");
    }
    let before = steered();
    all_over(&ask(pair.port, &["nonblocking"]));
    let moved = steered() - before;
    eprintln!("{moved} times another CPU was told of packets");
    assert!(moved > 0 || std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() == 1), "nothing was steered");
}

/// How often CPUs of this machine received packets that another CPU steered to them
/// (`received_rps`).
fn steered() -> u64 {
    let all = std::fs::read_to_string("/proc/net/softnet_stat").expect("softnet_stat");
    all.lines().map(|line| u64::from_str_radix(line.split(' ').nth(9).expect("a number"), 16).expect("a number")).sum()
}

/// A change of path costs as much as some requests. So the library learns: connections that end
/// soon stay in the kernel, and connections that last move to shared memory, even after short
/// ones.
#[test]
fn those_that_end_soon_teach_to_stay() {
    need_hosts!();
    let pair = Pair::new(Accel, "0.0.0.0");
    let short = pair.ask_in_turn(300, 8);
    let long = pair.ask_in_turn(300, 100);
    let over = |d: &Delta| d.get("path_upgrade");
    assert!(stock_mode() || over(&short) <= 60, "{short}");
    assert!(stock_mode() || over(&long) >= 500, "{long}");
    assert_eq!(over(&long) % 2 + long.get("hostile_peer"), 0, "{long}");
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

    // A container reaches its neighbour and itself through the port that the host publishes.
    let rule = "table ip hairpin { chain out { type nat hook postrouting priority 100; \
                ip saddr 10.88.2.0/24 ip daddr 10.88.2.0/24 masquerade; }; }";
    pair.net.nft(rule).expect("rules");
    // Where bridges ask netfilter, such a packet must leave by the bridge port from which it came.
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

/// One address with two servers behind it: each connection must stay with the server that the
/// kernel has chosen.
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

/// Docker's proxy is a program between client and server. With the library both of its connections
/// move to shared memory; without the library none does.
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

#[test]
fn strangers_stay_in_the_kernel() {
    need_hosts!();
    for (server, client) in [(Accel, Stock), (Stock, Accel)] {
        let pair = Pair::new(server, "0.0.0.0");
        let delta = pair.ask(client, &pair.net.client, pair.net.server4(), pair.port);
        assert_eq!(delta.get("path_upgrade"), 0, "{delta}");
        // From the second attempt on, because the first process of a container makes the monitor
        // load its BPF program.
        let client = || pair.ask(client, &pair.net.client, pair.net.server4(), pair.port);
        let told = || client().get("fallback.namespace") == CONNECTIONS;
        if server == Stock && !stock_mode() {
            net::wait_until(Duration::from_secs(60), told).expect("why they stay in the kernel is counted");
        }
    }
}

/// If a descriptor is passed on, its connection returns to the kernel with its unread bytes.
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

/// A container is taken down and comes up elsewhere with the same address. Its connection moves to
/// kernel TCP (`fastsocket off`), is dumped and restored by TCP_REPAIR (as CRIU does it), and goes
/// on. All buffers are full meanwhile, and no byte may be lost.
#[test]
fn taken_down_for_a_checkpoint_and_up_again() {
    need_hosts!();
    let pair = Pair::new(Accel, "0.0.0.0");
    let (net, host, limit) = (&pair.net, &pair.host, Duration::from_secs(20));
    let path = helper("containers/checkpoint.py").display().to_string();
    let run = |side: Side, place: &NetHost, args: &[&str]| {
        let mut command = host.command(side, PYTHON);
        command.arg(&path).args(args);
        place.place(&mut command);
        Proc::spawn(host.logs(), args[0], command)
    };
    let (port, to, state) = (pair.named.to_string(), net.server4().to_string(), host.path().join("state"));
    let state = state.display().to_string();
    let before = host.snapshot();
    let server = run(Accel, &net.server, &["serve", &port, "0.0.0.0", &state]);
    let mut server = pair.accepts(Accel, &net.server, pair.named, server);
    let mut client = run(Accel, &net.client, &["client", &port, &to, "8000000"]);
    client.wait_stdout("over", limit);
    server.wait_stdout("fd", limit);
    let ends = |pid: u32| {
        let connections = host.snapshot().report.map(|r| r.connections).unwrap_or_default();
        connections.into_iter().filter(|c| c.pids.contains(&pid)).collect::<Vec<_>>()
    };
    if !stock_mode() {
        // The connection is in shared memory, and its rings are full because the client reads
        // nothing.
        let full = || ends(server.pid()).iter().any(|c| c.recv_q > 0 && c.send_q > 0);
        net::wait_until(limit, full).expect("full rings");
        let mut off = Command::new(artifacts::cli());
        off.env("FASTSOCKET_SOCKET", host.socket()).args(["off", &server.pid().to_string()]);
        // Exit status 1 means that not all connections are in the kernel yet.
        let off = || matches!(off.output(), Ok(done) if done.status.success());
        net::wait_until(limit, off).expect("off");
        // Then the client's end moves, too. The client must still read what was in its ring.
        let followed = || {
            let report = host.snapshot().report.expect("a report");
            report.processes.iter().any(|p| p.pid == client.pid() && p.counters["path_switch"] == 1)
        };
        net::wait_until(limit, || followed() && ends(server.pid()).is_empty()).expect("in the kernel");
    }

    server.signal(libc::SIGUSR1);
    server.wait_stdout("stopped", limit);
    let lock = format!(
        "table ip lock {{ chain i {{ type filter hook input priority -300; tcp dport {port} drop; }}; \
         chain o {{ type filter hook output priority -300; tcp sport {port} drop; }}; }}"
    );
    for place in [&net.server, &net.neighbour] {
        place.inside("nft", &[&lock]).expect("rules");
    }
    let said = server.stdout();
    let fd = said.lines().find_map(|l| l.strip_prefix("fd ")).expect("a descriptor");
    let done = run(Stock, &net.server, &["dump", &server.pid().to_string(), fd, &state]).finish(limit).success();
    eprintln!("{}", done.stdout.trim());
    let address = format!("{to}/24");
    net.server.inside("ip", &["addr", "del", &address, "dev", "eth0"]).expect("address");
    net.neighbour.inside("ip", &["addr", "add", &address, "dev", "eth0"]).expect("address");
    net.host.inside("ip", &["neigh", "flush", "dev", "br2"]).expect("neighbours");
    let mut restored = run(Accel, &net.neighbour, &["restore", &state]);
    restored.wait_stdout("restored", limit);
    net.neighbour.inside("nft", &["delete table ip lock"]).expect("rules");

    client.signal(libc::SIGUSR1);
    client.finish(Duration::from_secs(60)).success().says("ok");
    let delta = host.snapshot().since(&before);
    // A restored socket has made no handshake that the monitor saw, so its connection stays in the
    // kernel.
    assert!(stock_mode() || delta.get("path_upgrade") == 2 && delta.get("path_switch") >= 2, "{delta}");
    assert_eq!(delta.get("fallback.switch") + delta.get("hostile_peer"), 0, "{delta}");
}
