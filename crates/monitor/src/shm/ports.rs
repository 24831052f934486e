//! Leases of client ports, in blocks. They make sure that two connections never show the same pair
//! of addresses: neither two over shared memory, nor one over shared memory and one in the kernel.

use crate::sockdiag::SockDiag;
use rustix::fd::{AsRawFd, OwnedFd};
use std::collections::BTreeSet;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Ports of one lease.
pub const BLOCK: u16 = 64;
/// Where leases come from: above the default ephemeral range, or below it if no block is free
/// there. Below it, servers use fixed ports, and a connection that has moved to the kernel would
/// occupy one.
const SOURCES: [RangeInclusive<u16>; 2] = [61001..=65535, 10000..=32767];

pub struct Ports {
    /// First port of each leased block.
    leased: BTreeSet<u16>,
    /// Where the last search ended in each of [`SOURCES`], so that returned blocks are not reused
    /// soon.
    after: [usize; SOURCES.len()],
    kernel: KernelPorts,
    /// A file in which each lease locks its first port: monitors of two ABIs lease from the same
    /// ports.
    among: Option<OwnedFd>,
}

/// The first port of each block of a source.
fn blocks(range: &RangeInclusive<u16>) -> impl Iterator<Item = u16> {
    let first = range.start().next_multiple_of(BLOCK);
    (first..=range.end() - (BLOCK - 1)).step_by(BLOCK as usize)
}

impl Ports {
    /// `kernel`: the kernel's ports, read when the monitor starts.
    pub fn new(kernel: KernelPorts) -> Ports {
        // The search starts at a random block: ports near the start of the former monitor's search
        // may be in TIME_WAIT after their connections moved to the kernel, and then cannot be
        // bound.
        let any = RandomState::new().build_hasher().finish() as usize;
        let after = SOURCES.each_ref().map(|source| any % blocks(source).count().max(1));
        Ports { leased: BTreeSet::new(), after, kernel, among: None }
    }

    /// Shares the ports with other monitors, through this file.
    #[must_use]
    pub fn among(self, file: Option<OwnedFd>) -> Ports {
        Ports { among: file, ..self }
    }

    /// Locks or unlocks a block (`kind`). False: another monitor has leased it.
    fn lock(&self, first: u16, kind: libc::c_int) -> bool {
        let Some(file) = &self.among else { return true };
        // SAFETY: all zeros is a valid `struct flock`.
        let mut lock: libc::flock = unsafe { std::mem::zeroed() };
        (lock.l_type, lock.l_whence) = (kind as libc::c_short, libc::SEEK_SET as libc::c_short);
        (lock.l_start, lock.l_len) = (first.into(), 1);
        // SAFETY: the structure lives during the call.
        let rc = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) };
        // (If the file system has no locks, two monitors may lease the same ports. Then two
        // connections to one listener may show the same addresses, if their programs use different
        // monitors.)
        rc == 0 || !matches!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EAGAIN | libc::EACCES))
    }

    /// Leases a free block without reserved ports and ports of listeners. It is outside of the
    /// kernel's ephemeral range if possible. (Some administrators widen that range to all ports.)
    /// Inside the range, a kernel connection may show the same pair of addresses at the same time.
    pub fn lease(&mut self, listened: impl Fn(u16) -> bool) -> Option<u16> {
        self.kernel.look();
        let never = |p| listened(p) || self.kernel.reserved(p);
        let rests = |p| self.kernel.rests(p);
        let ephemeral = |p| self.kernel.ephemeral.contains(&p);
        let (source, at, first) = self
            .find(&|p| never(p) || rests(p) || ephemeral(p))
            .or_else(|| self.find(&|p| never(p) || ephemeral(p)))
            .or_else(|| self.find(&never))?;
        self.after[source] = at + 1;
        self.leased.insert(first);
        Some(first)
    }

    /// Finds and locks a free block without a port to `avoid`. Returns the source, the index in
    /// it, and the block's first port.
    fn find(&self, avoid: &dyn Fn(u16) -> bool) -> Option<(usize, usize, u16)> {
        SOURCES.iter().zip(self.after).enumerate().find_map(|(source, (range, after))| {
            let all: Vec<u16> = blocks(range).collect();
            let places = (after..after + all.len()).map(|i| i % all.len());
            let free = |first: &u16| {
                let is_free = !self.leased.contains(first) && !(*first..=first + (BLOCK - 1)).any(avoid);
                is_free && self.lock(*first, libc::F_WRLCK)
            };
            places.map(|at| (source, at, all[at])).find(|(.., first)| free(first))
        })
    }

    /// Leases the block that begins with `first` again, because connections from a former monitor
    /// use it. False: there is no such block, or it is leased already.
    pub fn take(&mut self, first: u16) -> bool {
        let is_free = SOURCES.iter().flat_map(blocks).any(|block| block == first) && !self.leased.contains(&first);
        is_free && self.lock(first, libc::F_WRLCK) && self.leased.insert(first)
    }

    /// Lets a thread ask the kernel for the ports in use. The kernel then walks through large
    /// tables, which takes 10 ms each on machines with much memory, or longer. Otherwise the first
    /// client would wait for that.
    pub fn ask_beside(&mut self) {
        self.kernel.asked = std::thread::Builder::new().name("ports".into()).spawn(ports_in_use).ok();
    }

    pub fn give_back(&mut self, first: u16) {
        if self.leased.remove(&first) {
            self.lock(first, libc::F_UNLCK);
        }
    }
}

