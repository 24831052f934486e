//! Leases of client ports, in blocks, so that two connections over shared
//! memory never show the same pair of addresses, nor that of a kernel one.

use crate::sockdiag::SockDiag;
use std::collections::BTreeSet;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::ops::RangeInclusive;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Ports of one lease.
pub const BLOCK: u16 = 64;
/// Where leases come from, in order of preference: above the usual ephemeral
/// range, then below it.
const SOURCES: [RangeInclusive<u16>; 2] = [61001..=65535, 10000..=32767];

pub struct Ports {
    /// First port of each block that is out.
    leased: BTreeSet<u16>,
    /// Where the last search ended; blocks just returned are not reused soon.
    after: usize,
    kernel: KernelPorts,
}

/// Every block, first ports.
fn blocks() -> impl Iterator<Item = u16> {
    SOURCES.into_iter().flat_map(|range| {
        let first = range.start().next_multiple_of(BLOCK);
        (first..=range.end() - (BLOCK - 1)).step_by(BLOCK as usize)
    })
}

impl Ports {
    /// `kernel`: as read when the monitor starts.
    pub fn new(kernel: KernelPorts) -> Ports {
        // Not where the monitor before this one began, in another network namespace perhaps: ports of
        // connections of its that have become the kernel's may be in TIME_WAIT, and then cannot be bound.
        let preferred = blocks().filter(|first| SOURCES[0].contains(first)).count();
        let any = RandomState::new().build_hasher().finish() as usize;
        Ports { leased: BTreeSet::new(), after: any % preferred.max(1), kernel }
    }

    /// Takes a free block none of whose ports is reserved or `listened` on:
    /// outside of the kernel's ephemeral range if there is one, else (some
    /// administrators widen that range to everything) inside. A kernel
    /// connection may then show the same pair of addresses at the same time.
    pub fn lease(&mut self, listened: impl Fn(u16) -> bool) -> Option<u16> {
        self.kernel.look();
        let all: Vec<u16> = blocks().collect();
        let free = |i: usize, avoid: &dyn Fn(u16) -> bool| {
            let first = all[i % all.len()];
            !self.leased.contains(&first) && !(first..=first + (BLOCK - 1)).any(avoid)
        };
        let never = |p| listened(p) || self.kernel.reserved(p);
        let rests = |p| self.kernel.rests(p);
        let found = (self.after..self.after + all.len())
            .find(|&i| free(i, &|p| never(p) || rests(p) || self.kernel.ephemeral.contains(&p)))
            .or_else(|| {
                let usual = |p| never(p) || self.kernel.ephemeral.contains(&p);
                (self.after..self.after + all.len()).find(|&i| free(i, &usual))
            })
            .or_else(|| (self.after..self.after + all.len()).find(|&i| free(i, &never)))?;
        self.after = (found + 1) % all.len();
        let first = all[found % all.len()];
        self.leased.insert(first);
        Some(first)
    }

    /// Takes the block that begins with `first`, which is in use since a monitor before this one. False:
    /// there is none, or it is out.
    pub fn take(&mut self, first: u16) -> bool {
        blocks().any(|block| block == first) && self.leased.insert(first)
    }

    /// A thread asks the kernel for the ports in use. It walks through tables, 10 ms each where memory is large, and longer
    /// on a busy machine; the first client would wait for that.
    pub fn ask_beside(&mut self) {
        self.kernel.asked = std::thread::Builder::new().name("ports".into()).spawn(ports_in_use).ok();
    }

    pub fn give_back(&mut self, first: u16) {
        self.leased.remove(&first);
    }
}

/// The kernel's own ephemeral range, the ports that the administrator reserved, and those of the
/// connections that there were when it was asked for them: then, or when the first was leased.
pub struct KernelPorts {
    ephemeral: RangeInclusive<u16>,
    reserved: Vec<RangeInclusive<u16>>,
    /// None: not asked yet, or the answer is still to come.
    used: Option<BTreeSet<u16>>,
    asked: Option<JoinHandle<BTreeSet<u16>>>,
    since: Instant,
}

