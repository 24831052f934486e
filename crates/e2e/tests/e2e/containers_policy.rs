//! Connections between network namespaces of one host. They must end when the kernel would refuse
//! them. They must move to shared memory if the default profile of the container engine, the users
//! and the user namespaces allow that.

use fsocket_e2e::containers::{all_over, behind, start, Pair, CONNECTIONS, REQUESTS};
use fsocket_testkit::host::{Accel, Stock};
use fsocket_testkit::netns::NetHost;
use fsocket_testkit::{artifacts, find_program, helper, need_hosts, net, stock_mode, Host, Proc, PYTHON};
use serde_json::Value;
use std::net::IpAddr;
use std::process::Command;
use std::time::Duration;

/// The default profiles of docker, podman and containerd (Kubernetes) permit everything that the
/// library needs: system calls, capabilities, namespaces, read-only files. The profile of podman 3
/// lacks membarrier, so there everything uses the kernel.
#[test]
fn default_profiles() {
    need_hosts!();
    let pair = Pair::new(Accel, "0.0.0.0");
    let (net, host) = (&pair.net, &pair.host);
    let [confined, app] =
        ["containers_policy/confined.py", "containers.py"].map(|name| helper(name).display().to_string());
    let run = |engine: &str, place: &NetHost, name: &str, program: &[&str]| {
        Proc::spawn(host.logs(), name, behind(host, place, &[PYTHON, &confined, engine], program))
    };
    let (port, to) = (pair.named.to_string(), pair.net.server4().to_string());
    let ask = [PYTHON, &app, "ask", &port, &to, REQUESTS, &CONNECTIONS.to_string()];
    let is_free = || net.server.within(|| net::kernel_sockets(pair.named, "0A")) == 0;
    for engine in ["docker", "podman", "containerd", "podman3"] {
        net::wait_until(Duration::from_secs(60), is_free).expect("the server before has ended");
        let serve = run(engine, &net.server, "serve", &[PYTHON, &app, "serve", &port, "0.0.0.0"]);
        let shares = engine != "podman3";
        let _server = pair.accepts(if shares { Accel } else { Stock }, &net.server, pair.named, serve);
        let delta = pair.count(|| run(engine, &net.client, "ask", &ask)).0;
        match shares {
            true => all_over(&delta),
            false => assert_eq!(delta.get("path_upgrade"), 0, "{delta}"),
        }
    }

    let (Some(redis), Some(bench)) = (find_program("redis-server"), find_program("redis-benchmark")) else {
        assert!(std::env::var_os("FASTSOCKET_TEST_STRICT").is_none(), "redis is not installed");
        return eprintln!("SKIPPED: redis is not installed (make deps)");
    };
    let (port, redis) = (net::free_port(), redis.display().to_string());
    let text = port.to_string();
    let server = [&redis, "--port", &text, "--bind", "0.0.0.0", "--protected-mode", "no", "--save", ""];
    let _redis = pair.accepts(Accel, &net.server, port, run("docker", &net.server, "redis", &server));
    let before = host.snapshot();
    let bench = bench.display().to_string();
    let bench = [&bench, "-h", &to, "-p", &text, "-c", "5", "-n", "3000", "-t", "get", "--csv"];
    run("docker", &net.client, "redis-benchmark", &bench).finish(Duration::from_secs(60)).success();
    let delta = host.snapshot().since(&before);
    // The benchmark first asks for the server's configuration, on a connection with two requests.
    let over = delta.get("path_upgrade");
    assert!(stock_mode() || over >= 10 && delta.get("connect_kernel") - over / 2 <= 1, "{delta}");
}

