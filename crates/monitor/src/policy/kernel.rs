//! Whether the host has a policy that could refuse a connection between two of its processes.
//!
//! This module does not ask what the policy says: only the kernel knows, and its handshake shows
//! it ([`super`]). On most hosts the answer to each question is "no". docs/policy.md lists all
//! questions.

use super::routing::Routing;
use crate::broker::{found, Broker};
use crate::modules;
use crate::sockdiag::SockDiag;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::net::RecvFlags;
use std::net::SocketAddr;
use std::path::PathBuf;

/// Why the kernel may refuse a connection, in words for the log.
pub type Reason = &'static str;

#[derive(Default)]
pub struct HostPolicy {
    netfilter: Option<Netfilter>,
    routing: Option<Routing>,
    /// The socket that announces changes of IPsec policies; `Some(None)`: there is none.
    xfrm: Option<Option<OwnedFd>>,
    sockets: Option<SockDiag>,
    /// Where the cgroup v2 hierarchy is mounted. Looked up once.
    cgroups: Option<Option<PathBuf>>,
}

/// nf_tables: the result of the last look, and the socket that announces changes.
struct Netfilter {
    events: OwnedFd,
    /// `None`: the rules have changed since.
    chains: Option<bool>,
}

/// The connection in question. Both its ends are in the monitor's network namespace.
pub struct Question<'a> {
    pub ip: [u8; 16],
    pub port: u16,
    pub uid: u32,
    /// The client's socket.
    pub socket: BorrowedFd<'a>,
    /// `None`: unknown.
    pub client_cgroup: Option<&'a str>,
    pub server_cgroups: Vec<Option<&'a str>>,
}

/// The result of a look at the host's policies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    Nothing,
    /// The kernel may refuse the connection. Its handshake shows whether it does.
    MayRefuse(Reason),
    /// Another listener may answer than the one at this address. A handshake does not show which.
    MayLeadElsewhere(Reason),
}

const REDIRECTED: Seen = Seen::MayLeadElsewhere("BPF programs (sk_lookup) choose the listener");

impl HostPolicy {
    /// Why the kernel may refuse this connection. `Err`: the monitor cannot find out.
    ///
    /// # Errors
    /// The reason why it cannot.
    pub fn look(&mut self, q: &Question<'_>, broker: &Broker) -> Result<Seen, Reason> {
        let unannounced = broker.has(q.socket);
        if unannounced.is_ok_and(|kinds| kinds & found::SK_LOOKUP != 0) {
            return Ok(REDIRECTED);
        }
        if let Some(why) = self.routes(q)? {
            return Ok(Seen::MayRefuse(why));
        }
        let kinds = unannounced.map_err(|_| "the host's policies cannot be asked for")?;
        let named = [
            (found::TABLES, "iptables has tables"),
            (found::XFRM, "there are IPsec policies"),
            (found::TCX, "the loopback device has BPF programs (tcx)"),
            (found::NETFILTER_LINK, "netfilter has BPF programs"),
        ];
        if let Some((_, why)) = named.into_iter().find(|(bit, _)| kinds & bit != 0) {
            return Ok(Seen::MayRefuse(why));
        }
        if self.netfilter(broker)? {
            return Ok(Seen::MayRefuse("netfilter has chains that local packets pass"));
        }
        Ok(self.cgroup_programs(q, broker)?.map_or(Seen::Nothing, Seen::MayRefuse))
    }

    /// Like [`Self::look`], for another network namespace. There the monitor does not look for
    /// policies: only the handshake tells.
    pub fn look_elsewhere(socket: BorrowedFd<'_>, broker: &Broker) -> Result<Seen, Reason> {
        match broker.has(socket) {
            Ok(kinds) if kinds & found::SK_LOOKUP != 0 => Ok(REDIRECTED),
            _ => Err("another network namespace"),
        }
    }

    /// The sockets to be watched for changes, as far as they exist.
    pub fn events(&self) -> impl Iterator<Item = &OwnedFd> {
        let netfilter = self.netfilter.as_ref().map(|n| &n.events);
        let xfrm = self.xfrm.iter().flatten();
        netfilter.into_iter().chain(self.routing.as_ref().map(Routing::events)).chain(xfrm)
    }

    /// Reads these sockets after one was readable. Returns whether something has changed.
    pub fn changed(&mut self) -> bool {
        let mut changed = self.routing.as_mut().is_some_and(Routing::changed);
        if let Some(n) = self.netfilter.as_mut().filter(|n| drain(&n.events)) {
            n.chains = None;
            changed = true;
        }
        changed | self.xfrm.iter().flatten().any(drain)
    }

