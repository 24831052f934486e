//! Two hosts, each with a monitor and an agent: connections between them go over to shared memory at both ends, and
//! the agents carry the bytes. In place of RDMA a TCP connection carries them here (`FASTSOCKET_AGENT_DOUBLE`).

use fsocket_e2e as _;
use fsocket_testkit::host::{Accel, Side, Stock};
use fsocket_testkit::netns::{Hosts, NetHost, Receive};
use fsocket_testkit::{artifacts, helper, need, need_hosts, net, stock_mode, Delta, Host, Proc, Snapshot, PYTHON};
use std::net::Ipv4Addr;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);
const PORT: u16 = 4700;

/// A host with its monitor and its agent.
struct End {
    // Ended first.
    agent: Option<Proc>,
    host: Host,
    net: NetHost,
}

impl End {
    fn new(net: &NetHost, peer: Ipv4Addr, key: &std::path::Path) -> End {
        let own = net.interfaces[0].v4;
        let settings = format!(
            "[hosts.rdma]\naddress = \"{own}:{PORT}\"\npeers = [\"{peer}:{PORT}\"]\nkey = \"{}\"\n",
            key.display()
        );
        let host = Host::configured(Some(net), &settings);
        let mut end = End { agent: None, host, net: net.clone() };
        end.start_agent();
        end
    }

    fn start_agent(&mut self) {
        if stock_mode() {
            return;
        }
        let mut command = self.host.command(Accel, artifacts::agent());
        command.arg("-vvv").env("FASTSOCKET_AGENT_DOUBLE", "1");
        self.agent = Some(Proc::spawn(self.host.logs(), "agent", command));
    }

    fn program(&self, side: Side, program: &str, args: &[&str]) -> Proc {
        let mut command = self.host.command(side, PYTHON);
        command.arg(helper(&format!("{program}.py"))).args(args);
        Proc::spawn(self.host.logs(), args[0], command)
    }

    /// Has the agent logged so often that its link is up?
    fn is_up(&self, times: usize) -> bool {
        self.agent.as_ref().is_none_or(|agent| agent.stderr().matches("up=true known=true").count() >= times)
    }
}

struct Two {
    a: End,
    b: End,
    before: [Snapshot; 2],
    _key: Host,
    _net: Hosts,
}

impl Two {
    fn new() -> Two {
        let mut hosts = Hosts::new().expect("hosts");
        let (mut a, mut b) = (hosts.add("a").expect("a"), hosts.add("b").expect("b"));
        hosts.link(&mut a, &mut b, 1, &Receive::Inline).expect("a link");
        let key = Host::stopped();
        let file = key.file("key", [7; 32]);
        let ends = [End::new(&a, b.interfaces[0].v4, &file), End::new(&b, a.interfaces[0].v4, &file)];
        let up = || ends.iter().all(|end| end.is_up(1));
        net::wait_until(LIMIT, up).unwrap_or_else(|_| panic!("the agents do not find each other: {}", ends[0].log()));
        let [a, b] = ends;
        let before = [a.host.snapshot(), b.host.snapshot()];
        Two { a, b, before, _key: key, _net: hosts }
    }

    fn ask(&self, side: Side, app: &str, args: &[&str]) -> Proc {
        self.a.program(side, app, &[&["ask"], args].concat())
    }

    /// Counters at both hosts, since the beginning.
    fn since(&self) -> [Delta; 2] {
        let [a, b] = &self.before;
        [self.a.host.snapshot().since(a), self.b.host.snapshot().since(b)]
    }

    /// How many ends have gone over to shared memory, at both hosts: a program's and a stand-in's for each connection.
    fn ends_moved(&self) -> [u64; 2] {
        self.since().map(|delta| delta.get("path_upgrade") as u64)
    }

