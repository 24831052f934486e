//! What a network device can be asked and told: the calls behind `ethtool`.

mod ioctl;
mod recorded;

pub use ioctl::Ioctl;
pub use recorded::Recorded;

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::io;

/// `ethtool -i`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Driver {
    pub name: String,
    pub version: String,
    pub firmware: String,
    /// PCI address for a PCI device, else empty.
    pub bus: String,
}

/// `ethtool -l`: queues as the driver groups them. A maximum of 0 says that
/// the device has no channels of this kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Channels {
    pub max_rx: u32,
    pub max_tx: u32,
    pub max_combined: u32,
    pub count: ChannelCount,
    /// The driver shows them and cannot change them (vmxnet3). False also where nobody
    /// may ask.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub fixed: bool,
}

/// How many channels are in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChannelCount {
    pub rx: u32,
    pub tx: u32,
    pub combined: u32,
}

impl ChannelCount {
    /// Queues that receive.
    pub fn receiving(&self) -> u32 {
        self.rx + self.combined
    }
}

impl fmt::Display for ChannelCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts: Vec<String> = [(self.combined, "combined"), (self.rx, "rx"), (self.tx, "tx")]
            .iter()
            .filter(|(n, _)| *n > 0)
            .map(|(n, kind)| format!("{n} {kind}"))
            .collect();
        f.write_str(&parts.join(", "))
    }
}

/// `ethtool -c`, as far as we touch it. Times in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Coalesce {
    pub adaptive_rx: bool,
    pub adaptive_tx: bool,
    pub rx_usecs: u32,
    pub rx_frames: u32,
    pub tx_usecs: u32,
    pub tx_frames: u32,
}

impl Coalesce {
    /// Equal, but for what an adaptive driver changes by itself all the time.
    pub fn same(&self, other: &Coalesce) -> bool {
        let rx = self.adaptive_rx && other.adaptive_rx
            || (self.rx_usecs, self.rx_frames) == (other.rx_usecs, other.rx_frames);
        let tx = self.adaptive_tx && other.adaptive_tx
            || (self.tx_usecs, self.tx_frames) == (other.tx_usecs, other.tx_frames);
        rx && tx && (self.adaptive_rx, self.adaptive_tx) == (other.adaptive_rx, other.adaptive_tx)
    }
}

impl fmt::Display for Coalesce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let side = |adaptive: bool, usecs: u32, frames: u32| match adaptive {
            true => "adaptive".to_owned(),
            false => format!("{usecs} us/{frames} frames"),
        };
        let rx = side(self.adaptive_rx, self.rx_usecs, self.rx_frames);
        write!(f, "rx {rx}, tx {}", side(self.adaptive_tx, self.tx_usecs, self.tx_frames))
    }
}

/// `ethtool -g`, in descriptors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rings {
    pub rx: u32,
    pub max_rx: u32,
    pub tx: u32,
    pub max_tx: u32,
}

/// One line of `ethtool -k`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Feature {
    pub on: bool,
    /// Can it be switched at all?
    pub changeable: bool,
}

/// `ethtool -x`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rss {
    /// Receive rings that the table may name.
    pub rings: u32,
    /// Ring by hash.
    pub table: Vec<u32>,
    /// Length of the hash key in bytes.
    pub key_bytes: u32,
}

impl Rss {
    /// Does each ring get its share, and no ring nothing?
    pub fn is_even(&self) -> bool {
        let mut uses = vec![0u32; self.rings as usize];
        for ring in &self.table {
            match uses.get_mut(*ring as usize) {
                Some(n) => *n += 1,
                None => return false,
            }
        }
        let (low, high) = (uses.iter().min(), uses.iter().max());
        // A table shorter than the rings (it happens) cannot reach them all.
        low.zip(high).is_none_or(|(low, high)| high - low <= 1)
    }

    /// As the kernel fills it when nobody has set it: ring = index mod rings
    /// (`ethtool_rxfh_indir_default`).
    pub fn is_default(&self) -> bool {
        self.table.iter().enumerate().all(|(i, ring)| *ring == i as u32 % self.rings.max(1))
    }
}

/// A table to be set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RssTable {
    /// What the kernel makes of it; follows the number of rings.
    Default,
    Explicit(Vec<u32>),
}

/// A filter: TCP packets to some ports go to a queue (`ethtool -N`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rule {
    pub v6: bool,
    /// Destination port, and which of its bits count.
    pub port: u16,
    pub mask: u16,
    pub queue: u32,
}

pub const NTUPLE: &str = "rx-ntuple-filter";
pub const GRO: &str = "rx-gro";
pub const LRO: &str = "rx-lro";
pub const GRO_HW: &str = "rx-gro-hw";
pub const TSO: &str = "tx-tcp-segmentation";
pub const RXHASH: &str = "rx-hashing";

/// One network device. Every call may fail with EOPNOTSUPP: the device lacks it.
pub trait Nic {
    /// Index and hardware address that the *calling* network namespace has for
    /// this name. ENODEV: no such device here.
    fn identity(&self) -> io::Result<(u32, String)>;
    fn driver(&self) -> io::Result<Driver>;
    fn channels(&self) -> io::Result<Channels>;
    fn set_channels(&self, count: ChannelCount) -> io::Result<()>;
    fn coalesce(&self) -> io::Result<Coalesce>;
    fn set_coalesce(&self, to: &Coalesce) -> io::Result<()>;
    fn rings(&self) -> io::Result<Rings>;
    fn features(&self) -> io::Result<BTreeMap<String, Feature>>;
    fn set_feature(&self, name: &str, on: bool) -> io::Result<()>;
    fn rss(&self) -> io::Result<Rss>;
    fn set_rss(&self, table: &RssTable) -> io::Result<()>;
    /// Steering rules installed now (`ethtool -n`).
    fn ntuple_rules(&self) -> io::Result<u32>;
    /// Installs a rule; its location.
    fn add_rule(&self, rule: &Rule) -> io::Result<u32>;
    fn remove_rule(&self, location: u32) -> io::Result<()>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn even_tables() {
        let rss = |rings, table: &[u32]| Rss { rings, table: table.to_vec(), key_bytes: 40 };
        assert!(rss(2, &[0, 1, 0, 1]).is_even() && rss(2, &[0, 1, 0, 1]).is_default());
        assert!(rss(2, &[0, 0, 1, 1]).is_even() && !rss(2, &[0, 0, 1, 1]).is_default());
        assert!(rss(3, &[0, 1, 2, 0]).is_even());
        assert!(!rss(2, &[0, 0, 0, 0]).is_even());
        assert!(!rss(2, &[0, 5, 0, 1]).is_even(), "names a ring that is not there");
        assert!(rss(0, &[]).is_even());
    }

    #[test]
    fn an_adaptive_driver_moves_its_times() {
        let a = Coalesce { adaptive_rx: true, rx_usecs: 8, tx_usecs: 50, ..Coalesce::default() };
        assert!(a.same(&Coalesce { rx_usecs: 64, ..a }));
        assert!(!a.same(&Coalesce { tx_usecs: 64, ..a }));
        assert!(!a.same(&Coalesce { adaptive_rx: false, ..a }));
    }
}
