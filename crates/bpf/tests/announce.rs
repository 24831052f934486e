//! Two hosts announce to each other by a TCP option that they have Fastsocket, and other hosts
//! notice nothing.
//!
//! The hosts are network namespaces, and the processes of each host have a cgroup of their own. A
//! socket belongs to the cgroup of the process that makes it.

use fsocket_bpf::announce::{Announcer, Hosts};
use fsocket_bpf::{probe, Error};
use fsocket_testkit::need_hosts;
use fsocket_testkit::netns::{NetHost, Receive};
use std::fs;
use std::io::{Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

const SERVER: u32 = 0x00_0a11;
const CLIENT: u32 = 0x0f_fb22;
const IPPROTO_MPTCP: i32 = 262;
const TCP_FASTOPEN_CONNECT: i32 = 30;

/// Held during a test, because the process can be in one cgroup only.
static TURN: Mutex<()> = Mutex::new(());

/// A cgroup of a host. When this value is dropped, the process returns to its first cgroup.
struct Group {
    path: PathBuf,
    home: PathBuf,
}

impl Group {
    fn new(name: &str) -> Group {
        let root = probe::cgroup2().expect("cgroup v2");
        let own = fs::read_to_string("/proc/self/cgroup").expect("cgroup");
        let own = own.lines().find_map(|l| l.strip_prefix("0::/")).expect("cgroup v2").to_owned();
        let path = root.join(format!("fsocket-announce-{}-{name}", std::process::id()));
        fs::create_dir(&path).expect("a cgroup");
        Group { path, home: root.join(own) }
    }

    /// Runs `make` in this cgroup, so that its sockets and processes belong to the cgroup.
    fn within<T>(&self, make: impl FnOnce() -> T) -> T {
        enter(&self.path);
        let made = make();
        enter(&self.home);
        made
    }
}

fn enter(group: &Path) {
    fs::write(group.join("cgroup.procs"), std::process::id().to_string()).expect("enter a cgroup");
}

impl Drop for Group {
    fn drop(&mut self) {
        enter(&self.home);
        fs::remove_dir(&self.path).expect("an empty cgroup");
    }
}

/// An announcer in a cgroup of a host.
struct Side {
    host: NetHost,
    // Dropped before its group.
    announcer: Option<(Announcer, Hosts)>,
    group: Group,
}

impl Side {
    fn new(host: &NetHost, name: &str, number: Option<u32>) -> Side {
        let group = Group::new(name);
        let announcer = number.map(|number| {
            let announcer = Announcer::start(&group.path, number).expect("the program loads");
            let hosts = Hosts::of(announcer.parts().unwrap());
            (announcer, hosts)
        });
        Side { host: host.clone(), announcer, group }
    }

    fn behind(&self, socket: &impl AsFd) -> Option<u32> {
        self.announcer.as_ref().and_then(|(_, hosts)| hosts.behind(socket.as_fd()))
    }

    fn known(&self) -> Vec<(IpAddr, u32)> {
        self.announcer.as_ref().map(|(_, hosts)| hosts.known()).unwrap_or_default()
    }

    /// A counter of the kernel for this host, for example table `Tcp`, name `RetransSegs`.
    fn counter(&self, table: &str, name: &str) -> u64 {
        self.host.within(|| {
            let all = ["snmp", "netstat"].map(|f| fs::read_to_string(format!("/proc/thread-self/net/{f}")).unwrap());
            let lines: Vec<&str> = all.iter().flat_map(|t| t.lines()).filter(|l| l.starts_with(table)).collect();
            let at = lines[0].split(' ').position(|n| n == name).unwrap_or_else(|| panic!("{name} in {}", lines[0]));
            lines[1].split(' ').nth(at).unwrap().parse().unwrap()
        })
    }
}

struct Net {
    // Dropped before the hosts.
    server: Side,
    client: Side,
    _hosts: fsocket_testkit::netns::Hosts,
    _turn: MutexGuard<'static, ()>,
}

impl Net {
    fn new(server_says: bool, client_says: bool) -> Net {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let mut hosts = fsocket_testkit::netns::Hosts::new().unwrap();
        let (mut client, mut server) = (hosts.add("client").unwrap(), hosts.add("server").unwrap());
        hosts.link(&mut client, &mut server, 1, &Receive::Inline).unwrap();
        let server = Side::new(&server, "server", server_says.then_some(SERVER));
        let client = Side::new(&client, "client", client_says.then_some(CLIENT));
        Net { server, client, _hosts: hosts, _turn: turn }
    }

    fn listen(&self, prepare: impl FnOnce(&OwnedFd) + Send, v6: bool, protocol: i32) -> TcpListener {
        let at = if v6 { "[::]:0" } else { "0.0.0.0:0" }.parse::<SocketAddr>().unwrap();
        self.server.group.within(|| {
            self.server.host.within(|| {
                let fd = socket(v6, protocol);
                prepare(&fd);
                rustix::net::bind(&fd, &at).unwrap();
                rustix::net::listen(&fd, 16).unwrap();
                fd.into()
            })
        })
    }

    fn connect(&self, to: SocketAddr, prepare: impl FnOnce(&OwnedFd) + Send, protocol: i32) -> TcpStream {
        self.client.group.within(|| {
            self.client.host.within(|| {
                let fd = socket(to.is_ipv6(), protocol);
                prepare(&fd);
                rustix::net::connect(&fd, &to).unwrap();
                fd.into()
            })
        })
    }

    fn address(&self, listener: &TcpListener) -> SocketAddr {
        let at = listener.local_addr().unwrap();
        let interface = &self.server.host.interfaces[0];
        let ip: IpAddr = if at.is_ipv6() { interface.v6.into() } else { interface.v4.into() };
        (ip, at.port()).into()
    }

    /// Makes a connection, and sends a request and an answer over it. Returns its two ends.
    fn talk(
        &self,
        listener: &TcpListener,
        protocol: i32,
        prepare: impl FnOnce(&OwnedFd) + Send,
    ) -> (TcpStream, TcpStream) {
        let mut active = self.connect(self.address(listener), prepare, protocol);
        active.write_all(b"request").unwrap();
        let (mut passive, _) = listener.accept().unwrap();
        exchange(&mut active, &mut passive);
        (active, passive)
    }

    /// Number of segments that both sides have retransmitted.
    fn retransmitted(&self) -> u64 {
        [&self.server, &self.client].iter().map(|s| s.counter("Tcp:", "RetransSegs")).sum()
    }

    /// Checks what each of the two ends knows about the other end's host.
    #[track_caller]
    fn knows(&self, ends: &(TcpStream, TcpStream), client_knows: bool, server_knows: bool) {
        assert_eq!(self.client.behind(&ends.0), client_knows.then_some(SERVER), "the opening end");
        assert_eq!(self.server.behind(&ends.1), server_knows.then_some(CLIENT), "the accepting end");
    }
}

fn exchange(active: &mut TcpStream, passive: &mut TcpStream) {
    let mut got = [0; 7];
    passive.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"request");
    passive.write_all(b"answer!").unwrap();
    active.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"answer!");
}

