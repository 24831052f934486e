//! A network device as it is now: its queues, interrupts and settings, read once.

pub mod interrupts;

pub use interrupts::{Irq, Role};

use crate::cpus::CpuSet;
use crate::error::Error;
use crate::ethtool::{Channels, Coalesce, Driver, Feature, Nic, Rings, Rss};
use crate::root::Root;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Device {
    pub name: String,
    pub ifindex: u32,
    pub address: String,
    pub up: bool,
    /// Whether the device is hardware, or a virtual device of a hypervisor.
    pub physical: bool,
    /// NUMA node. `None`: unknown, or the machine has one node only.
    pub node: Option<u32>,
    pub driver: Option<Driver>,
    pub channels: Option<Channels>,
    pub rss: Option<Rss>,
    pub rings: Option<Rings>,
    pub coalesce: Option<Coalesce>,
    pub features: BTreeMap<String, Feature>,
    /// Number of installed steering rules.
    pub ntuple_rules: Option<u32>,
    /// Receive queues; the index is the queue's number.
    pub rx_queues: Vec<RxQueue>,
    pub tx_queues: Vec<TxQueue>,
    /// Interrupts of the device. Those of queues come first, ordered by queue.
    pub irqs: Vec<Irq>,
}

/// A receive queue. A field is `None` if the kernel has no such file for it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RxQueue {
    pub rps: Option<CpuSet>,
    /// Size of the flow table for RFS (`rps_flow_cnt`).
    pub flows: Option<u64>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TxQueue {
    pub xps: Option<CpuSet>,
    /// Receive queues that select this transmit queue; the kernel looks at them before `xps`.
    pub xps_rxqs: Option<CpuSet>,
}

impl Device {
    /// Reads the device. Fails if the name is impossible, if there is no such device, or if /sys
    /// shows a device of another network namespace under this name.
    pub fn inspect(root: &Root, nic: &dyn Nic, name: &str) -> Result<Device, Error> {
        check_name(name)?;
        let net = format!("sys/class/net/{name}");
        let (ifindex, address) = nic.identity().map_err(|e| match e.raw_os_error() {
            Some(libc::ENODEV) => Error::NoDevice(name.to_owned()),
            _ => Error::Device(name.to_owned(), e),
        })?;
        let shown = (root.number(format!("{net}/ifindex")), root.get(format!("{net}/address")));
        // Ignore addresses of other lengths: other kinds of links have them.
        let other = |shown: String| shown.len() == address.len() && shown != address;
        if shown.0 != Some(ifindex.into()) || shown.1.is_some_and(other) {
            // The device may have disappeared after its identity was read.
            return Err(match nic.identity() {
                Ok(_) => Error::OtherNamespace(name.to_owned()),
                Err(_) => Error::NoDevice(name.to_owned()),
            });
        }
        let node = root.get(format!("{net}/device/numa_node")).and_then(|n| n.parse::<u32>().ok());
        Ok(Device {
            ifindex,
            address,
            up: root.get(format!("{net}/flags")).is_some_and(|f| is_up(&f)),
            physical: root.exists(format!("{net}/device")),
            node: node.or_else(|| parent_node(root, &net)),
            driver: nic.driver().ok(),
            channels: nic.channels().ok(),
            rss: nic.rss().ok(),
            rings: nic.rings().ok(),
            coalesce: nic.coalesce().ok(),
            features: nic.features().unwrap_or_default(),
            ntuple_rules: nic.ntuple_rules().ok(),
            rx_queues: root.numbered(format!("{net}/queues"), "rx-").into_iter().map(|q| rx(root, &net, q)).collect(),
            tx_queues: root.numbered(format!("{net}/queues"), "tx-").into_iter().map(|q| tx(root, &net, q)).collect(),
            irqs: interrupts::of_device(root, name),
            name: name.to_owned(),
        })
    }

    pub fn feature(&self, name: &str) -> Option<Feature> {
        self.features.get(name).copied()
    }

    /// Receive queues that have an interrupt of their own.
    pub fn queue_irqs(&self) -> impl Iterator<Item = &Irq> {
        self.irqs.iter().filter(|irq| irq.role != Role::Other)
    }
}

/// Accepts only names that the kernel accepts, too (`dev_valid_name`), so that a name can never be
/// a path to another file.
pub fn check_name(name: &str) -> Result<(), Error> {
    let bad = |c: char| c == '/' || c == ':' || c.is_whitespace() || c.is_control();
    match name {
        "" | "." | ".." => Err(Error::BadName(name.to_owned())),
        _ if name.len() >= libc::IFNAMSIZ || name.contains(bad) => Err(Error::BadName(name.to_owned())),
        _ => Ok(()),
    }
}

fn is_up(flags: &str) -> bool {
    u32::from_str_radix(flags.trim_start_matches("0x"), 16).is_ok_and(|f| f & libc::IFF_UP as u32 != 0)
}

/// The NUMA node of the parent device. A virtio device has none of its own, but its PCI function
/// has.
fn parent_node(root: &Root, net: &str) -> Option<u32> {
    root.get(format!("{net}/device/../numa_node")).and_then(|n| n.parse().ok())
}

fn rx(root: &Root, net: &str, queue: u32) -> RxQueue {
    let queue = format!("{net}/queues/rx-{queue}");
    RxQueue { rps: mask(root, &format!("{queue}/rps_cpus")), flows: root.number(format!("{queue}/rps_flow_cnt")) }
}

fn tx(root: &Root, net: &str, queue: u32) -> TxQueue {
    let queue = format!("{net}/queues/tx-{queue}");
    TxQueue { xps: mask(root, &format!("{queue}/xps_cpus")), xps_rxqs: mask(root, &format!("{queue}/xps_rxqs")) }
}

/// Reads a mask file. `None`: the kernel lacks the file or refuses to show it (ENOENT for
/// `xps_cpus` of a device with one transmit queue).
fn mask(root: &Root, path: &str) -> Option<CpuSet> {
    CpuSet::parse_mask(&root.get(path)?).ok()
}

/// Whether the name still belongs to the same device. Tells "the device is gone" from other
/// errors.
pub fn still_there(nic: &dyn Nic, ifindex: u32) -> io::Result<bool> {
    match nic.identity() {
        Ok((now, _)) => Ok(now == ifindex),
        Err(e) if e.raw_os_error() == Some(libc::ENODEV) => Ok(false),
        Err(e) => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        for good in ["eth0", "lo", "enp3s0f1np1", "veth.5", "a-b_c"] {
            assert!(check_name(good).is_ok(), "{good}");
        }
        for bad in ["", ".", "..", "a/b", "../x", "eth0:1", "a b", "abcdefghijklmnop", "x\n"] {
            assert!(check_name(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn flags() {
        assert!(is_up("0x1003") && !is_up("0x1002") && !is_up("?"));
    }
}
