//! Programs in different network namespaces of one host: their connections go over to shared memory, whatever
//! addresses they see.

use fsocket_e2e::containers::{all_over, start, Pair, CONNECTIONS, REQUESTS};
use fsocket_testkit::host::{Accel, Stock};
use fsocket_testkit::{need_hosts, net, stock_mode};
use std::time::Duration;

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