/// Closes the opening end first. If both ends closed at once (which can happen when packets wait
/// for ksoftirqd), one more segment would be sent.
fn close((active, passive): (TcpStream, TcpStream)) {
    for (first, mut then) in [(&active, &passive), (&passive, &active)] {
        first.shutdown(Shutdown::Write).unwrap();
        assert_eq!(then.read(&mut [0]).unwrap(), 0);
    }
}

fn socket(v6: bool, protocol: i32) -> OwnedFd {
    let family = if v6 { libc::AF_INET6 } else { libc::AF_INET };
    // SAFETY: only numbers are passed, and no other value owns the new descriptor.
    unsafe {
        let fd = libc::socket(family, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, protocol);
        assert!(fd >= 0, "{}", std::io::Error::last_os_error());
        OwnedFd::from_raw_fd(fd)
    }
}

fn set(socket: &impl AsRawFd, name: i32, value: i32) {
    // SAFETY: the value is an integer, and its size is passed.
    let rc = unsafe { libc::setsockopt(socket.as_raw_fd(), libc::IPPROTO_TCP, name, (&raw const value).cast(), 4) };
    assert_eq!(rc, 0, "{}", std::io::Error::last_os_error());
}

fn plain(_: &OwnedFd) {}

fn sysctl(host: &NetHost, name: &str, value: &str) {
    host.inside("sh", &["-c", &format!("echo {value} > /proc/sys/net/{name}")]).unwrap();
}

