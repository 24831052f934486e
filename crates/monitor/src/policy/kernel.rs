//! Whether the host has a policy that could refuse a connection between two of its processes.
//!
//! Not what the policy says: only the kernel can tell that, and its handshake does
//! ([`super`]). Four questions, of which each has the answer "no" on most hosts: are there
//! chains of netfilter that local packets pass, does the route lead anywhere but here, are there
//! programs on the cgroups, can we look at all?

use crate::address::is_v4;
use crate::broker::Broker;
use crate::netlink::{self, kinds, put, Netlink};
use rustix::fd::{AsFd, OwnedFd};
use rustix::net::RecvFlags;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

/// What the kernel may refuse a connection by; in words, for the log.
pub type Reason = &'static str;

#[derive(Default)]
pub struct HostPolicy {
    netfilter: Option<Netfilter>,
    routes: Option<Netlink>,
    rules: Option<RoutingRules>,
    sockets: Option<Netlink>,
    /// Where the cgroup v2 hierarchy is mounted; looked up once.
    cgroups: Option<Option<PathBuf>>,
}

/// nf_tables: what there was at the last look, and the socket that tells of changes.
struct Netfilter {
    events: OwnedFd,
    /// `None`: it has changed.
    chains: Option<bool>,
}

/// Routing rules: what they were at the last look, and the socket that tells of changes.
struct RoutingRules {
    events: OwnedFd,
    /// Of [`local_first`]; `None`: not looked yet.
    plain: Option<bool>,
}

impl RoutingRules {
    fn new() -> Option<RoutingRules> {
        let groups = 1 << (libc::RTNLGRP_IPV4_RULE - 1) | 1 << (libc::RTNLGRP_IPV6_RULE - 1);
        netlink::socket(None, groups).ok().map(|events| RoutingRules { events, plain: None })
    }

    /// As they are now. The kernel has put an event here before the call returns that changes a rule, so one that
    /// is there when this begins counts.
    fn local_first(&mut self, routes: &mut Netlink) -> Result<bool, rustix::io::Errno> {
        let mut scratch = [0u8; 1024];
        // (Nor does it matter that events are lost: ENOBUFS says so.)
        while !matches!(
            rustix::net::recv(&self.events, &mut scratch[..], RecvFlags::DONTWAIT),
            Err(rustix::io::Errno::AGAIN)
        ) {
            self.plain = None;
        }
        match self.plain {
            Some(plain) => Ok(plain),
            None => Ok(*self.plain.insert(local_first(routes)?)),
        }
    }
}

/// The connection in question. Both ends are in the monitor's network namespace.
pub struct Question<'a> {
    pub ip: [u8; 16],
    pub port: u16,
    pub uid: u32,
    /// `None`: not known.
    pub client_cgroup: Option<&'a str>,
    pub server_cgroups: Vec<Option<&'a str>>,
}

impl HostPolicy {
    /// Why the kernel may refuse this connection. `Err`: we cannot look.
    ///
    /// # Errors
    /// Why not.
    pub fn look(&mut self, q: &Question<'_>, broker: &Broker) -> Result<Option<Reason>, Reason> {
        if self.netfilter(broker)? {
            return Ok(Some("netfilter has chains that local packets pass"));
        }
        if !self.leads_here(q)? {
            return Ok(Some("the route of the destination does not lead to this host"));
        }
        self.cgroup_programs(q, broker)
    }

    /// The socket to be watched, once there is one.
    pub fn events(&self) -> Option<&OwnedFd> {
        self.netfilter.as_ref().map(|n| &n.events)
    }

    /// It was readable: the rules have changed.
    pub fn changed(&mut self) {
        let Some(n) = &mut self.netfilter else { return };
        let mut scratch = [0u8; 8192];
        // The text of the events does not matter, nor that some are lost (ENOBUFS).
        while !matches!(
            rustix::net::recv(&n.events, &mut scratch[..], RecvFlags::DONTWAIT),
            Err(rustix::io::Errno::AGAIN)
        ) {}
        n.chains = None;
    }

