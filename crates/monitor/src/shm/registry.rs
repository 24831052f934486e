//! The registry that clients map read-only: which listeners exist.
//!
//! It is written with atomics, word by word, under a sequence lock. See
//! [`fsocket_proto::registry`].

use crate::foreign::ForeignFd;
use crate::memory::Mapping;
use crate::ChannelId;
use fsocket_proto::registry::lessee;
use fsocket_proto::registry::{Entry, Registry as Layout, Slices, ENTRIES, LOCALS, MAGIC, SIZE, SLICED, SLICE_CPUS};
use fsocket_proto::Addr;
use fsocket_sync::atomic::{fence, AtomicU32, AtomicU64, Ordering};
use rustix::fs::SealFlags;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::mem::offset_of;
use std::rc::Rc;
use zerocopy::IntoBytes;

const WORDS: usize = size_of::<Entry>() / 8;
const _: () = assert!(size_of::<Slices>().is_multiple_of(8) && offset_of!(Slices, first).is_multiple_of(8));
const _: () = assert!(size_of::<Entry>() == 40 && offset_of!(Entry, addr) == 16 && size_of::<Addr>() == 24);

pub struct Registry {
    fd: Rc<ForeignFd>,
    map: Mapping,
    /// Listener number of each entry in use, in order.
    used: Vec<u64>,
}

impl Registry {
    pub fn new() -> io::Result<Registry> {
        let fd = rustix::fs::memfd_create(
            "fastsocket-registry",
            rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::ALLOW_SEALING,
        )?;
        rustix::fs::ftruncate(&fd, SIZE as u64)?;
        let map = Mapping::new(&fd, SIZE)?;
        // Sealed after the monitor has mapped it: from here on no process can map it for writing
        // or write(2) to it.
        rustix::fs::fcntl_add_seals(
            &fd,
            SealFlags::FUTURE_WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL,
        )?;
        let registry = Registry { fd: Rc::new(ForeignFd::new(fd, 0)), map, used: Vec::new() };
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        registry.put(offset_of!(Layout, started), now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000);
        registry.put(offset_of!(Layout, cpus), online_cpus());
        // A random even number, so that it differs from the numbers of former monitors. A reader
        // may switch from one registry to the other between two readings.
        registry.put(offset_of!(Layout, generation), RandomState::new().build_hasher().finish() & !1);
        registry.put(offset_of!(Layout, touched), RandomState::new().build_hasher().finish());
        registry.put(offset_of!(Layout, magic), MAGIC);
        Ok(registry)
    }

    /// The descriptor that clients get.
    pub fn fd(&self) -> Rc<ForeignFd> {
        self.fd.clone()
    }

    pub fn is_full(&self) -> bool {
        self.used.len() >= ENTRIES
    }

    /// Adds a listener. False: there is no room.
    pub fn add(&mut self, listener: u64, netns: u64, addr: &Addr) -> bool {
        if self.is_full() {
            return false;
        }
        let mut words = [0u64; WORDS];
        words[0] = listener;
        words[1] = netns;
        for (entry, bytes) in words[2..5].iter_mut().zip(addr.as_bytes().chunks_exact(8)) {
            *entry = word(bytes);
        }
        let index = self.used.len();
        self.used.push(listener);
        self.change(|r| {
            r.put_entry(index, words);
            r.put(offset_of!(Layout, entries), r.used.len() as u64);
        });
        true
    }

    /// Removes a listener. The last entry moves to its place.
    pub fn remove(&mut self, listener: u64) {
        let Some(index) = self.used.iter().position(|&l| l == listener) else { return };
        self.used.swap_remove(index);
        let last = self.used.len();
        self.change(|r| {
            let moved = std::array::from_fn(|w| r.map.at::<AtomicU64>(entry_off(last) + w * 8).load(Ordering::Relaxed));
            r.put_entry(index, moved);
            r.put_entry(last, [0; WORDS]);
            r.put(offset_of!(Layout, entries), r.used.len() as u64);
        });
    }