#[test]
fn both_say_it_and_both_know() {
    need_hosts!();
    let net = Net::new(true, true);
    for v6 in [false, true] {
        let listener = net.listen(plain, v6, 0);
        for _ in 0..10 {
            let ends = net.talk(&listener, 0, plain);
            net.knows(&ends, true, true);
        }
        let ip = net.client.host.interfaces[0].clone();
        let ip: IpAddr = if v6 { ip.v6.into() } else { ip.v4.into() };
        assert!(net.server.known().contains(&(ip, CLIENT)), "{:?}", net.server.known());
        assert!(net.client.known().contains(&(net.address(&listener).ip(), SERVER)), "{:?}", net.client.known());
    }
    assert_eq!(net.retransmitted(), 0);
    let counts = |side: &Side| side.announcer.as_ref().unwrap().1.counts();
    assert_eq!(counts(&net.client), [("opened", 20), ("accepted", 0), ("without", 0)]);
    assert_eq!(counts(&net.server), [("opened", 0), ("accepted", 20), ("without", 0)]);
}

/// The announcements cost no further segment and no round trip, whichever host sends them.
#[test]
fn strangers_do_not_notice() {
    need_hosts!();
    let mut segments = Vec::new();
    for (server, client) in [(false, false), (true, false), (false, true), (true, true)] {
        let net = Net::new(server, client);
        let listener = net.listen(plain, false, 0);
        let sent = || [&net.server, &net.client].map(|s| s.counter("Tcp:", "OutSegs"));
        let before = sent();
        for _ in 0..10 {
            let ends = net.talk(&listener, 0, plain);
            net.knows(&ends, server && client, server && client);
            close(ends);
        }
        let after = sent();
        segments.push([after[0] - before[0], after[1] - before[1]]);
        assert_eq!(net.retransmitted(), 0);
        assert_eq!(net.client.known().len() + net.server.known().len(), if server && client { 2 } else { 0 });
    }
    assert!(segments.iter().all(|s| *s == segments[0]), "{segments:?}");
}

#[test]
fn syn_cookies_and_deferred_accepts() {
    need_hosts!();
    let net = Net::new(true, true);
    sysctl(&net.server.host, "ipv4/tcp_syncookies", "2");
    let listener = net.listen(plain, false, 0);
    let before = net.server.counter("TcpExt:", "SyncookiesRecv");
    for _ in 0..5 {
        let ends = net.talk(&listener, 0, plain);
        net.knows(&ends, true, true);
    }
    assert_eq!(net.server.counter("TcpExt:", "SyncookiesRecv") - before, 5);
    sysctl(&net.server.host, "ipv4/tcp_syncookies", "0");
    let deferring = net.listen(|fd| set(fd, libc::TCP_DEFER_ACCEPT, 5), false, 0);
    let ends = net.talk(&deferring, 0, plain);
    net.knows(&ends, true, true);
    assert_eq!(net.retransmitted(), 0);
}

#[test]
fn fast_open() {
    need_hosts!();
    let net = Net::new(true, true);
    sysctl(&net.server.host, "ipv4/tcp_fastopen", "3");
    sysctl(&net.client.host, "ipv4/tcp_fastopen", "3");
    let listener = net.listen(|fd| set(fd, libc::TCP_FASTOPEN, 16), false, 0);
    // The first connection asks for the Fast Open cookie.
    for n in 0..4 {
        let ends = net.talk(&listener, 0, |fd| set(fd, TCP_FASTOPEN_CONNECT, 1));
        net.knows(&ends, true, true);
        assert_eq!(net.server.counter("TcpExt:", "TCPFastOpenPassive"), n, "with data in the SYN");
    }
    assert_eq!(net.retransmitted(), 0);
}