    fn netfilter(&mut self, broker: &Broker) -> Result<bool, Reason> {
        if broker.has_tables().map_err(|_| "iptables cannot be asked")? {
            return Ok(true);
        }
        if self.netfilter.is_none() {
            if !has_nf_tables() {
                return Ok(false);
            }
            const CANNOT: Reason = "nf_tables cannot be asked";
            let events = broker.rules().map_err(|_| CANNOT)?;
            self.netfilter = Some(Netfilter { events, chains: None });
        }
        // (Always there now.)
        let Some(n) = &mut self.netfilter else { return Ok(false) };
        if n.chains.is_none() {
            // An event that we have not read yet may be about what we are about to see; it costs
            // one more look.
            n.chains = Some(broker.has_chains().map_err(|_| "nf_tables does not answer")?);
        }
        Ok(n.chains == Some(true))
    }

    /// Whether a socket of this user gets to the destination by a route of type "local" that no
    /// rule (`ip rule`) comes before: those may ask for more than we know of the connection.
    fn leads_here(&mut self, q: &Question<'_>) -> Result<bool, Reason> {
        if self.routes.is_none() {
            self.routes = Some(Netlink::new(None).map_err(|_| "routes cannot be asked for")?);
        }
        let Some(routes) = &mut self.routes else { return Ok(false) };
        if self.rules.is_none() {
            self.rules = RoutingRules::new();
        }
        let plain = match &mut self.rules {
            Some(rules) => rules.local_first(routes),
            None => local_first(routes),
        };
        if !plain.map_err(|_| "rules of routing cannot be asked for")? {
            return Ok(false);
        }
        let v4 = is_v4(&q.ip);
        let (family, to) = if v4 { (libc::AF_INET, &q.ip[12..]) } else { (libc::AF_INET6, &q.ip[..]) };
        // struct rtmsg: family, lengths of destination and source, and what the kernel fills in.
        let mut body = vec![family as u8, to.len() as u8 * 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        put(&mut body, libc::RTA_DST, to);
        put(&mut body, RTA_UID, &q.uid.to_ne_bytes());
        put(&mut body, RTA_IP_PROTO, &[libc::IPPROTO_TCP as u8]);
        put(&mut body, RTA_DPORT, &q.port.to_be_bytes());
        let mut local = false;
        let answer = routes.ask(libc::RTM_GETROUTE, false, &body, |kind, body| {
            local = kind == libc::RTM_NEWROUTE && body.get(7) == Some(&libc::RTN_LOCAL);
        });
        Ok(answer.is_ok() && local)
    }

    /// Whether there is a socket at the other end of the connection between these two, on this
    /// host and under this address. `None`: the kernel does not say.
    pub fn is_connected(&mut self, own: SocketAddr, peer: SocketAddr) -> Option<bool> {
        if self.sockets.is_none() {
            self.sockets = Netlink::new(Some(rustix::net::netlink::SOCK_DIAG)).ok();
        }
        const SOCK_DIAG_BY_FAMILY: u16 = 20;
        const TCP_LISTEN: u8 = 10;
        let raw = |ip: IpAddr| match ip {
            IpAddr::V4(v4) => [&v4.octets()[..], &[0; 12]].concat(),
            IpAddr::V6(v6) => v6.octets().to_vec(),
        };
        let family = if own.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
        // struct inet_diag_req_v2: all states; ports and addresses of the other end; no cookie.
        let mut body = vec![family as u8, libc::IPPROTO_TCP as u8, 0, 0];
        body.extend_from_slice(&u32::MAX.to_ne_bytes());
        body.extend_from_slice(&peer.port().to_be_bytes());
        body.extend_from_slice(&own.port().to_be_bytes());
        body.extend_from_slice(&raw(peer.ip()));
        body.extend_from_slice(&raw(own.ip()));
        body.extend_from_slice(&[0; 4]);
        body.extend_from_slice(&[0xff; 8]);
        let mut found = false;
        let answer = self.sockets.as_mut()?.ask(SOCK_DIAG_BY_FAMILY, false, &body, |_, body| {
            // Without a connection the answer is the listener.
            let dport = body.get(6..8).map(|b| u16::from_be_bytes([b[0], b[1]]));
            found = body.get(1).is_some_and(|state| *state != TCP_LISTEN) && dport == Some(own.port());
        });
        match answer {
            Ok(()) => Some(found),
            Err(rustix::io::Errno::NOENT) => Some(false),
            Err(_) => None,
        }
    }

    fn cgroup_programs(&mut self, q: &Question<'_>, broker: &Broker) -> Result<Option<Reason>, Reason> {
        const UNKNOWN: Reason = "the programs of a cgroup cannot be asked for";
        let mount = self.cgroups.get_or_insert_with(|| fsocket_bpf::probe::cgroup2().ok());
        // Without a mounted hierarchy nobody attaches anything here.
        let Some(mount) = mount else { return Ok(None) };
        let client = (q.client_cgroup, &CONNECTING[..]);
        // (In the client's everything has been asked for already.)
        let others = q.server_cgroups.iter().filter(|p| **p != q.client_cgroup);
        for (path, types) in std::iter::once(client).chain(others.map(|p| (*p, &SERVING[..]))) {
            // (One outside our own cgroup namespace begins with "/..".)
            let path = path.filter(|p| !p.starts_with("/..")).ok_or(UNKNOWN)?;
            let dir = std::fs::File::open(mount.join(path.trim_start_matches('/'))).map_err(|_| UNKNOWN)?;
            if broker.has_programs(dir.as_fd(), types).ok_or(UNKNOWN)? {
                return Ok(Some("BPF programs are attached to the cgroup"));
            }
        }
        Ok(None)
    }
}

/// From linux/rtnetlink.h.
const RTA_UID: u16 = 25;
const RTA_IP_PROTO: u16 = 27;
const RTA_DPORT: u16 = 29;
/// From linux/fib_rules.h; priority, suppressed prefixes (none), table, origin.
const FR_ACT_TO_TBL: u8 = 1;
const FIB_RULE_INVERT: u32 = 2;
const FRA_USUAL: [u16; 4] = [6, 14, 15, 21];
/// enum bpf_attach_type: ingress and egress of packets; connect of IPv4 and IPv6.
const SERVING: [u32; 2] = [0, 1];
const CONNECTING: [u32; 4] = [0, 1, 10, 11];

/// Whether the first of the routing rules, of IPv4 and of IPv6, is the one that finds local
/// addresses, for everything.
fn local_first(routes: &mut Netlink) -> Result<bool, rustix::io::Errno> {
    let (mut seen, mut plain) = (Vec::new(), true);
    // struct fib_rule_hdr: all families.
    routes.ask(libc::RTM_GETRULE, true, &[0; 12], |kind, body| {
        if kind != libc::RTM_NEWRULE || body.len() < 12 || seen.contains(&body[0]) {
            return;
        }
        if matches!(i32::from(body[0]), libc::AF_INET | libc::AF_INET6) {
            seen.push(body[0]);
            // No destination, source, type of service; table "local", looked up, not inverted.
            let local = body[1..8] == [0, 0, 0, libc::RT_TABLE_LOCAL, 0, 0, FR_ACT_TO_TBL];
            let inverted = netlink::u32_at(body, 8) & FIB_RULE_INVERT != 0;
            plain &= local && !inverted && kinds(&body[12..]).all(|k| FRA_USUAL.contains(&k));
        }
    })?;
    Ok(plain)
}

/// Whether nf_tables is there. To ask it would load it where it is a module.
fn has_nf_tables() -> bool {
    let release = rustix::system::uname();
    let builtin = Path::new("/lib/modules").join(release.release().to_string_lossy().as_ref()).join("modules.builtin");
    match std::fs::read_to_string(builtin) {
        Ok(list) => Path::new("/sys/module/nf_tables").exists() || list.contains("/nf_tables.ko"),
        // No modules here: asking loads nothing.
        Err(_) => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    /// In a network namespace of its own, where there is no policy.
    fn in_namespace<T: Send>(f: impl FnOnce() -> T + Send) -> Option<T> {
        std::thread::scope(|s| {
            let thread = s.spawn(|| {
                // SAFETY: the thread ends with this closure.
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
        let question = Question { ip, port: 80, uid: 1000, client_cgroup: None, server_cgroups: vec![] };
        let nobody = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        host.look(&question, &Broker::here(nobody.as_fd(), None, None)).map(|why| why.is_some())
    }

    #[test]
    fn rules_and_routes_are_seen() {
        let ip = |args: &str| {
            let status = std::process::Command::new("ip").args(args.split(' ')).status();
            assert!(status.is_ok_and(|s| s.success()), "ip {args}");
        };
        // One that remembers what it has seen.
        let seen = in_namespace(|| {
            let mut host = HostPolicy { cgroups: Some(None), ..HostPolicy::default() };
            let mut look = |ip| look_by(&mut host, ip);
            let mut all = vec![look([127, 0, 0, 1]), look([192, 0, 2, 1])];
            ip("route add prohibit 127.0.0.9 table local");
            all.extend([look([127, 0, 0, 9]), look([127, 0, 0, 1])]);
            // Behind the rule that finds local addresses it does not matter.
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