    fn routes(&mut self, q: &Question<'_>) -> Result<Option<Reason>, Reason> {
        if self.routing.is_none() {
            self.routing = Some(Routing::new().map_err(|_| "routes cannot be asked for")?);
        }
        let Some(routing) = &mut self.routing else { return Ok(None) };
        routing.look(&q.ip, q.port, q.uid).map_err(|_| "routes cannot be asked for")
    }

    fn netfilter(&mut self, broker: &Broker) -> Result<bool, Reason> {
        // (The monitor asks for IPsec policies each time. But clients cache its answer, so changes
        // must be announced to them.)
        self.xfrm.get_or_insert_with(|| broker.xfrm_events().ok());
        if self.netfilter.is_none() {
            if !modules::is_there("nf_tables") {
                return Ok(false);
            }
            const CANNOT: Reason = "nf_tables cannot be asked";
            let events = broker.rules().map_err(|_| CANNOT)?;
            self.netfilter = Some(Netfilter { events, chains: None });
        }
        // (It exists now in any case.)
        let Some(n) = &mut self.netfilter else { return Ok(false) };
        if n.chains.is_none() {
            // An event may be waiting for a change that this look already sees. It only causes one
            // more look.
            n.chains = Some(broker.has_chains().map_err(|_| "nf_tables does not answer")?);
        }
        Ok(n.chains == Some(true))
    }

    /// See [`SockDiag::is_connected`].
    pub fn is_connected(&mut self, own: SocketAddr, peer: SocketAddr) -> Option<bool> {
        if self.sockets.is_none() {
            self.sockets = SockDiag::open().ok();
        }
        self.sockets.as_mut()?.is_connected(own, peer)
    }

    fn cgroup_programs(&mut self, q: &Question<'_>, broker: &Broker) -> Result<Option<Reason>, Reason> {
        const UNKNOWN: Reason = "the programs of a cgroup cannot be asked for";
        let mount = self.cgroups.get_or_insert_with(|| fsocket_bpf::probe::cgroup2().ok());
        // Without a mounted hierarchy no process can attach programs to it.
        let Some(mount) = mount else { return Ok(None) };
        let client = (q.client_cgroup, &CONNECTING[..]);
        // (A server in the client's cgroup needs no question: the client's question includes the
        // server's types.)
        let others = q.server_cgroups.iter().filter(|p| **p != q.client_cgroup);
        for (path, types) in std::iter::once(client).chain(others.map(|p| (*p, &SERVING[..]))) {
            // (The path of a cgroup outside of this cgroup namespace begins with "/..".)
            let path = path.filter(|p| !p.starts_with("/..")).ok_or(UNKNOWN)?;
            let dir = std::fs::File::open(mount.join(path.trim_start_matches('/'))).map_err(|_| UNKNOWN)?;
            if broker.has_programs(dir.as_fd(), types).ok_or(UNKNOWN)? {
                return Ok(Some("BPF programs are attached to the cgroup"));
            }
        }
        Ok(None)
    }
}

/// From `enum bpf_attach_type`: ingress and egress of packets, and programs that see events of a
/// socket's life (`sock_ops`).
const SERVING: [u32; 3] = [0, 1, 3];
/// The same, and: making a socket, `connect` for IPv4 and for IPv6.
const CONNECTING: [u32; 6] = [0, 1, 2, 3, 10, 11];