/// Connections of MPTCP are established as before. (Such a connection's socket is not the one
/// that does the handshake, so the host at the other end stays unknown.)
#[test]
fn multipath() {
    need_hosts!();
    let net = Net::new(true, true);
    let listener = net.listen(plain, false, IPPROTO_MPTCP);
    let ends = net.talk(&listener, IPPROTO_MPTCP, plain);
    net.knows(&ends, false, false);
    let counter = |name| net.client.counter("MPTcpExt:", name);
    assert_eq!((counter("MPCapableSYNTX"), counter("MPCapableSYNACKRX")), (1, 1), "multipath is used");
    // A connection by a client without MPTCP.
    let ends = net.talk(&listener, 0, plain);
    net.knows(&ends, true, true);
    assert_eq!(net.retransmitted(), 0);
}

#[test]
fn devices_that_strip_or_drop_the_option() {
    need_hosts!();
    let net = Net::new(true, true);
    let listener = net.listen(plain, false, 0);
    let rules = |rule: &str| {
        let table = format!("table inet strip {{ chain c {{ type filter hook input priority -200; {rule}; }}; }}");
        net.server.host.inside("nft", &[&table]).unwrap();
    };
    rules("reset tcp option 254");
    for _ in 0..3 {
        let ends = net.talk(&listener, 0, plain);
        net.knows(&ends, false, false);
    }
    assert_eq!(net.retransmitted(), 0);
    net.server.host.inside("nft", &["delete table inet strip"]).unwrap();
    // The firewall removes the option only from segments after the SYN.
    rules("tcp flags & (syn | ack) == ack reset tcp option 254");
    let ends = net.talk(&listener, 0, plain);
    net.knows(&ends, true, false);
    assert_eq!(net.retransmitted(), 0);
    net.server.host.inside("nft", &["delete table inet strip"]).unwrap();
    // A firewall drops segments with the unknown option: this costs one retransmission.
    rules("tcp option 254 exists drop");
    let ends = net.talk(&listener, 0, plain);
    net.knows(&ends, false, false);
    assert_eq!(net.retransmitted(), 1);
}

/// Another owner's program that was attached without flags allows no other one, and the error
/// says so.
#[test]
fn another_program_keeps_it_out() {
    need_hosts!();
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let group = Group::new("foreign");
    let first = Announcer::start(&group.path, 1).expect("the program loads");
    // Attached by the old call, which allows no other program beside it.
    let foreign = Group::new("alone");
    first.attach_alone(&foreign.path).expect("attached without flags");
    match Announcer::start(&foreign.path, 2) {
        Err(Error::Busy { what: "sockops", .. }) => {}
        other => panic!("{:?}", other.err()),
    }
    // A program that allows others leaves room for a second one.
    Announcer::start(&group.path, 3).expect("a second one");
}

/// Measures the cost of a connection: `cargo test --release -p fsocket-bpf --test announce --
/// --ignored --nocapture cost`.
#[test]
#[ignore = "a measurement"]
fn cost_of_a_connection() {
    need_hosts!();
    const CONNECTIONS: u32 = 2000;
    const ROUNDS: usize = 9;
    let spent = || {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        now.tv_sec as f64 * 1e6 + now.tv_nsec as f64 / 1e3
    };
    let mut costs = [Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        for (says, costs) in [false, true].into_iter().zip(&mut costs) {
            let net = Net::new(says, says);
            let listener = net.listen(plain, false, 0);
            let to = net.address(&listener);
            // Both ends, and the network between them, run in this thread.
            let each = || {
                let began = spent();
                for _ in 0..CONNECTIONS {
                    let fd = socket(false, 0);
                    rustix::net::connect(&fd, &to).unwrap();
                    let mut active = TcpStream::from(fd);
                    active.write_all(b"request").unwrap();
                    exchange(&mut active, &mut listener.accept().unwrap().0);
                }
                (spent() - began) / f64::from(CONNECTIONS)
            };
            costs.push(net.client.group.within(|| net.client.host.within(each)));
        }
    }
    let [without, with] = costs.map(|mut c| {
        c.sort_by(f64::total_cmp);
        (c[0], c[c.len() / 2])
    });
    println!("us of CPU a connection with a request, both ends: least {:.2} and {:.2} with the option, medians {:.2} and {:.2}",
        without.0, with.0, without.1, with.1);
}