/// Two users may share memory between containers, as elsewhere, if the administrator has named
/// both. Root of a user namespace counts as its user outside.
#[test]
fn users() {
    need_hosts!();
    let app = helper("containers.py").display().to_string();
    for shared in [false, true] {
        let settings = |place: &NetHost| match shared {
            false => String::new(),
            true => format!(
                "share = [[54321, 0]]\n[[rule]]\naction = \"deny\"\nnetns = \"/run/netns/{}\"\n",
                place.namespace
            ),
        };
        let pair = Pair::on(Accel, "0.0.0.0", |place| Host::for_all_users_on(place, &settings(place)));
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
        if shared && !stock_mode() {
            // A rule for one network namespace does not apply to another.
            let delta = pair.ask(Accel, &pair.net.host, pair.net.server4(), pair.port);
            let counted = (delta.get("path_upgrade"), delta.get("fallback.policy"));
            assert_eq!(counted, (0, CONNECTIONS), "{delta}");
        }
    }
}

/// A rootless container: its network namespace belongs to a user namespace of its own. Its
/// connections use the kernel, and `explain` must say why.
#[test]
fn rootless() {
    need_hosts!();
    let pair = Pair::new(Accel, "0.0.0.0");
    let net = &pair.net;
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--net", "sh", "-c", "echo ok; exec sleep 60"]);
    let mut holder = Proc::spawn(pair.host.logs(), "rootless", command);
    holder.wait_stdout("ok", Duration::from_secs(60));
    let (pid, server) = (holder.pid().to_string(), net.server4().to_string());
    let run = |program: &str, args: &[&str]| net.host.inside(program, args).expect("a device of the container");
    run("ip", &["link", "add", "veth-rootless", "type", "veth", "peer", "name", "eth0", "netns", &pid]);
    run("ip", &["link", "set", "veth-rootless", "master", "br2", "up"]);
    for args in [&["addr", "add", "10.88.2.9/24", "dev", "eth0"][..], &["link", "set", "eth0", "up"]] {
        run("nsenter", &[&["--net", "--target", &pid, "ip"][..], args].concat());
    }

    let app = helper("containers.py").display().to_string();
    let ask = [PYTHON, &app, "ask", &pair.port.to_string(), &server, "400", "1", "wait"];
    let enter = ["nsenter", "--user", "--net", "--preserve-credentials", "--target", &pid];
    let mut client = Proc::spawn(pair.host.logs(), "ask", behind(&pair.host, &net.host, &enter, &ask));
    let before = pair.host.snapshot();
    client.wait_stdout("asked", Duration::from_secs(60));
    if stock_mode() {
        return eprintln!("PATH NOT ASSERTED: stock mode");
    }
    let after = pair.host.snapshot();
    assert_eq!(after.since(&before).get("path_upgrade"), 0, "{}", after.since(&before));
    assert!(after.report.is_some_and(|r| r.totals["pairs.foreign"] > 0), "it is counted");
    let said = &asked(&pair, &["explain", &client.pid().to_string()])[0];
    let why = &said["kernel_connections"][0]["why"];
    assert_eq!(why["reason"], "other_userns", "{said:#}");
    assert!(why["text"].as_str().is_some_and(|t| t.contains("rootless")), "{said:#}");
}

/// Runs `fastsocket ss` or `explain` as an administrator of the host.
fn asked(pair: &Pair, args: &[&str]) -> Value {
    let mut command = Command::new(artifacts::cli());
    command.env("FASTSOCKET_SOCKET", pair.host.socket()).args(args).arg("--json");
    pair.net.host.place(&mut command);
    let done = Proc::spawn(pair.host.logs(), args[0], command).finish(Duration::from_secs(60));
    serde_json::from_str(&done.stdout).unwrap_or_else(|e| panic!("{e}: {done:?}"))
}

/// Both ends of the client's connection must be shown, and each must name the other.
#[track_caller]
fn seen(pair: &Pair, client: &Proc, shown: &str) {
    let (pid, netns) = (client.pid(), pair.net.server.namespace.clone());
    let ss = asked(pair, &["ss"]);
    let all = ss["connections"].as_array().expect("connections");
    let own = all.iter().find(|c| c["pids"][0] == pid).unwrap_or_else(|| panic!("no {pid}: {ss:#}"));
    let other = all.iter().find(|c| c["peer_pids"][0] == pid).unwrap_or_else(|| panic!("no peer of {pid}: {ss:#}"));
    assert_eq!((&own["across_namespaces"], &other["across_namespaces"]), (&true.into(), &true.into()), "{ss:#}");
    assert_eq!((own["peer"].as_str(), other["network_namespace"].as_str()), (Some(shown), Some(&*netns)), "{ss:#}");
    let said = &asked(pair, &["explain", &pid.to_string()])[0];
    assert_eq!((&said["shm_connections"], &said["across_namespaces"]), (&1.into(), &1.into()), "{said:#}");
}

