//! A directory with the /proc and /sys of a large server: two nodes of 48 CPUs, two threads per
//! core, and a network card with up to 64 channels.
#![allow(dead_code)]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

pub const CPUS: u32 = 96;
pub const FIRST_IRQ: u32 = 130;

pub struct Fake {
    pub dir: tempfile::TempDir,
}

impl Fake {
    /// Makes a server whose card uses `channels` of its 64 channels. The card is attached to node
    /// 1 (CPUs 24-47 and 72-95). CPUs 46-47 are isolated.
    pub fn new(channels: u32) -> Fake {
        let fake = Fake { dir: tempfile::tempdir().unwrap() };
        fake.cpus();
        fake.card(channels);
        for (name, value) in [
            ("net/core/somaxconn", "4096"),
            ("net/core/netdev_max_backlog", "1000"),
            ("net/core/rps_sock_flow_entries", "0"),
            ("net/ipv4/tcp_max_syn_backlog", "4096"),
            ("net/ipv4/ip_local_port_range", "32768\t60999"),
            ("net/ipv4/tcp_tw_reuse", "2"),
            ("net/ipv4/tcp_migrate_req", "0"),
            ("net/ipv4/tcp_syncookies", "1"),
            ("net/netfilter/nf_conntrack_count", "12"),
            ("net/netfilter/nf_conntrack_max", "262144"),
            ("kernel/random/boot_id", "11111111-2222-3333-4444-555555555555"),
            ("kernel/core_pattern", "core"),
        ] {
            fake.put(format!("proc/sys/{name}"), value);
        }
        fake.put("proc/meminfo", "MemTotal:       527988840 kB\n");
        fake.put("proc/self/status", "Name:\tx\nCpus_allowed_list:\t0-95\n");
        fake
    }

    fn cpus(&self) {
        const CPU: &str = "sys/devices/system/cpu";
        self.put(format!("{CPU}/online"), "0-95");
        self.put(format!("{CPU}/isolated"), "46-47");
        for cpu in 0..CPUS {
            let core = cpu % 48;
            self.put(format!("{CPU}/cpu{cpu}/topology/thread_siblings_list"), &format!("{core},{}", core + 48));
        }
        for (node, cpus, distance) in [(0, "0-23,48-71", "10 21"), (1, "24-47,72-95", "21 10")] {
            self.put(format!("sys/devices/system/node/node{node}/cpulist"), cpus);
            self.put(format!("sys/devices/system/node/node{node}/distance"), distance);
        }
    }

    fn card(&self, channels: u32) {
        let pci = "sys/devices/pci0000:3a/0000:3b:00.0";
        let net = format!("{pci}/net/eth0");
        self.put(format!("{pci}/numa_node"), "1");
        self.put(format!("{net}/ifindex"), "4");
        self.put(format!("{net}/address"), "0c:42:a1:00:00:01");
        self.put(format!("{net}/flags"), "0x1003");
        for q in 0..channels {
            // A kernel with 96 CPUs writes masks of three words.
            self.put(format!("{net}/queues/rx-{q}/rps_cpus"), "00000000,00000000,00000000");
            self.put(format!("{net}/queues/rx-{q}/rps_flow_cnt"), "0");
            self.put(format!("{net}/queues/tx-{q}/xps_cpus"), "00000000,00000000,00000000");
        }
        self.irq(FIRST_IRQ - 1, pci, "mlx5_async0@pci:0000:3b:00.0");
        for q in 0..64 {
            self.irq(FIRST_IRQ + q, pci, &format!("mlx5_comp{q}@pci:0000:3b:00.0"));
        }
        std::os::unix::fs::symlink("../..", self.path(format!("{net}/device"))).unwrap();
        fs::create_dir_all(self.path("sys/class/net")).unwrap();
        let target = "../../devices/pci0000:3a/0000:3b:00.0/net/eth0";
        std::os::unix::fs::symlink(target, self.path("sys/class/net/eth0")).unwrap();
        let table: Vec<String> = (0..128).map(|i| (i % channels).to_string()).collect();
        self.put(
            "ethtool/eth0.json",
            &format!(
                r#"{{
                "driver": {{"name": "mlx5_core", "version": "6.1.0", "firmware": "16.35", "bus": "0000:3b:00.0"}},
                "channels": {{"max_rx": 0, "max_tx": 0, "max_combined": 64,
                              "count": {{"rx": 0, "tx": 0, "combined": {channels}}}}},
                "coalesce": {{"adaptive_rx": false, "adaptive_tx": false, "rx_usecs": 128, "rx_frames": 64,
                              "tx_usecs": 16, "tx_frames": 32}},
                "can_adapt": false,
                "rings": {{"rx": 1024, "max_rx": 8192, "tx": 1024, "max_tx": 8192}},
                "features": {{"rx-ntuple-filter": {{"on": false, "changeable": true}},
                              "rx-gro": {{"on": true, "changeable": true}}}},
                "rss": {{"rings": {channels}, "table": [{}], "key_bytes": 40}}
            }}"#,
                table.join(",")
            ),
        );
    }

    fn irq(&self, number: u32, pci: &str, name: &str) {
        self.put(format!("{pci}/msi_irqs/{number}"), "msix");
        self.put(format!("sys/kernel/irq/{number}/actions"), name);
        self.put(format!("proc/irq/{number}/smp_affinity_list"), "0-95");
        self.put(format!("proc/irq/{number}/effective_affinity_list"), "0");
    }

    pub fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        self.dir.path().join(path)
    }

    pub fn put(&self, path: impl AsRef<Path>, text: &str) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, format!("{text}\n")).unwrap();
    }

    pub fn get(&self, path: impl AsRef<Path>) -> String {
        let path = self.path(path);
        fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display())).trim_end().to_owned()
    }

    /// The contents of a file of a queue of eth0, such as `xps_cpus` or `rps_cpus`.
    pub fn queue(&self, file: &str) -> String {
        self.get(format!("sys/class/net/eth0/queues/{file}"))
    }

    pub fn affinity(&self, queue: u32) -> String {
        self.get(format!("proc/irq/{}/smp_affinity_list", FIRST_IRQ + queue))
    }

    /// Every file by path, except Fastsocket's own. Masks lose the leading zeros that a kernel
    /// writes, and JSON loses its layout.
    pub fn snapshot(&self) -> BTreeMap<String, String> {
        let mut files = BTreeMap::new();
        walk(self.dir.path(), self.dir.path(), &mut files);
        files
    }
}

fn walk(top: &Path, dir: &Path, files: &mut BTreeMap<String, String>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let name = path.strip_prefix(top).unwrap().display().to_string();
        if path.is_symlink() || name == "var" {
            continue;
        }
        if path.is_dir() {
            walk(top, &path, files);
            continue;
        }
        let mut text = fs::read_to_string(&path).unwrap().split_whitespace().collect::<Vec<_>>().join(" ");
        if name.ends_with("_cpus") {
            text = text.trim_start_matches(['0', ',']).to_owned();
        } else if name.ends_with(".json") {
            text = serde_json::from_str::<serde_json::Value>(&text).unwrap().to_string();
        }
        files.insert(name, text);
    }
}