/// The kernel's ephemeral range and reserved ports, and the ports of connections that existed when
/// the monitor started or first leased a block.
pub struct KernelPorts {
    ephemeral: RangeInclusive<u16>,
    reserved: Vec<RangeInclusive<u16>>,
    /// The file from which `reserved` is read again for each lease.
    source: Option<PathBuf>,
    /// `None`: not asked yet, or the thread has not answered yet.
    used: Option<BTreeSet<u16>>,
    asked: Option<JoinHandle<BTreeSet<u16>>>,
    since: Instant,
}

/// How long a port may stay in TIME_WAIT.
const REST: Duration = Duration::from_secs(60);

impl KernelPorts {
    pub fn read() -> KernelPorts {
        let sysctls = Path::new("/proc/sys/net/ipv4");
        let source = sysctls.join("ip_local_reserved_ports");
        let get = |path: &Path| std::fs::read_to_string(path).unwrap_or_default();
        let kernel = KernelPorts::parse(&get(&sysctls.join("ip_local_port_range")), &get(&source));
        KernelPorts { used: None, source: Some(source), ..kernel }
    }

    /// Reads the reserved ports. Asks for the ports in use once, and only while they may still be
    /// in TIME_WAIT.
    fn look(&mut self) {
        if let Some(text) = self.source.as_ref().and_then(|path| std::fs::read_to_string(path).ok()) {
            self.reserved = reserved(&text);
        }
        if self.since.elapsed() >= REST || self.used.is_some() {
            return;
        }
        let asked = self.asked.take().and_then(|thread| thread.join().ok());
        self.used = Some(asked.unwrap_or_else(ports_in_use));
    }

    /// Whether this port was in use at the start and may still be in TIME_WAIT.
    fn rests(&self, port: u16) -> bool {
        self.since.elapsed() < REST && self.used.as_ref().is_some_and(|used| used.contains(&port))
    }

    fn parse(range: &str, reserved: &str) -> KernelPorts {
        let mut ends = range.split_whitespace().filter_map(|n| n.parse().ok());
        let ephemeral = ends.next().unwrap_or(32768)..=ends.next().unwrap_or(60999);
        let reserved = self::reserved(reserved);
        KernelPorts {
            ephemeral,
            reserved,
            source: None,
            used: Some(BTreeSet::new()),
            asked: None,
            since: Instant::now(),
        }
    }

    pub fn reserved(&self, port: u16) -> bool {
        self.reserved.iter().any(|r| r.contains(&port))
    }
}

/// The port ranges in the text of `ip_local_reserved_ports`.
fn reserved(text: &str) -> Vec<RangeInclusive<u16>> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.parse().ok()?..=last.parse().ok()?)
    };
    text.trim().split(',').filter_map(range).collect()
}

/// The local ports of all the kernel's sockets.
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
    fn ports_of_servers_are_leased_only_when_no_others_are_free() {
        let mut ports = Ports::new(KernelPorts::parse("32768 60999", ""));
        let above = blocks(&SOURCES[0]).count();
        for round in 0..3 {
            let some: Vec<u16> = (0..above).map(|_| ports.lease(|_| false).unwrap()).collect();
            assert!(some.iter().all(|first| SOURCES[0].contains(first)), "round {round}");
            some.into_iter().for_each(|first| ports.give_back(first));
        }
        for _ in 0..above {
            ports.lease(|_| false).unwrap();
        }
        assert!(SOURCES[1].contains(&ports.lease(|_| false).unwrap()));
    }

    #[test]
    fn what_an_operator_reserves_later_is_not_leased() {
        let path = std::env::temp_dir().join(format!("fastsocket-reserved-{}", std::process::id()));
        std::fs::write(&path, "\n").unwrap();
        let kernel = KernelPorts { source: Some(path.clone()), ..KernelPorts::parse("32768 60999", "") };
        let mut ports = Ports::new(kernel);
        assert!(ports.lease(|_| false).is_some_and(|first| first > 61000));
        std::fs::write(&path, "61001-65535,10000-20000\n").unwrap();
        assert!(ports.lease(|_| false).is_some_and(|first| first > 20000 && first < 32768));
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn two_monitors_lease_different_blocks() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let [mut one, mut other] = [(), ()].map(|()| {
            let own = std::fs::OpenOptions::new().write(true).open(file.path()).unwrap();
            Ports::new(KernelPorts::parse("32768 60999", "")).among(Some(own.into()))
        });
        let first = one.lease(|_| false).unwrap();
        assert!(!other.take(first) && !one.take(first));
        let mut rest = Vec::new();
        while let Some(block) = other.lease(|_| false) {
            rest.push(block);
        }
        assert_eq!(rest.len() + 1, SOURCES.iter().flat_map(blocks).count());
        assert!(!rest.contains(&first) && one.lease(|_| false).is_none());
        one.give_back(first);
        assert_eq!(other.lease(|_| false), Some(first));
        drop(other);
        assert!(one.take(rest[0]), "they end with the monitor");
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
        // Ports that may be in TIME_WAIT come last.
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