    /// Three connections that are asked for long, when they have gone over.
    fn over(&self, port: &str) -> Proc {
        let ask = self.ask(Accel, "containers", &[port, &self.address(), "3000", "3"]);
        let over = || stock_mode() || self.since()[0].get("path_upgrade") == 6;
        net::wait_until(LIMIT, over).unwrap_or_else(|e| panic!("all go over: {e}: {}", self.story()));
        ask
    }

    /// The carrier fails.
    fn cut(&self) {
        let rule = format!(
            "table inet cut {{ chain out {{ type filter hook output priority 0; tcp dport {} reject with tcp reset; \
                            tcp sport {} reject with tcp reset; }}; }}",
            PORT + 1,
            PORT + 1
        );
        self.b.net.inside("nft", &[&rule]).expect("rules");
    }

    fn story(&self) -> String {
        let [a, b] = self.since();
        format!("{a}\n{b}\n{}\n{}", self.a.log(), self.b.log())
    }

    fn address(&self) -> String {
        self.b.net.interfaces[0].v4.to_string()
    }

    fn serve(&self, side: Side, app: &str) -> (Proc, String) {
        let port = net::free_port();
        let server = self.b.program(side, app, &["serve", &port.to_string(), "0.0.0.0"]);
        let knows = || side == Stock || stock_mode() || self.b.host.knows(port);
        let listens = || self.b.host.kernel_sockets(port, "0A") > 0 && knows();
        net::wait_until(LIMIT, listens).expect("the server listens");
        (server, port.to_string())
    }
}

impl End {
    fn log(&self) -> String {
        self.agent.as_ref().map_or_else(String::new, Proc::stderr)
    }
}

/// Every connection has gone over, and of them so many have come back.
#[track_caller]
fn assert_paths(two: &Two, connections: i128, back: i128) {
    if stock_mode() {
        return eprintln!("PATH NOT ASSERTED: stock mode");
    }
    let ([a, b], logs) = (two.since(), two.story());
    for delta in [&a, &b] {
        assert_eq!(delta.get("path_upgrade"), 2 * connections, "program and stand-in: {logs}");
        // Once the program's, twice the stand-in's, which is the first.
        assert_eq!(delta.get("path_switch"), 3 * back, "{logs}");
        assert_eq!(delta.get("hostile_peer"), 0, "{logs}");
    }
}

#[test]
fn connections_between_hosts_go_over_to_their_agents() {
    need_hosts!();
    let two = Two::new();
    let (_server, port) = two.serve(Accel, "containers");
    let mut ask = two.ask(Accel, "containers", &[&port, &two.address(), "300", "3", "stay"]);
    ask.wait_stdout("asked", LIMIT);
    assert_paths(&two, 3, 0);
    if !stock_mode() {
        let ss = two.a.host.snapshot().report.expect("a report");
        let by_agents =
            ss.connections.iter().filter(|c| c.by_agents && c.pids.contains(&ask.pid()) && c.state == "ESTAB");
        assert_eq!(by_agents.count(), 3, "{:#?}", ss.connections);
        assert_eq!(ss.link(two.b.net.interfaces[0].v4.into()), Some(true));
        let mut cli = two.a.host.command(Stock, artifacts::cli());
        cli.args(["explain", &ask.pid().to_string()]);
        let explain = Proc::spawn(two.a.host.logs(), "explain", cli).finish(LIMIT);
        let explain = explain.says("now         3 over shared memory (3 with another host, by RDMA), 0 in the kernel");
        explain.says("accelerated");
    }
    ask.finish(LIMIT).success().says("ok");
    assert_paths(&two, 3, 0);
}