/// Reads all waiting messages. Their content does not matter, nor that some are lost (ENOBUFS).
/// Returns whether there were any.
fn drain(events: &OwnedFd) -> bool {
    const DATAGRAMS: usize = 64;
    let mut scratch = [0u8; 8192];
    let read = |_: &usize| {
        let got = rustix::net::recv(events, &mut scratch[..], RecvFlags::DONTWAIT);
        !matches!(got, Err(rustix::io::Errno::AGAIN))
    };
    (0..DATAGRAMS).take_while(read).count() > 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    /// Runs `f` in a new network namespace, which has no policy.
    fn in_namespace<T: Send>(f: impl FnOnce() -> T + Send) -> Option<T> {
        std::thread::scope(|s| {
            let thread = s.spawn(|| {
                // SAFETY: the call accesses no memory. Only this thread is changed, and the thread
                // ends with the closure.
                let alone = unsafe { libc::unshare(libc::CLONE_NEWNET) } == 0;
                let run =
                    |args: &[&str]| std::process::Command::new("ip").args(args).status().is_ok_and(|s| s.success());
                (alone && run(&["link", "set", "lo", "up"])).then(f)
            });
            thread.join().unwrap()
        })
    }

    fn look_by(host: &mut HostPolicy, ip: [u8; 4]) -> Result<bool, Reason> {
        let ip = Ipv4Addr::from(ip).to_ipv6_mapped().octets();
        let socket = std::net::TcpListener::bind("127.0.0.1:0");
        let other = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        let socket = socket.as_ref().map_or(other.as_fd(), |s| s.as_fd());
        let question = Question { ip, port: 80, uid: 1000, socket, client_cgroup: None, server_cgroups: vec![] };
        host.look(&question, &Broker::here(other.as_fd(), None, None)).map(|seen| seen != Seen::Nothing)
    }

    #[test]
    fn rules_and_routes_are_seen() {
        let ip = |args: &str| {
            let status = std::process::Command::new("ip").args(args.split(' ')).status();
            assert!(status.is_ok_and(|s| s.success()), "ip {args}");
        };
        // All looks use one value, to test its cache.
        let seen = in_namespace(|| {
            let mut host = HostPolicy { cgroups: Some(None), ..HostPolicy::default() };
            let mut look = |ip| look_by(&mut host, ip);
            let mut all = vec![look([127, 0, 0, 1]), look([192, 0, 2, 1])];
            ip("route add prohibit 127.0.0.9 table local");
            all.extend([look([127, 0, 0, 9]), look([127, 0, 0, 1])]);
            // A rule behind the one for local addresses has no effect.
            ip("rule add pref 10 to 127.0.0.1 prohibit");
            all.push(look([127, 0, 0, 1]));
            ip("rule add pref 20 lookup local");
            ip("rule del pref 0");
            all.push(look([127, 0, 0, 1]));
            ip("rule del pref 10");
            all.push(look([127, 0, 0, 1]));
            all
        });
        let Some(seen) = seen else { return eprintln!("SKIPPED: no network namespace") };
        assert_eq!(seen, [false, true, true, false, false, true, false].map(Ok));
    }

    /// Changes of the loopback device and of IPsec must be seen and announced. Changes of other
    /// devices must not be announced.
    #[test]
    fn changes_of_the_loopback_device_are_seen() {
        let run = |line: &str| {
            let mut words = line.split(' ');
            let status = std::process::Command::new(words.next().unwrap()).args(words).status();
            assert!(status.is_ok_and(|s| s.success()), "{line}");
        };
        let there = [
            ("ip link set lo down", "ip link set lo up"),
            ("tc qdisc add dev lo clsact", "tc qdisc del dev lo clsact"),
            ("tc qdisc add dev lo ingress", "tc qdisc del dev lo ingress"),
            ("tc qdisc add dev lo root pfifo", "tc qdisc del dev lo root"),
            ("ip xfrm policy add dir out dst ::1 action block", "ip xfrm policy flush"),
            ("ip xfrm policy setdefault in block", "ip xfrm policy setdefault in accept"),
        ];
        let elsewhere = [
            "ip link add v0 type veth peer name v1",
            "tc qdisc add dev v0 root pfifo",
            "ip link set v0 up",
            "ip route add 203.0.113.0/24 dev v0",
        ];
        let seen = in_namespace(|| {
            let mut host = HostPolicy { cgroups: Some(None), ..HostPolicy::default() };
            let mut all = vec![("", look_by(&mut host, [127, 0, 0, 1]), true)];
            for (policy, undo) in there {
                for command in [policy, undo] {
                    host.changed();
                    run(command);
                    // (The kernel does not announce changes of the default.)
                    let told = host.changed() || command.contains("setdefault");
                    all.push((command, look_by(&mut host, [127, 0, 0, 1]), told));
                }
            }
            host.changed();
            for command in elsewhere {
                run(command);
                all.push((command, look_by(&mut host, [127, 0, 0, 1]), !host.changed()));
            }
            all
        });
        let Some(seen) = seen else { return eprintln!("SKIPPED: no network namespace") };
        for (command, outcome, told) in seen {
            let policy = there.iter().any(|(policy, _)| *policy == command);
            assert_eq!((outcome, told), (Ok(policy), true), "{command}");
        }
    }

    #[test]
    fn the_other_end_of_a_connection_is_found() {
        let l = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let c = std::net::TcpStream::connect(l.local_addr().unwrap()).unwrap();
        let mut host = HostPolicy::default();
        let (own, peer) = (c.local_addr().unwrap(), c.peer_addr().unwrap());
        assert_eq!(host.is_connected(own, peer), Some(true));
        let other = SocketAddr::new(own.ip(), own.port() ^ 1);
        assert_eq!(host.is_connected(other, peer), Some(false));
    }
}
