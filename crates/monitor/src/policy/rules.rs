//! The administrator's rules: which pairs of processes may share memory, and what comes first.
//!
//! Two questions with an answer each. *May these two share memory at all?* One user's processes
//! may; others only if a line of `share` names both. *On this connection?* The first rule that
//! matches says `allow`, `deny` or `kernel-first`.

use std::path::PathBuf;

/// The effect of a rule on a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Over shared memory, without a look at the policy of the host.
    Allow,
    /// Over the kernel.
    Deny,
    /// Over shared memory once a handshake of the kernel's has shown that its policy allows it.
    KernelFirst,
}

/// One end of a connection. A field is `None` if it could not be read, or was not needed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Party {
    pub uid: u32,
    pub gid: u32,
    pub exe: Option<PathBuf>,
    /// Path in the cgroup v2 hierarchy, as in /proc/PID/cgroup.
    pub cgroup: Option<String>,
}

/// Where a connection over TCP goes.
#[derive(Clone, Copy, Debug)]
pub struct Inet {
    /// v4-mapped.
    pub ip: [u8; 16],
    pub port: u16,
    /// Inode number of the network namespace, if it is known.
    pub netns: Option<u64>,
}

/// Where a connection goes.
#[derive(Clone, Copy, Debug)]
pub enum Destination<'a> {
    Inet(Inet),
    /// A Unix socket, by its name as `ss` shows it: a path, or `@` and the rest.
    Unix(&'a str),
}

/// A network in CIDR notation, v4-mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    pub ip: [u8; 16],
    pub bits: u8,
}

impl Network {
    fn contains(&self, ip: &[u8; 16]) -> bool {
        let mask = u128::MAX.checked_shl(128 - u32::from(self.bits)).unwrap_or(0);
        (u128::from_be_bytes(self.ip) ^ u128::from_be_bytes(*ip)) & mask == 0
    }
    fn covers(&self, other: &Network) -> bool {
        self.bits <= other.bits && self.contains(&other.ip)
    }
}

/// Conditions of a rule for one end. `None` is anything.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct End {
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub exe: Option<PathBuf>,
    pub cgroup: Option<String>,
}

/// A matching: `None` if something that decides could not be read.
type Fits = Option<bool>;

fn both(a: Fits, b: Fits) -> Fits {
    match (a, b) {
        (Some(false), _) | (_, Some(false)) => Some(false),
        (Some(true), Some(true)) => Some(true),
        _ => None,
    }
}

fn compared<T, U>(wanted: &Option<T>, there: Option<U>, same: impl Fn(&T, U) -> bool) -> Fits {
    match (wanted, there) {
        (None, _) => Some(true),
        (Some(_), None) => None,
        (Some(w), Some(t)) => Some(same(w, t)),
    }
}

impl End {
    fn fits(&self, p: &Party) -> Fits {
        let uid = compared(&self.uid, Some(p.uid), |a, b| *a == b);
        let gid = compared(&self.gid, Some(p.gid), |a, b| *a == b);
        let exe = compared(&self.exe, p.exe.as_ref(), |a, b| a == b);
        let cgroup = compared(&self.cgroup, p.cgroup.as_ref(), |a, b| is_below(b, a));
        both(both(uid, gid), both(exe, cgroup))
    }
    fn covers(&self, other: &End) -> bool {
        let below = |a: &String, b: &String| is_below(b, a);
        wider(&self.uid, &other.uid, PartialEq::eq)
            && wider(&self.gid, &other.gid, PartialEq::eq)
            && wider(&self.exe, &other.exe, PartialEq::eq)
            && wider(&self.cgroup, &other.cgroup, below)
    }
}

/// Does every value that satisfies `b` satisfy `a`?
fn wider<T>(a: &Option<T>, b: &Option<T>, covers: impl Fn(&T, &T) -> bool) -> bool {
    match (a, b) {
        (None, _) => true,
        (Some(_), None) => false,
        (Some(a), Some(b)) => covers(a, b),
    }
}

