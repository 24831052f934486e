//! Kernel settings that matter to short connections. Each has its wanted value, the reason and the
//! source. `docs/network.md` lists the settings that `tune` changes; a test compares both.

/// The wanted value of a setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// Raise the value to this, but never lower it.
    AtLeast(u64),
    /// As `AtLeast` with the first number, limited by memory: the second number is the bytes that
    /// each entry takes, and all entries together must not take more than 1 % of memory.
    AtLeastWithMemory(u64, u64),
    /// All of these values are right; if the setting has another, set the first.
    OneOf(&'static [&'static str]),
    /// A port range that contains these ports.
    Range(u16, u16),
    /// Report the value, but never change it.
    Shown,
}

#[derive(Clone, Copy, Debug)]
pub struct Sysctl {
    pub name: &'static str,
    pub want: Want,
    pub why: &'static str,
    pub source: &'static str,
}

const IP_SYSCTL: &str = "Documentation/networking/ip-sysctl.rst";
const NET: &str = "Documentation/admin-guide/sysctl/net.rst";
const SCALING: &str = "Documentation/networking/scaling.rst";

/// Every setting that `tune` looks at.
pub const ALL: &[Sysctl] = &[
    Sysctl {
        name: "net.core.somaxconn",
        want: Want::AtLeast(16384),
        why: "bounds each accept queue, so each zone's; a full one drops connections that are complete",
        source: IP_SYSCTL,
    },
    Sysctl {
        name: "net.ipv4.tcp_max_syn_backlog",
        want: Want::AtLeast(16384),
        why: "half-open connections per listener; one listener serves one zone's bursts",
        source: IP_SYSCTL,
    },
    Sysctl {
        name: "net.ipv4.ip_local_port_range",
        want: Want::Range(16384, 65535),
        why: "source ports for active connections, shared out by zone in slices of a power of two; \
              a proxy holds each for 60 s after closing",
        source: IP_SYSCTL,
    },
    Sysctl {
        name: "net.ipv4.tcp_tw_reuse",
        want: Want::OneOf(&["1"]),
        why: "an active connection may take a port that waits in TIME_WAIT (the peer's timestamps keep it safe)",
        source: IP_SYSCTL,
    },
    Sysctl {
        name: "net.ipv4.tcp_max_tw_buckets",
        want: Want::AtLeastWithMemory(262144, 256),
        why: "beyond it TIME_WAIT is cut short, with a warning in the log",
        source: IP_SYSCTL,
    },
    Sysctl {
        name: "net.ipv4.tcp_syncookies",
        want: Want::OneOf(&["1"]),
        why: "when a SYN queue overflows, cookies instead of refused clients; 2 (always) is for tests",
        source: IP_SYSCTL,
    },
    Sysctl {
        name: "net.ipv4.tcp_migrate_req",
        want: Want::OneOf(&["1"]),
        why: "connections in the queue of a listener that closes go to another of its group, not to a reset",
        source: IP_SYSCTL,
    },
    Sysctl {
        name: "net.core.netdev_max_backlog",
        want: Want::AtLeast(16384),
        why: "per-CPU queue that RPS and steering put packets into; beyond it they are dropped",
        source: NET,
    },
    Sysctl {
        name: "net.ipv4.tcp_fin_timeout",
        want: Want::Shown,
        why: "orphans in FIN_WAIT_2 only; it does not shorten TIME_WAIT, so lowering it gains nothing here",
        source: IP_SYSCTL,
    },
    Sysctl {
        name: "net.ipv4.tcp_timestamps",
        want: Want::Shown,
        why: "without it tcp_tw_reuse has no effect",
        source: IP_SYSCTL,
    },
    Sysctl {
        name: "net.ipv4.tcp_abort_on_overflow",
        want: Want::Shown,
        why: "1 resets clients when an accept queue is full, where 0 lets them try again",
        source: IP_SYSCTL,
    },
    Sysctl {
        name: "net.ipv4.ip_local_reserved_ports",
        want: Want::Shown,
        why: "ports that active connections leave alone",
        source: IP_SYSCTL,
    },
    Sysctl {
        name: "net.core.rps_sock_flow_entries",
        want: Want::Shown,
        why: "RFS: packets follow the application by a hash table; zones make them agree from the start",
        source: SCALING,
    },
];

/// Finds a setting by name. `None` for unknown names, so that a manipulated state file cannot
/// cause a write elsewhere.
pub fn find(name: &str) -> Option<&'static Sysctl> {
    ALL.iter().find(|s| s.name == name)
}

/// `net.core.somaxconn` → `proc/sys/net/core/somaxconn`.
pub fn path(name: &str) -> String {
    format!("proc/sys/{}", name.replace('.', "/"))
}

impl Sysctl {
    /// The value to set, or None if `now` will do.
    pub fn wanted(&self, now: &str, memory_mib: u64) -> Option<String> {
        match self.want {
            Want::AtLeast(n) => at_least(now, n),
            Want::AtLeastWithMemory(n, each) => at_least(now, n.min((memory_mib << 20) / 100 / each)),
            Want::OneOf(values) => (!values.contains(&now)).then(|| values[0].to_owned()),
            Want::Range(low, high) => {
                let mut ports = now.split_whitespace().map(|p| p.parse::<u16>().ok());
                let (is_low, is_high) = (ports.next()??, ports.next()??);
                (is_low > low || is_high < high).then(|| format!("{} {}", low.min(is_low), high.max(is_high)))
            }
            Want::Shown => None,
        }
    }

    /// The wanted value as text for the manual.
    pub fn target(&self) -> String {
        match self.want {
            Want::AtLeast(n) => format!("at least {n}"),
            Want::AtLeastWithMemory(n, _) => format!("at least {n} (less with little memory)"),
            Want::OneOf(values) => values.join(" or "),
            Want::Range(low, high) => format!("at least {low} to {high}"),
            Want::Shown => "shown only".to_owned(),
        }
    }
}

fn at_least(now: &str, n: u64) -> Option<String> {
    (now.parse::<u64>().ok()? < n).then(|| n.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(name: &str, now: &str) -> Option<String> {
        find(name).unwrap().wanted(now, 64 << 10)
    }

    #[test]
    fn raised_never_lowered() {
        assert_eq!(wanted("net.core.somaxconn", "4096").unwrap(), "16384");
        assert_eq!(wanted("net.core.somaxconn", "65535"), None);
        assert_eq!(wanted("net.core.somaxconn", "strange"), None);
    }

    #[test]
    fn port_ranges_only_grow() {
        let name = "net.ipv4.ip_local_port_range";
        assert_eq!(wanted(name, "32768 60999").unwrap(), "16384 65535");
        assert_eq!(wanted(name, "1024 60999").unwrap(), "1024 65535");
        assert_eq!(wanted(name, "1024 65535"), None);
        assert_eq!(wanted(name, "32768"), None);
    }

    #[test]
    fn little_memory_few_buckets() {
        let s = find("net.ipv4.tcp_max_tw_buckets").unwrap();
        assert_eq!(s.wanted("4096", 64 << 10).unwrap(), "262144");
        assert_eq!(s.wanted("4096", 512).unwrap(), "20971");
        assert_eq!(s.wanted("32768", 512), None);
    }

    #[test]
    fn every_change_has_a_reason_and_a_source() {
        for s in ALL {
            assert!(s.why.len() > 20 && s.source.starts_with("Documentation/"), "{}", s.name);
            assert_eq!(find(s.name).unwrap().name, s.name);
        }
        assert!(find("kernel.core_pattern").is_none());
    }
}
