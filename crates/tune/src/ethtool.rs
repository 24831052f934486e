//! Queries and commands to a network device, as `ethtool` makes them. No other module of the crate
//! calls the driver.

mod ioctl;
mod recorded;

pub use ioctl::Ioctl;
pub use recorded::Recorded;

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::io;

/// The answer to `ethtool -i`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Driver {
    pub name: String,
    pub version: String,
    pub firmware: String,
    /// PCI address; empty if it is not a PCI device.
    pub bus: String,
}

/// The answer to `ethtool -l`: queues as the driver groups them. A maximum of 0 says that the
/// device has no channels of this kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Channels {
    pub max_rx: u32,
    pub max_tx: u32,
    pub max_combined: u32,
    pub count: ChannelCount,
    /// The driver shows the channels but cannot change them (vmxnet3). False also if this user may
    /// not ask.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub fixed: bool,
}

/// Number of channels in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChannelCount {
    pub rx: u32,
    pub tx: u32,
    pub combined: u32,
}

impl ChannelCount {
    /// Number of queues that receive.
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

/// The part of `ethtool -c` that `tune` uses. Times are in microseconds.
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
    /// Compares, but ignores values that an adaptive driver changes all the time.
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

/// The answer to `ethtool -g`, in descriptors.
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
    /// Whether the feature can be switched at all.
    pub changeable: bool,
}

/// The answer to `ethtool -x`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rss {
    /// Receive rings that the table may name.
    pub rings: u32,
    /// Receive ring for each hash value.
    pub table: Vec<u32>,
    /// Length of the hash key in bytes.
    pub key_bytes: u32,
}

impl Rss {
    /// Whether all rings get equal shares (they differ by one entry at most).
    pub fn is_even(&self) -> bool {
        let mut uses = vec![0u32; self.rings as usize];
        for ring in &self.table {
            match uses.get_mut(*ring as usize) {
                Some(n) => *n += 1,
                None => return false,
            }
        }
        let (low, high) = (uses.iter().min(), uses.iter().max());
        // A table with fewer entries than rings cannot reach all rings, so unused rings are no
        // fault then.
        low.zip(high).is_none_or(|(low, high)| high - low <= 1)
    }

    /// The kernel's default table: ring = index mod rings (`ethtool_rxfh_indir_default`).
    pub fn is_default(&self) -> bool {
        self.table.iter().enumerate().all(|(i, ring)| *ring == i as u32 % self.rings.max(1))
    }
}

/// An indirection table to set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RssTable {
    /// The kernel's own table, which follows the number of rings.
    Default,
    Explicit(Vec<u32>),
}

/// A filter rule: TCP packets to some ports go to one queue (`ethtool -N`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rule {
    pub v6: bool,
    /// Destination port, and the mask of its bits that are compared.
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

/// One network device. Every call may fail with EOPNOTSUPP: the device or driver lacks the
/// feature.
pub trait Nic {
    /// Index and hardware address that this name has in the network namespace of the calling
    /// thread. ENODEV: no device has this name there.
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
    /// Number of installed steering rules (`ethtool -n`).
    fn ntuple_rules(&self) -> io::Result<u32>;
    /// Installs a rule and returns its location.
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