/// Whether a cgroup, or a path, is `top` or below it. Whole components count.
pub fn is_below(path: &str, top: &str) -> bool {
    let top = top.trim_end_matches('/');
    path.strip_prefix(top).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// Whether a cgroup is in the unit of this name of the service manager. A template (`db@.service`) stands for its instances.
/// Above a unit there are slices only. Below `user.slice` and inside a unit other users make names as they like.
pub fn is_in_unit(path: &str, unit: &str) -> bool {
    let template = unit.split_once('@').filter(|(_, suffix)| suffix.starts_with('.'));
    let is_instance = |part: &str| {
        let of = |(name, suffix)| part.strip_suffix(suffix)?.strip_prefix(name)?.strip_prefix('@');
        template.and_then(of).is_some_and(|instance| !instance.is_empty())
    };
    let ends = |part: &&str| *part == unit || *part == "user.slice" || !part.ends_with(".slice");
    let found = path.split('/').filter(|p| !p.is_empty()).find(ends);
    found.is_some_and(|part| part == unit || is_instance(part))
}

/// One rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    pub line: usize,
    pub action: Action,
    pub client: End,
    pub server: End,
    /// A path such as /run/netns/NAME, or an inode number.
    pub netns: Option<Namespace>,
    pub network: Option<Network>,
    /// First and last port.
    pub ports: Option<(u16, u16)>,
    /// A Unix socket, or a directory that has it; `@` and the rest of an abstract name.
    pub path: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Namespace {
    Inode(u64),
    /// Looked up each time: it may be made again.
    Path(PathBuf),
}

impl Namespace {
    fn is(&self, inode: u64) -> bool {
        match self {
            Namespace::Inode(i) => *i == inode,
            Namespace::Path(p) => rustix::fs::stat(p).is_ok_and(|st| st.st_ino == inode),
        }
    }
}

impl Rule {
    fn fits(&self, client: &Party, server: &Party, to: &Destination) -> Fits {
        both(both(self.client.fits(client), self.server.fits(server)), self.leads(to))
    }

    /// Do the conditions of the destination hold? One of TCP holds for no Unix socket, and the reverse.
    fn leads(&self, to: &Destination) -> Fits {
        match to {
            Destination::Inet(_) if self.path.is_some() => Some(false),
            Destination::Inet(to) => {
                let network = compared(&self.network, Some(&to.ip), |n, ip| n.contains(ip));
                let port = compared(&self.ports, Some(to.port), |(first, last), p| (*first..=*last).contains(&p));
                both(compared(&self.netns, to.netns, |n, inode| n.is(inode)), both(network, port))
            }
            Destination::Unix(_) if self.network.is_some() || self.ports.is_some() || self.netns.is_some() => {
                Some(false)
            }
            Destination::Unix(name) => compared(&self.path, Some(*name), |wanted, name| is_below(name, wanted)),
        }
    }

    /// Whether nothing is left for `later` behind this rule.
    pub fn covers(&self, later: &Rule) -> bool {
        self.client.covers(&later.client)
            && self.server.covers(&later.server)
            && wider(&self.netns, &later.netns, PartialEq::eq)
            && wider(&self.network, &later.network, Network::covers)
            && wider(&self.ports, &later.ports, |a, b| a.0 <= b.0 && b.1 <= a.1)
            && wider(&self.path, &later.path, |a, b| is_below(b, a))
    }
}

/// A party that may share memory with the others of its line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Member {
    User(u32),
    Unit(String),
    Cgroup(String),
}

impl Member {
    fn is(&self, p: &Party) -> bool {
        let cgroup = |f: &dyn Fn(&str) -> bool| p.cgroup.as_deref().is_some_and(f);
        match self {
            Member::User(uid) => p.uid == *uid,
            Member::Unit(unit) => cgroup(&|path| is_in_unit(path, unit)),
            Member::Cgroup(top) => cgroup(&|path| is_below(path, top)),
        }
    }
}

/// The content of the configuration file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rules {
    pub share: Vec<Vec<Member>>,
    pub rules: Vec<Rule>,
}

impl Rules {
    /// Everything that may share memory does, without a look at the policy of the host.
    pub fn allowing() -> Rules {
        let any = End::default();
        let all = Rule {
            line: 0,
            action: Action::Allow,
            client: any.clone(),
            server: any,
            netns: None,
            network: None,
            ports: None,
            path: None,
        };
        Rules { share: Vec::new(), rules: vec![all] }
    }