/// How long a port may be in TIME_WAIT.
const REST: Duration = Duration::from_secs(60);

impl KernelPorts {
    pub fn read() -> KernelPorts {
        let get = |name: &str| std::fs::read_to_string(format!("/proc/sys/net/ipv4/{name}")).unwrap_or_default();
        let kernel = KernelPorts::parse(&get("ip_local_port_range"), &get("ip_local_reserved_ports"));
        KernelPorts { used: None, ..kernel }
    }

    /// Asks the kernel for `used`, once, and only while anything of before can still rest.
    fn look(&mut self) {
        if self.since.elapsed() >= REST || self.used.is_some() {
            return;
        }
        let asked = self.asked.take().and_then(|thread| thread.join().ok());
        self.used = Some(asked.unwrap_or_else(ports_in_use));
    }

    /// Was this one in use at the start, and may still be in TIME_WAIT?
    fn rests(&self, port: u16) -> bool {
        self.since.elapsed() < REST && self.used.as_ref().is_some_and(|used| used.contains(&port))
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
        KernelPorts { ephemeral, reserved, used: Some(BTreeSet::new()), asked: None, since: Instant::now() }
    }

    pub fn reserved(&self, port: u16) -> bool {
        self.reserved.iter().any(|r| r.contains(&port))
    }
}

/// Local ports of the kernel's sockets.
fn ports_in_use() -> BTreeSet<u16> {
    let asked = |connected| SockDiag::open().ok()?.local_ports(connected);
    [true, false].into_iter().filter_map(asked).flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leases_do_not_overlap_and_come_back() {
        let mut ports = Ports::new(KernelPorts::parse("32768\t60999\n", "62000-62010,63000\n"));
        let mut seen = BTreeSet::new();
        while let Some(first) = ports.lease(|p| p == 20000) {
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
        assert_eq!(ports.lease(|p| p == 20000), Some(first));
    }

    #[test]
    fn a_wide_ephemeral_range_does_not_switch_us_off() {
        let mut ports = Ports::new(KernelPorts::parse("1024 65535", "62000"));
        let mut n = 0;
        while let Some(first) = ports.lease(|_| false) {
            assert!(!(first..=first + (BLOCK - 1)).contains(&62000));
            n += 1;
        }
        assert!(n > 400);
    }

    #[test]
    fn the_ephemeral_range_is_avoided_while_possible() {
        let mut ports = Ports::new(KernelPorts::parse("20000 65535", ""));
        for _ in 0..100 {
            assert!(ports.lease(|_| false).unwrap() < 20000);
        }
    }

    #[test]
    fn ports_of_connections_that_there_were_rest() {
        let used: BTreeSet<u16> = (61001..=65000).collect();
        let mut ports = Ports::new(KernelPorts { used: Some(used.clone()), ..KernelPorts::parse("32768 60999", "") });
        let mut all = Vec::new();
        while let Some(first) = ports.lease(|_| false) {
            all.push(first);
        }
        // They come last.
        let rested = all.iter().position(|first| used.contains(first)).expect("given in the end");
        assert!(all[rested..].iter().all(|first| (*first..=first + (BLOCK - 1)).any(|p| used.contains(&p))));
        assert!(rested > 300);
        ports.give_back(all[rested]);
        ports.kernel.since -= REST;
        assert_eq!(ports.lease(|_| false), Some(all[rested]));
    }

    #[test]
    fn the_kernel_is_asked_beside() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut ports = Ports::new(KernelPorts::read());
        ports.ask_beside();
        assert!(ports.kernel.asked.is_some());
        ports.lease(|_| false).unwrap();
        assert!(ports.kernel.rests(listener.local_addr().unwrap().port()));
    }

    #[test]
    fn garbage_is_survived() {
        let kernel = KernelPorts::parse("", ",x-,-5,7-");
        assert!(kernel.ephemeral.contains(&40000) && !kernel.reserved(7));
    }
}