    /// Replaces the list of local addresses. It has room for [`LOCALS`] of them.
    pub fn set_locals<'a>(&mut self, addresses: impl Iterator<Item = &'a [u8; 16]>) {
        self.change(|r| {
            let mut count = 0;
            for ip in addresses.take(LOCALS) {
                let off = offset_of!(Layout, local) + count * 16;
                for (i, bytes) in ip.chunks_exact(8).enumerate() {
                    r.put(off + i * 8, word(bytes));
                }
                count += 1;
            }
            r.put(offset_of!(Layout, locals), count as u64);
            r.count_touch();
        });
    }

    /// Tells libraries that connections between network namespaces may move to shared memory from
    /// now on.
    pub fn set_pairs(&mut self) {
        self.change(|r| r.put(offset_of!(Layout, pairs), 1));
    }

    /// Replaces the slices of source ports: network namespace, first port, ports in a slice, CPU
    /// of each slice. There is room for [`SLICED`] namespaces and [`SLICE_CPUS`] CPUs. Connections
    /// of others take any port.
    pub fn set_slices<'a>(&mut self, all: impl Iterator<Item = (u64, u16, u32, &'a [u32])>) {
        self.change(|r| {
            let mut count = 0;
            for (netns, first, ports, cpus) in all.take(SLICED) {
                let off = offset_of!(Layout, slices) + count * size_of::<Slices>();
                let mut by_cpu = [0u16; SLICE_CPUS];
                for (slice, cpu) in cpus.iter().enumerate() {
                    if let Some(entry) = by_cpu.get_mut(*cpu as usize) {
                        *entry = slice as u16 + 1;
                    }
                }
                r.put(off + offset_of!(Slices, netns), netns);
                let both = [u32::from(first).to_ne_bytes(), ports.to_ne_bytes()].concat();
                r.put(off + offset_of!(Slices, first), word(&both));
                for (i, bytes) in by_cpu.as_bytes().chunks_exact(8).enumerate() {
                    r.put(off + offset_of!(Slices, by_cpu) + i * 8, word(bytes));
                }
                count += 1;
            }
            r.put(offset_of!(Layout, sliced), count as u64);
        });
    }

    /// Records which channel has leased these ports. This is done before the client learns of the
    /// lease.
    pub fn set_owner(&self, ports: impl Iterator<Item = u16>, channel: ChannelId) {
        ports.for_each(|port| self.owner_of(port).store(lessee(channel), Ordering::Release));
    }

    /// Counts one more channel to a listener at this port.
    pub fn serves(&self, port: u16) {
        let channels = self.channels_on(port);
        channels.store(channels.load(Ordering::Relaxed).saturating_add(1), Ordering::Release);
    }

    /// Counts one channel less.
    pub fn serves_no_more(&self, port: u16) {
        let channels = self.channels_on(port);
        channels.store(channels.load(Ordering::Relaxed).saturating_sub(1), Ordering::Release);
    }

    fn channels_on(&self, port: u16) -> &AtomicU32 {
        self.map.at(offset_of!(Layout, served) + usize::from(port) * size_of::<AtomicU32>())
    }

    /// The [`lessee`] that owns this port; 0: none.
    pub fn owner(&self, port: u16) -> u32 {
        self.owner_of(port).load(Ordering::Relaxed)
    }

    fn owner_of(&self, port: u16) -> &AtomicU32 {
        self.map.at(offset_of!(Layout, owner) + usize::from(port) * size_of::<AtomicU32>())
    }

    /// Makes readers ask the monitor again, although nothing here has changed.
    pub fn touch(&mut self) {
        self.change(Self::count_touch);
    }

    fn count_touch(&mut self) {
        let touched = self.map.at::<AtomicU64>(offset_of!(Layout, touched)).load(Ordering::Relaxed);
        self.put(offset_of!(Layout, touched), touched.wrapping_add(1));
    }

    fn change(&mut self, f: impl FnOnce(&mut Self)) {
        let generation = |r: &Self, order| r.map.at::<AtomicU64>(offset_of!(Layout, generation)).fetch_add(1, order);
        generation(self, Ordering::Relaxed);
        // Readers see the odd number before they see any part of the change. This fence pairs with
        // the reader's acquire fence before it reads `generation` again.
        fence(Ordering::Release);
        f(self);
        // Release: readers see the even number only after the whole change.
        generation(self, Ordering::Release);
    }

    fn put_entry(&self, index: usize, words: [u64; WORDS]) {
        for (i, word) in words.into_iter().enumerate() {
            self.put(entry_off(index) + i * 8, word);
        }
    }

    fn put(&self, off: usize, value: u64) {
        self.map.at::<AtomicU64>(off).store(value, Ordering::Relaxed);
    }
}

fn word(bytes: &[u8]) -> u64 {
    u64::from_ne_bytes(bytes.try_into().expect("eight bytes"))
}

fn entry_off(index: usize) -> usize {
    offset_of!(Layout, entry) + index * size_of::<Entry>()
}

/// Number of online CPUs; 0 if unknown.
fn online_cpus() -> u64 {
    // SAFETY: sysconf has no preconditions.
    unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) }.max(0) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listeners(r: &Registry) -> Vec<u64> {
        let n = r.map.at::<AtomicU64>(offset_of!(Layout, entries)).load(Ordering::Relaxed) as usize;
        (0..n).map(|i| r.map.at::<AtomicU64>(entry_off(i)).load(Ordering::Relaxed)).collect()
    }

    #[test]
    fn stays_compact_and_even() {
        let mut r = Registry::new().unwrap();
        for id in 1..=3 {
            assert!(r.add(id, 9, &Addr { port: id as u16, ..Default::default() }));
        }
        r.remove(1);
        assert_eq!(listeners(&r), [3, 2]);
        r.remove(2);
        r.remove(77);
        assert_eq!(listeners(&r), [3]);
        r.remove(3);
        assert!(listeners(&r).is_empty());
        assert_eq!(r.map.at::<AtomicU64>(offset_of!(Layout, generation)).load(Ordering::Relaxed) % 2, 0);
    }

    #[test]
    fn nobody_else_can_write() {
        let r = Registry::new().unwrap();
        assert!(Mapping::new(r.fd.as_fd(), SIZE).is_err());
        assert!(rustix::io::write(r.fd.as_fd(), &[1]).is_err());
    }

    #[test]
    fn full_is_full() {
        let mut r = Registry::new().unwrap();
        for id in 1..=ENTRIES as u64 {
            assert!(r.add(id, 0, &Addr::default()));
        }
        assert!(!r.add(9999, 0, &Addr::default()));
    }
}