    /// Whether the administrator lets these two share memory.
    pub fn may_share(&self, a: &Party, b: &Party) -> bool {
        let in_line = |line: &Vec<Member>, p| line.iter().any(|m| m.is(p));
        a.uid == b.uid || self.share.iter().any(|line| in_line(line, a) && in_line(line, b))
    }

    /// The action of the first rule that matches. Where something could not be read, a rule that
    /// restricts matches, and one that allows does not.
    pub fn action(&self, client: &Party, server: &Party, to: &Destination) -> Option<Action> {
        let strict = |r: &&Rule| r.fits(client, server, to).unwrap_or(r.action != Action::Allow);
        self.rules.iter().find(strict).map(|r| r.action)
    }

    pub fn needs_exe(&self) -> bool {
        self.rules.iter().any(|r| r.client.exe.is_some() || r.server.exe.is_some())
    }

    pub fn needs_cgroup(&self) -> bool {
        let named = |m: &Member| !matches!(m, Member::User(_));
        self.share.iter().flatten().any(named)
            || self.rules.iter().any(|r| r.client.cgroup.is_some() || r.server.cgroup.is_some())
    }

    pub fn needs_netns(&self) -> bool {
        self.rules.iter().any(|r| r.netns.is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    fn v4(s: &str) -> [u8; 16] {
        s.parse::<Ipv4Addr>().unwrap().to_ipv6_mapped().octets()
    }
    fn user(uid: u32) -> Party {
        Party { uid, gid: uid, ..Party::default() }
    }
    fn at(ip: &str, port: u16) -> Destination<'static> {
        Destination::Inet(Inet { ip: v4(ip), port, netns: Some(7) })
    }
    fn rule(action: Action) -> Rule {
        let any = End::default();
        Rule { line: 1, action, client: any.clone(), server: any, netns: None, network: None, ports: None, path: None }
    }

    #[test]
    fn one_user_shares_and_others_only_by_name() {
        let mut r = Rules::default();
        assert!(r.may_share(&user(5), &user(5)));
        assert!(!r.may_share(&user(5), &user(6)));
        assert!(!r.may_share(&user(0), &user(6)), "root is a user");
        r.share = vec![vec![Member::User(5), Member::User(6)], vec![Member::User(6), Member::User(7)]];
        assert!(r.may_share(&user(5), &user(6)) && r.may_share(&user(7), &user(6)));
        assert!(!r.may_share(&user(5), &user(7)), "two lines make no third");
    }

    #[test]
    fn the_first_rule_that_matches_counts() {
        let port = |action, first, last| Rule { ports: Some((first, last)), ..rule(action) };
        let r = Rules {
            share: vec![],
            rules: vec![
                port(Action::Allow, 80, 80),
                Rule { client: End { uid: Some(5), ..End::default() }, ..rule(Action::Deny) },
                port(Action::KernelFirst, 80, 90),
            ],
        };
        let act = |uid, p| r.action(&user(uid), &user(1), &at("127.0.0.1", p));
        assert_eq!(act(5, 80), Some(Action::Allow));
        assert_eq!(act(5, 85), Some(Action::Deny));
        assert_eq!(act(6, 85), Some(Action::KernelFirst));
        assert_eq!(act(6, 91), None);
    }

    #[test]
    fn what_cannot_be_read_is_taken_for_the_worse() {
        let exe = |action| Rules {
            share: vec![],
            rules: vec![Rule { client: End { exe: Some("/bin/x".into()), ..End::default() }, ..rule(action) }],
        };
        let act = |action, p: &Party| exe(action).action(p, &user(1), &at("127.0.0.1", 1));
        assert_eq!(act(Action::Deny, &user(1)), Some(Action::Deny));
        assert_eq!(act(Action::KernelFirst, &user(1)), Some(Action::KernelFirst));
        assert_eq!(act(Action::Allow, &user(1)), None);
        let known = Party { exe: Some("/bin/y".into()), ..user(1) };
        assert_eq!(act(Action::Deny, &known), None);
    }

    #[test]
    fn unix_sockets_by_their_names() {
        let by = |r: Rule| {
            move |name| {
                Rules { share: vec![], rules: vec![r.clone()] }.action(&user(1), &user(1), &Destination::Unix(name))
            }
        };
        let path = |p: &str| by(Rule { path: Some(p.into()), ..rule(Action::Deny) });
        let below = path("/run/postgresql");
        assert!(["/run/postgresql", "/run/postgresql/.s.PGSQL.5432"].map(&below).iter().all(Option::is_some));
        assert!(["/run/postgresql2", "/run", "@/run/postgresql", ""].map(&below).iter().all(Option::is_none));
        assert!(path("@x")("@x").is_some() && path("@x")("@xy").is_none());
        assert!(by(rule(Action::Deny))("").is_some(), "a rule for all");
        let tcp = Rule { network: Some(Network { ip: [0; 16], bits: 0 }), ..rule(Action::Deny) };
        assert_eq!(by(tcp)("/x"), None, "any address is none of these");
        let unix = Rules { share: vec![], rules: vec![Rule { path: Some("/".into()), ..rule(Action::Deny) }] };
        assert_eq!(unix.action(&user(1), &user(1), &at("127.0.0.1", 1)), None);
    }

    #[test]
    fn networks_and_namespaces() {
        let net = |ip, bits: u8| Network { ip: v4(ip), bits: 96 + bits };
        assert!(net("10.0.0.0", 8).contains(&v4("10.9.8.7")) && !net("10.0.0.0", 8).contains(&v4("11.0.0.1")));
        assert!(Network { ip: [0; 16], bits: 0 }.contains(&v4("1.2.3.4")));
        assert!(net("10.0.0.0", 8).covers(&net("10.1.0.0", 16)) && !net("10.1.0.0", 16).covers(&net("10.0.0.0", 8)));
        let there = |n| Rules { share: vec![], rules: vec![Rule { netns: Some(n), ..rule(Action::Deny) }] };
        let act = |r: Rules| r.action(&user(1), &user(1), &at("127.0.0.1", 1));
        assert!(there(Namespace::Inode(7)).needs_netns() && !Rules::default().needs_netns());
        assert_eq!(act(there(Namespace::Inode(7))), Some(Action::Deny));
        assert_eq!(act(there(Namespace::Inode(8))), None);
        assert_eq!(act(there(Namespace::Path("/proc/self/ns/net".into()))), None);
    }

    #[test]
    fn cgroups_and_units() {
        assert!(is_below("/a/b", "/a") && is_below("/a", "/a") && is_below("/a/b", "/a/") && is_below("/x", "/"));
        assert!(!is_below("/ab", "/a") && !is_below("/", "/a"));
        let nginx = "nginx.service";
        assert!(is_in_unit("/system.slice/nginx.service", nginx));
        assert!(is_in_unit("/system.slice/system-web.slice/nginx.service/worker", nginx));
        assert!(!is_in_unit("/user.slice/user-1000.slice/user@1000.service/app.slice/nginx.service", nginx));
        assert!(!is_in_unit("/user.slice/nginx.service", nginx));
        assert!(is_in_unit("/system.slice/system-db.slice/db@15-main.service/x", "db@.service"));
        for other in ["db.service", "mydb@1.service", "db@1.scope", "a.service/db@1.service"] {
            assert!(!is_in_unit(&format!("/system.slice/{other}"), "db@.service"), "{other}");
        }
        assert!(!is_in_unit("/system.slice/db@2.service", "db@1.service"));
        assert!(!is_in_unit("/system.slice/other.service/nginx.service", nginx), "a delegated one");
        let p = Party { cgroup: Some("/system.slice/nginx.service".into()), ..user(33) };
        let r = Rules { share: vec![vec![Member::Unit(nginx.into()), Member::User(5)]], rules: vec![] };
        assert!(r.may_share(&p, &user(5)) && !r.may_share(&user(33), &user(5)));
    }

    #[test]
    fn what_an_earlier_rule_covers_is_found() {
        let some = Rule {
            ports: Some((80, 80)),
            network: Some(Network { ip: v4("10.1.0.0"), bits: 112 }),
            ..rule(Action::Allow)
        };
        let wide = Rule { network: Some(Network { ip: v4("10.0.0.0"), bits: 104 }), ..rule(Action::Deny) };
        assert!(wide.covers(&some) && !some.covers(&wide) && rule(Action::Deny).covers(&some));
        let user = Rule { client: End { uid: Some(1), ..End::default() }, ..rule(Action::Deny) };
        assert!(!user.covers(&some) && user.covers(&user));
    }
}
