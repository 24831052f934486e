//! Source-port slices: an active connection takes its source port from a slice, so that the port
//! tells which CPU opened the connection (the paper's `hash(p)`).
//!
//! The paper hashes the low bits of the port. But a stock kernel lets a socket have only one
//! contiguous range of ports (`IP_LOCAL_PORT_RANGE`). So a slice here is a block of ports,
//! aligned to its size, which is a power of two. A network card can match it with a mask, and XDP
//! with a shift.

use std::ops::RangeInclusive;

/// Number of ports of one entry of the map `slices` in `steer.bpf.c`, which is the smallest size
/// of a slice.
pub const GRANULE: u32 = 16;

/// Slices of equal size, one for each CPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slices {
    /// First port of the first slice.
    pub first: u16,
    /// Number of ports of a slice, a power of two.
    pub ports: u32,
    /// The CPU of each slice, in order.
    pub cpus: Vec<u32>,
}

impl Slices {
    /// The largest equal slices that fit into `range` (`net.ipv4.ip_local_port_range`), one for
    /// each of `cpus`. None: they would be smaller than [`GRANULE`], or `cpus` is empty.
    pub fn new(range: RangeInclusive<u16>, cpus: &[u32]) -> Option<Slices> {
        // A port below 1024 would make the first rule of the classification wrong.
        let (low, end) = (u32::from(*range.start()).max(1024), u32::from(*range.end()) + 1);
        let needed = cpus.len() as u32;
        if needed == 0 {
            return None;
        }
        let mut ports = 1 << 15;
        while ports >= GRANULE {
            let first = low.next_multiple_of(ports);
            if first < end && (end - first) / ports >= needed {
                return Some(Slices { first: first as u16, ports, cpus: cpus.to_vec() });
            }
            ports /= 2;
        }
        None
    }

    /// The ports of slice `index`.
    pub fn range(&self, index: usize) -> RangeInclusive<u16> {
        let low = u32::from(self.first) + self.ports * index as u32;
        low as u16..=(low + self.ports - 1) as u16
    }

    /// The CPU to whose slice `port` belongs.
    pub fn cpu_of(&self, port: u16) -> Option<u32> {
        let index = u32::from(port).checked_sub(u32::from(self.first))? / self.ports;
        self.cpus.get(index as usize).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Debian's default.
    const RANGE: RangeInclusive<u16> = 32768..=60999;

    fn cpus(n: u32) -> Vec<u32> {
        (0..n).collect()
    }

    #[test]
    fn slices_are_aligned_disjoint_and_inside() {
        for n in 1..=512 {
            let slices = Slices::new(RANGE, &cpus(n)).unwrap();
            assert!(slices.ports.is_power_of_two() && slices.ports >= GRANULE, "{n} CPUs");
            let mut end = None;
            for i in 0..n as usize {
                let range = slices.range(i);
                assert_eq!(u32::from(*range.start()) % slices.ports, 0, "a NIC must match it with a mask");
                assert!(end < Some(*range.start()) && RANGE.contains(range.start()) && RANGE.contains(range.end()));
                assert_eq!(slices.cpu_of(*range.start()), Some(i as u32));
                assert_eq!(slices.cpu_of(*range.end()), Some(i as u32));
                end = Some(*range.end());
            }
        }
    }

    #[test]
    fn largest_that_fits() {
        assert_eq!(Slices::new(RANGE, &cpus(2)).unwrap().ports, 8192);
        assert_eq!(Slices::new(RANGE, &cpus(24)).unwrap().ports, 1024);
        assert_eq!(Slices::new(1024..=65535, &cpus(2)).unwrap().ports, 16384);
        let all = Slices::new(0..=65535, &cpus(1)).unwrap();
        assert_eq!((all.first, all.range(0)), (32768, 32768..=65535));
    }

    #[test]
    fn too_little_is_nothing() {
        assert_eq!(Slices::new(RANGE, &[]), None);
        assert_eq!(Slices::new(40000..=40010, &cpus(1)), None);
        assert_eq!(Slices::new(RANGE, &cpus(4096)), None);
    }

    #[test]
    fn ports_outside_have_no_cpu() {
        let slices = Slices::new(RANGE, &[5, 9]).unwrap();
        assert_eq!(slices.cpu_of(80), None);
        assert_eq!(slices.cpu_of(32768), Some(5));
        assert_eq!(slices.cpu_of(32768 + 8192), Some(9));
        assert_eq!(slices.cpu_of(32768 + 2 * 8192), None);
    }
}
