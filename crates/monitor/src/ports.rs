//! Leases of client ports, in blocks, so that two connections over shared
//! memory never show the same pair of addresses, nor that of a kernel one.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;

/// Ports of one lease.
pub const BLOCK: u16 = 64;
/// Where leases come from, in order of preference: above the usual ephemeral
/// range, then below it.
const SOURCES: [RangeInclusive<u16>; 2] = [61001..=65535, 10000..=32767];

#[derive(Default)]
pub struct Ports {
    /// First port of each block that is out.
    leased: BTreeSet<u16>,
    /// Where the last search ended; blocks just returned are not reused soon.
    after: usize,
}

/// Every block, first ports.
fn blocks() -> impl Iterator<Item = u16> {
    SOURCES.into_iter().flat_map(|range| {
        let first = range.start().next_multiple_of(BLOCK);
        (first..=range.end() - (BLOCK - 1)).step_by(BLOCK as usize)
    })
}

impl Ports {
    /// Takes a free block none of whose ports is `taken`.
    pub fn lease(&mut self, taken: impl Fn(u16) -> bool) -> Option<u16> {
        let all: Vec<u16> = blocks().collect();
        let found = (0..all.len()).map(|i| (self.after + i) % all.len()).find(|&i| {
            let first = all[i];
            !self.leased.contains(&first) && !(first..=first + (BLOCK - 1)).any(&taken)
        })?;
        self.after = found + 1;
        self.leased.insert(all[found]);
        Some(all[found])
    }

    pub fn give_back(&mut self, first: u16) {
        self.leased.remove(&first);
    }
}

/// The kernel's own ephemeral range and the ports that the administrator
/// reserved.
pub struct KernelPorts {
    ephemeral: RangeInclusive<u16>,
    reserved: Vec<RangeInclusive<u16>>,
}

impl KernelPorts {
    pub fn read() -> KernelPorts {
        let get = |name: &str| std::fs::read_to_string(format!("/proc/sys/net/ipv4/{name}")).unwrap_or_default();
        KernelPorts::parse(&get("ip_local_port_range"), &get("ip_local_reserved_ports"))
    }

    fn parse(range: &str, reserved: &str) -> KernelPorts {
        let mut ends = range.split_whitespace().filter_map(|n| n.parse().ok());
        let ephemeral = ends.next().unwrap_or(32768)..=ends.next().unwrap_or(60999);
        let reserved = reserved
            .trim()
            .split(',')
            .filter_map(|part| {
                let (first, last) = part.split_once('-').unwrap_or((part, part));
                Some(first.parse().ok()?..=last.parse().ok()?)
            })
            .collect();
        KernelPorts { ephemeral, reserved }
    }

    pub fn contains(&self, port: u16) -> bool {
        self.ephemeral.contains(&port) || self.reserved.iter().any(|r| r.contains(&port))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leases_do_not_overlap_and_come_back() {
        let mut ports = Ports::default();
        let kernel = KernelPorts::parse("32768\t60999\n", "62000-62010,63000\n");
        let mut seen = BTreeSet::new();
        while let Some(first) = ports.lease(|p| kernel.contains(p) || p == 20000) {
            for port in first..=first + (BLOCK - 1) {
                assert!(seen.insert(port));
                assert!(SOURCES.iter().any(|s| s.contains(&port)));
            }
        }
        assert!(seen.len() > 20_000);
        for port in [62005, 63000, 20000, 32768, 60999] {
            assert!(!seen.contains(&port));
        }
        let first = *seen.first().unwrap();
        ports.give_back(first);
        assert_eq!(ports.lease(|p| kernel.contains(p) || p == 20000), Some(first));
    }

    #[test]
    fn a_wide_ephemeral_range_leaves_none() {
        let kernel = KernelPorts::parse("1024 65535", "");
        assert_eq!(Ports::default().lease(|p| kernel.contains(p)), None);
    }

    #[test]
    fn garbage_is_survived() {
        let kernel = KernelPorts::parse("", ",x-,-5,7-");
        assert!(kernel.contains(40000) && !kernel.contains(7));
    }
}
