//! The monitor's counters, with assertions that shared memory has carried the bytes. A test that
//! used TCP unnoticed would prove nothing.

use fsocket_proto::report::Report;
use std::collections::BTreeMap;

/// The monitor's report at one moment; empty in stock mode.
#[derive(Debug, Clone, Default)]
pub struct Snapshot {
    pub report: Option<Report>,
}

/// The difference between two snapshots.
#[derive(Debug, Clone, Default)]
pub struct Delta {
    values: Option<BTreeMap<String, i128>>,
}

impl Snapshot {
    /// Bytes of shared memory resident in all channels.
    pub fn resident(&self) -> u64 {
        self.report.as_ref().map_or(0, |r| r.channels.iter().map(|c| c.resident).sum())
    }

    /// A counter, summed over all processes since the monitor started.
    pub fn total(&self, name: &str) -> u64 {
        self.report.as_ref().and_then(|r| r.totals.get(name).copied()).unwrap_or(0)
    }

    pub fn since(&self, before: &Snapshot) -> Delta {
        let Some(report) = &self.report else { return Delta::default() };
        let mut values: BTreeMap<String, i128> = BTreeMap::new();
        for (name, value) in &report.totals {
            values.insert(name.clone(), i128::from(*value) - i128::from(before.total(name)));
        }
        Delta { values: Some(values) }
    }
}

impl Delta {
    /// The change of a counter; 0 if no counter has this name.
    pub fn get(&self, name: &str) -> i128 {
        self.values.as_ref().and_then(|v| v.get(name).copied()).unwrap_or(0)
    }

    /// The counters that changed, with their changes.
    pub fn changed(&self) -> Vec<(&str, i128)> {
        let values = self.values.iter().flatten();
        values.filter(|(_, value)| **value != 0).map(|(name, value)| (name.as_str(), *value)).collect()
    }

    /// Asserts that at least `connections` were opened over shared memory, that at least as many
    /// were accepted, and that none used kernel TCP.
    #[track_caller]
    pub fn assert_shm(&self, connections: i128) -> &Self {
        self.assert_connected(connections);
        if self.values.is_some() {
            let accepted = self.get("accept_shm");
            assert!(accepted >= connections, "accepted over shm: {accepted}, wanted {connections}\n{self}");
            assert!(self.get("accept_kernel") == 0, "accepted over kernel TCP\n{self}");
        }
        self
    }

    /// The same for a client that may be restricted (`no_new_privs`). It lets some connections go
    /// to the kernel, to learn whether the kernel permits them; there must be at most `most`.
    #[track_caller]
    pub fn assert_shm_but_first(&self, connections: i128, most: i128) -> &Self {
        if self.values.is_none() {
            eprintln!("PATH NOT ASSERTED: stock mode");
            return self;
        }
        let first = self.get("fallback.kernel_first");
        assert!(first <= most && self.get("connect_kernel") == first, "connected over kernel TCP\n{self}");
        assert!(self.get("accept_kernel") == first, "accepted over kernel TCP\n{self}");
        let (connected, accepted) = (self.get("connect_shm") + first, self.get("accept_shm") + first);
        assert!(connected >= connections && accepted >= connections, "wanted {connections}\n{self}");
        assert!(self.get("hostile_peer") == 0, "a peer was called hostile\n{self}");
        self
    }

    /// The same for a server that forks for each connection. When `learned` connections were
    /// short, its listener may use the kernel.
    #[track_caller]
    pub fn assert_shm_but_short(&self, connections: i128, learned: i128) -> &Self {
        if self.values.is_none() {
            eprintln!("PATH NOT ASSERTED: stock mode");
            return self;
        }
        let (short, shm) = (self.get("fallback.no_listener"), self.get("connect_shm"));
        assert!(self.get("connect_kernel") == short, "connected over kernel TCP for another reason\n{self}");
        assert!(self.get("fallback.short_lived") > 0 || short == 0, "the listener has gone for another reason\n{self}");
        assert!(shm >= learned && shm + short >= connections, "wanted {connections}\n{self}");
        assert!(self.get("accept_shm") >= shm, "accepted over shm: wanted {shm}\n{self}");
        assert!(self.get("hostile_peer") == 0, "a peer was called hostile\n{self}");
        self
    }

    /// Like [`Delta::assert_shm`], but only for the connecting side.
    #[track_caller]
    pub fn assert_connected(&self, connections: i128) -> &Self {
        if self.values.is_none() {
            eprintln!("PATH NOT ASSERTED: stock mode");
            return self;
        }
        let connected = self.get("connect_shm");
        assert!(connected >= connections, "connected over shm: {connected}, wanted {connections}\n{self}");
        assert!(self.get("connect_kernel") == 0, "connected over kernel TCP\n{self}");
        assert!(self.get("hostile_peer") == 0, "a peer was called hostile\n{self}");
        self
    }

    /// Asserts that no connection used shared memory.
    #[track_caller]
    pub fn assert_kernel_only(&self) -> &Self {
        if self.values.is_none() {
            eprintln!("PATH NOT ASSERTED: stock mode");
            return self;
        }
        assert!(self.get("connect_shm") == 0 && self.get("accept_shm") == 0, "shared memory was used\n{self}");
        self
    }
}

impl std::fmt::Display for Delta {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.values {
            None => write!(f, "(stock mode)"),
            Some(values) => {
                for (name, value) in values.iter().filter(|(_, value)| **value != 0) {
                    writeln!(f, "  {name} {value:+}")?;
                }
                Ok(())
            }
        }
    }
}