/// More than are under way at once when they go over: of a thousand connections of redis-benchmark nearly all do.
#[test]
fn a_thousand_connections() {
    need_hosts!();
    let (server, bench) = (need!("redis-server"), need!("redis-benchmark"));
    let two = Two::new();
    let (port, to) = (net::free_port().to_string(), two.address());
    let mut command = two.b.host.command(Accel, server);
    command.args(["--port", &port, "--bind", "0.0.0.0", "--protected-mode", "no", "--save", "", "--dir", "/tmp"]);
    let _server = Proc::spawn(two.b.host.logs(), "redis", command);
    let port_number = port.parse().expect("a port");
    let knows = || stock_mode() || two.b.host.knows(port_number);
    net::wait_until(LIMIT, || two.b.host.kernel_sockets(port_number, "0A") > 0 && knows()).expect("redis listens");
    let mut command = two.a.host.command(Accel, bench);
    command.args(["-h", &to, "-p", &port, "-c", "1000", "-n", "200000", "-t", "set", "-d", "100", "-q"]);
    let done = Proc::spawn(two.a.host.logs(), "bench", command).finish(2 * LIMIT).success();
    assert!(!done.stdout.contains("rror"), "{}", done.stdout);
    if !stock_mode() {
        let [a, b] = two.since();
        // (The other host's end may have gone over alone, and come back.)
        let over = a.get("path_upgrade");
        assert!(over >= 2 * 900 && b.get("path_upgrade") >= over, "{over}: {a}\n{b}");
    }
}

/// The monitor's answer about the first channel comes when nobody waits for it any more.
#[test]
fn a_late_answer_is_none_too_many() {
    need_hosts!();
    let mut two = Two::new();
    let (_server, port) = two.serve(Accel, "containers");
    let late = two.a.host.monitor().map_or_else(|| "late=0".into(), |monitor| format!("late={}", monitor.pid()));
    let late = if stock_mode() { "" } else { &late };
    two.ask(Accel, "containers", &[&port, &two.address(), "300", "1", late]).finish(LIMIT).success().says("ok");
    assert_paths(&two, 1, 0);
}

/// Both programs see what they see on stock.
#[test]
fn ends_are_those_of_stock() {
    need_hosts!();
    let two = Two::new();
    let (_stock, stock) = two.serve(Stock, "hosts");
    let (_ours, ours) = two.serve(Accel, "hosts");
    for what in ["half", "large", "slow", "reset", "closed", "abort"] {
        let ask = |side, port: &String| {
            two.ask(side, "hosts", &[port, &two.address(), what]).finish(LIMIT).success().says("ok").stdout.clone()
        };
        let said = ask(Stock, &stock);
        // (The last one has two connections.)
        let connections = 1 + u64::from(what == "abort");
        // An agent waits less than a second for the other one. On a machine that takes the CPUs
        // away for that long, a connection stays in the kernel.
        let over = (0..20).find(|_| {
            let before = two.ends_moved();
            assert_eq!(ask(Accel, &ours), said, "{what}: ours, stock");
            stock_mode() || two.ends_moved().iter().zip(before).all(|(now, then)| now - then == 2 * connections)
        });
        assert!(over.is_some(), "{what}: no connection went over: {}", two.story());
    }
    if stock_mode() {
        return eprintln!("PATH NOT ASSERTED: stock mode");
    }
    for delta in two.since() {
        assert_eq!(delta.get("hostile_peer"), 0, "{delta}");
    }
}

/// Each of these tests needs the machine for itself. Beside tests with thousands of connections, one of the three
/// connections sometimes did not move, or the end of a link was noticed after the client had stopped waiting.
mod alone {
    use super::*;

    /// The carrier fails in the middle: all connections go on over TCP, and no byte is lost. When there can be one again new
    /// connections go over.
    #[test]
    fn a_link_that_fails_leaves_tcp() {
        need_hosts!();
        let two = Two::new();
        let (_server, port) = two.serve(Accel, "containers");
        let ask = two.over(&port);
        two.cut();
        ask.finish(LIMIT).success().says("ok");
        assert_paths(&two, 3, 3);
        two.b.net.inside("nft", &["delete table inet cut"]).expect("no rules");
        net::wait_until(LIMIT, || two.a.is_up(2) && two.b.is_up(2)).expect("the link is there again");
        two.ask(Accel, "containers", &[&port, &two.address(), "300", "3"]).finish(LIMIT).success().says("ok");
        assert_paths(&two, 6, 3);
    }