/// Starts a client with one connection. It lasts for several tries to move it, one of which may be late.
fn client(pair: &Pair, place: &NetHost, to: IpAddr, port: u16, more: &[&str]) -> Proc {
    let (to, port) = (to.to_string(), port.to_string());
    start(&pair.host, Accel, place, "ask", &[&["ask", &port, &to, "400", "1"], more].concat())
}

#[track_caller]
fn is_reset(client: Proc, what: &str) {
    let done = client.finish(Duration::from_secs(60)).success();
    if stock_mode() {
        return eprintln!("PATH NOT ASSERTED: stock mode");
    }
    assert!(done.stdout.contains("Connection reset by peer"), "{what}: {}", done.stdout);
}

/// If a change would end a kernel connection that is idle, the shared-memory connection must end
/// within five seconds. No other change may end it.
#[test]
fn rules_routes_and_links_that_change_later() {
    need_hosts!();
    let pair = Pair::new(Accel, "0.0.0.0");
    let (net, gateway, server) = (&pair.net, pair.net.gateway(), pair.net.server4());
    let before = pair.host.snapshot();
    for port in [8080, 8081, 8082] {
        net.publish(port, pair.port).expect("rules");
    }
    let stays = ["stay", "wait"];
    let mut clients = [
        client(&pair, &net.client, gateway, 8080, &["wait"]),
        client(&pair, &net.client, gateway, 8081, &["wait"]),
        client(&pair, &net.client, server, pair.port, &["wait"]),
        client(&pair, &net.client, gateway, 8082, &stays),
        client(&pair, &net.neighbour, server, pair.port, &stays),
    ];
    for client in &mut clients {
        client.wait_stdout("asked", Duration::from_secs(60));
    }
    let delta = pair.host.snapshot().since(&before);
    assert!(stock_mode() || delta.get("path_upgrade") == 2 * clients.len() as i128, "{delta}");
    let [dropped, rejected, unroutable, mut translated, mut linked] = clients;
    if !stock_mode() {
        seen(&pair, &translated, &format!("{gateway}:8082"));
    }

    // The first two cases add rules, and the third removes a route. In the fourth case the host
    // forgets its translations, and in the last one it takes another route.
    let flush = helper("containers_policy/conntrack_flush.py").display().to_string();
    let change = |how: &[&str]| net.client.inside("ip", &[&["route"], how].concat()).expect("route");
    let rules = "table ip late { chain f { type filter hook forward priority 0;                  meta l4proto tcp ct original proto-dst 8080 drop;                  meta l4proto tcp ct original proto-dst 8081 reject with tcp reset; }; }";
    net.nft(rules).expect("rules");
    change(&["add", "unreachable", &server.to_string()]);
    change(&["add", &gateway.to_string(), "dev", "eth0"]);
    net.host.inside(PYTHON, &[&flush]).expect("flush");
    is_reset(dropped, "drop");
    is_reset(rejected, "reject");
    is_reset(unroutable, "no route");
    translated.wait_stdout("stayed", Duration::from_secs(60));
    linked.wait_stdout("stayed", Duration::from_secs(60));

    // The host refuses to track connections that it first sees in the middle; then, a link goes
    // down.
    let strict = "echo 0 > /proc/sys/net/netfilter/nf_conntrack_tcp_loose";
    net.host.inside("sh", &["-c", strict]).expect("sysctl");
    net.nft("insert rule ip late f ct state invalid drop").expect("rules");
    net.host.inside(PYTHON, &[&flush]).expect("flush");
    net.host.inside("ip", &["link", "set", "veth-next", "down"]).expect("link");
    is_reset(translated, "flush");
    is_reset(linked, "link down");
}