    /// The carrier fails while answers wait to be read: they are not lost, and not sent twice.
    #[test]
    fn a_link_that_fails_leaves_what_is_not_read() {
        need_hosts!();
        let two = Two::new();
        let (_server, port) = two.serve(Accel, "containers");
        let mut ask = two.ask(Accel, "containers", &[&port, &two.address(), "300", "3", "unread"]);
        ask.wait_stdout("asked", LIMIT);
        std::thread::sleep(Duration::from_secs(1));
        two.cut();
        ask.finish(LIMIT).success().says("ok");
        assert_paths(&two, 3, 3);
    }

    /// All that is between the hosts is away for longer than the agents wait for each other: as on stock, the connections go on
    /// behind that.
    #[test]
    fn a_network_that_is_away_for_a_while() {
        need_hosts!();
        let two = Two::new();
        let (_server, port) = two.serve(Accel, "containers");
        let ask = two.over(&port);
        let rule = "table inet away { chain in { type filter hook input priority 0; iifname != lo drop; }; }";
        two.b.net.inside("nft", &[rule]).expect("rules");
        std::thread::sleep(Duration::from_secs(8));
        two.b.net.inside("nft", &["delete table inet away"]).expect("no rules");
        ask.finish(LIMIT).success().says("ok");
        assert_paths(&two, 3, 3);
    }

    /// An agent ends as a service does: its connections go on over TCP, and the next one carries new ones.
    #[test]
    fn an_agent_that_is_stopped_leaves_tcp() {
        need_hosts!();
        if stock_mode() {
            return eprintln!("SKIPPED: there is no agent in stock mode");
        }
        let mut two = Two::new();
        let (_server, port) = two.serve(Accel, "containers");
        let ask = two.over(&port);
        let agent = two.b.agent.take().expect("an agent");
        agent.signal(libc::SIGTERM);
        agent.finish(LIMIT).success();
        ask.finish(LIMIT).success().says("ok");
        assert_paths(&two, 3, 3);
        two.b.start_agent();
        net::wait_until(LIMIT, || two.a.is_up(2) && two.b.is_up(1)).expect("the next agent is there");
        two.ask(Accel, "containers", &[&port, &two.address(), "300", "3"]).finish(LIMIT).success().says("ok");
        assert_paths(&two, 6, 3);
    }

    /// An agent is killed: its connections are reset at both hosts, and the next one carries new ones.
    fn an_agent_is_killed(next_at_once: bool) {
        if stock_mode() {
            return eprintln!("SKIPPED: there is no agent in stock mode");
        }
        let mut two = Two::new();
        let (_server, port) = two.serve(Accel, "containers");
        let to = two.address();
        let mut ask = two.ask(Accel, "containers", &[&port, &to, "300", "3", "wait"]);
        ask.wait_stdout("asked", LIMIT);
        assert_paths(&two, 3, 0);
        two.b.agent = None;
        if next_at_once {
            two.b.start_agent();
        }
        ask.finish(LIMIT).success().says("Connection reset by peer");
        if !next_at_once {
            two.b.start_agent();
        }
        net::wait_until(LIMIT, || two.b.is_up(1)).expect("the next agent is there");
        two.ask(Accel, "containers", &[&port, &to, "300", "3"]).finish(LIMIT).success().says("ok");
        assert_paths(&two, 6, 0);
    }

    #[test]
    fn an_agent_that_is_killed_resets_its_connections() {
        need_hosts!();
        an_agent_is_killed(true);
    }

    /// The other host notices that there is none any more.
    #[test]
    fn an_agent_that_is_killed_for_good() {
        need_hosts!();
        an_agent_is_killed(false);
    }
}
