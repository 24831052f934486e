//! Arenas: counters and sockets of process families.

use crate::foreign::{ForeignFd, ForeignMap};
use crate::lifeline::Lifeline;
use crate::memory::{FileId, Mapping};
use crate::{ConnId, FamilyId, Rights};
use fsocket_abi::arena::{
    Counter, Header, Stats, Zone, ARENA_SIZE, COUNTERS, HELD, MAGIC, NEWS, SOCKS, SOCK_OFF, STATS_OFF, ZONES, ZONE_OFF,
};
use fsocket_abi::sock::Sock;
use fsocket_sync::atomic::{AtomicU32, AtomicU64, Ordering};
use fsocket_sync::news::News;
use rustix::fs::{SealFlags, SeekFrom};
use rustix::io::Errno;
use rustix::thread::futex;
use std::collections::{BTreeMap, BTreeSet};
use std::mem::offset_of;
use std::ops::Range;
use std::rc::Rc;

/// `f_type` of its files, magic.h.
const HUGETLBFS: i64 = 0x958458f6;

/// Values of all counters, by index.
pub type Totals = [u64; COUNTERS.len()];

/// Accepted connections, by zone and kind.
pub type ZoneTotals = BTreeMap<u32, [u64; 4]>;

pub struct ArenaMem {
    map: ForeignMap,
    /// Also for a process that gets it through `exec`.
    pub fd: Rc<ForeignFd>,
    file: FileId,
}

impl ArenaMem {
    /// Checks and maps an arena that a process sent.
    ///
    /// # Errors
    /// EINVAL: not a memfd of the right size with the right seals (it could
    /// shrink under us) or without our magic; EPROTO: another version.
    pub fn open(fd: ForeignFd) -> Result<ArenaMem, Errno> {
        let of = fd.as_fd();
        let needed = SealFlags::SHRINK | SealFlags::GROW;
        if !rustix::fs::fcntl_get_seals(of)?.contains(needed) || rustix::fs::fstat(of)?.st_size != ARENA_SIZE as i64 {
            return Err(Errno::INVAL);
        }
        // Huge pages may be missing: to read them would end this process.
        if rustix::fs::fstatfs(of)?.f_type as i64 == HUGETLBFS {
            return Err(Errno::INVAL);
        }
        let map = Mapping::new(of, ARENA_SIZE)
            .map_err(|e| e.raw_os_error().map_or(Errno::NOMEM, Errno::from_raw_os_error))?;
        let map = ForeignMap::new(map, fd.uid());
        if map.at::<AtomicU64>(offset_of!(Header, magic)).load(Ordering::Acquire) != MAGIC {
            return Err(Errno::INVAL);
        }
        if map.at::<AtomicU32>(offset_of!(Header, version)).load(Ordering::Acquire) != fsocket_abi::VERSION {
            return Err(Errno::PROTO);
        }
        Ok(ArenaMem { map, file: FileId::of(of)?, fd: Rc::new(fd) })
    }

    /// Tells the library whether there is something `new` to read, and whether more follows when that is read.
    pub fn tell_pending(&self, new: bool, held: bool) {
        let pending = self.map.at::<AtomicU32>(offset_of!(Header, pending));
        let told = pending.load(Ordering::Relaxed);
        let count = told.wrapping_add(new.into()) & !HELD;
        let tells = count | if held { HELD } else { 0 };
        if tells != told {
            // Release: after the message itself; the library's acquire load of
            // `pending` is followed by a receive. (Nobody else counts.)
            pending.store(tells, Ordering::Release);
        }
    }

    /// Threads that sleep on a connection, and whose peer may have moved them to another word, look again.
    pub fn tell_news(&self, index: usize) {
        let news = self.map.at::<News>(offset_of!(Header, news) + index % NEWS * size_of::<News>());
        if news.tell() {
            let _ = futex::wake(news.word(), futex::Flags::empty(), i32::MAX as u32);
        }
    }

    /// Numbers of the next sockets from `from` on that have memory; None: there are no more. To read a hole would
    /// fill it, in our name: who says that all 65,536 are in use must have the memory for that.
    pub fn run(&self, from: usize) -> Option<Range<usize>> {
        let high = self.map.at::<AtomicU32>(offset_of!(Header, high_water)).load(Ordering::Acquire);
        let high = SOCKS.min(high as usize);
        if from >= high {
            return None;
        }
        let at = |i: usize| (SOCK_OFF + i * size_of::<Sock>()) as u64;
        let number = |off: u64| off.saturating_sub(SOCK_OFF as u64) as usize / size_of::<Sock>();
        let data = rustix::fs::seek(self.fd.as_fd(), SeekFrom::Data(at(from))).ok()?;
        let end = rustix::fs::seek(self.fd.as_fd(), SeekFrom::Hole(data)).ok()?;
        // (A page has whole sockets.)
        let run = number(data).max(from)..number(end).min(high);
        (!run.is_empty()).then_some(run)
    }

    pub fn sock(&self, number: usize) -> &Sock {
        self.map.at(SOCK_OFF + number * size_of::<Sock>())
    }

    pub fn is_open(sock: &Sock) -> bool {
        !sock.is_free()
    }

    /// Every socket that is in use; never more than there is room for.
    pub fn open_socks(&self) -> impl Iterator<Item = &Sock> {
        let runs = std::iter::successors(self.run(0), |run| self.run(run.end));
        runs.flatten().map(|i| self.sock(i)).filter(|s| Self::is_open(s))
    }

    /// Bytes of memory behind it.
    pub fn resident(&self) -> u64 {
        rustix::fs::fstat(self.fd.as_fd()).map_or(0, |st| st.st_blocks as u64 * 512)
    }

    pub fn stats(&self) -> &Stats {
        self.map.at(STATS_OFF)
    }

    pub fn count(&self, counter: Counter, n: u64) {
        self.stats().counter[counter as usize].fetch_add(n, Ordering::Relaxed);
    }

    /// Name of the program, whatever bytes are there.
    pub fn comm(&self) -> String {
        printable(&std::array::from_fn(|i| self.stats().comm[i].load(Ordering::Relaxed)))
    }

    /// Counters with the bytes of sockets that are still open.
    pub fn live_counters(&self) -> Totals {
        let mut sum: Totals = std::array::from_fn(|i| self.stats().counter[i].load(Ordering::Relaxed));
        for sock in self.open_socks() {
            add(&mut sum[Counter::TxBytes as usize], sock.tx.bytes());
            add(&mut sum[Counter::RxBytes as usize], sock.rx.bytes());
        }
        sum
    }

    /// Accepted connections of each zone that accepted any.
    pub fn zones(&self) -> impl Iterator<Item = (u32, [u64; 4])> + '_ {
        let read = |z: &Zone| std::array::from_fn(|i| z.accepted[i].load(Ordering::Relaxed));
        self.each_zone().map(move |(cpu, z)| (cpu, read(z))).filter(|(_, a)| *a != [0; 4])
    }

    /// Moves what was accepted into `totals`.
    pub fn fold_zones(&self, totals: &mut ZoneTotals) {
        for (cpu, zone) in self.each_zone() {
            let accepted: [u64; 4] = std::array::from_fn(|i| zone.accepted[i].swap(0, Ordering::Relaxed));
            if accepted != [0; 4] {
                let all = totals.entry(cpu).or_default();
                for (sum, n) in all.iter_mut().zip(accepted) {
                    add(sum, n);
                }
            }
        }
    }

    fn each_zone(&self) -> impl Iterator<Item = (u32, &Zone)> {
        // CPUs of this machine: the pages of others are never touched.
        let cpus = crate::cpus::possible_cpus().min(ZONES) as u32;
        (0..cpus).map(|z| (z, self.map.at::<Zone>(ZONE_OFF + z as usize * size_of::<Zone>())))
    }

    /// Moves the counters into `totals`.
    pub fn fold(&self, totals: &mut Totals) {
        for (total, counter) in totals.iter_mut().zip(&self.stats().counter) {
            add(total, counter.swap(0, Ordering::Relaxed));
        }
    }
}

/// Text up to the first NUL that does nothing to a terminal.
pub fn printable(bytes: &[u8; 16]) -> String {
    let text = bytes.split(|b| *b == 0).next().unwrap_or_default();
    String::from_utf8_lossy(text).chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// Values come from clients; a sum of them must not wrap.
pub fn add(total: &mut u64, n: u64) {
    *total = total.saturating_add(n);
}

pub fn add_all(totals: &mut Totals, more: &Totals) {
    for (total, n) in totals.iter_mut().zip(more) {
        add(total, *n);
    }
}

/// Counts of processes that have ended, by user.
#[derive(Default)]
pub struct Ended {
    pub counters: BTreeMap<u32, Totals>,
    pub zones: BTreeMap<u32, ZoneTotals>,
}

impl Ended {
    /// Adds the counts of a process without an arena.
    pub fn add(&mut self, told: &Totals, uid: u32) {
        add_all(self.counters.entry(uid).or_insert([0; COUNTERS.len()]), told);
    }

    /// Something has happened to a connection of a process that has ended.
    pub fn count(&mut self, uid: u32, counter: Counter) {
        add(&mut self.counters.entry(uid).or_insert([0; COUNTERS.len()])[counter as usize], 1);
    }

    /// Moves the counters of an arena here.
    pub fn fold(&mut self, mem: &ArenaMem, uid: u32) {
        mem.fold(self.counters.entry(uid).or_insert([0; COUNTERS.len()]));
        mem.fold_zones(self.zones.entry(uid).or_default());
    }
}

pub struct Arena {
    pub creator: ConnId,
    pub family: FamilyId,
    pub uid: u32,
    /// The user of the processes that have shown it.
    pub rights: Rights,
    /// Live processes that have mapped the arena: its creator and those forked since.
    pub users: BTreeSet<ConnId>,
    pub mem: Rc<ArenaMem>,
    /// Tells the processes of the arena when the monitor dies.
    pub lifeline: Option<Lifeline>,
}

#[derive(Default)]
pub struct Arenas {
    all: Vec<Arena>,
}

impl Arenas {
    pub fn iter(&self) -> impl Iterator<Item = &Arena> {
        self.all.iter()
    }

    /// The arena that this process made.
    pub fn of(&self, creator: ConnId) -> Option<&Arena> {
        self.all.iter().find(|a| a.creator == creator)
    }

    /// The arena with this memory that processes with these rights have shown.
    pub fn shown(&mut self, file: FileId, rights: Rights) -> Option<&mut Arena> {
        self.all.iter_mut().find(|a| a.mem.file == file && a.rights == rights)
    }

    /// Memory of all arenas that this process has mapped.
    pub fn used_by(&self, conn: ConnId) -> Vec<Rc<ArenaMem>> {
        self.all.iter().filter(|a| a.users.contains(&conn)).map(|a| a.mem.clone()).collect()
    }

    pub fn in_family(&self, family: FamilyId) -> impl Iterator<Item = &Arena> {
        self.all.iter().filter(move |a| a.family == family)
    }

    pub fn add(&mut self, arena: Arena) {
        self.all.push(arena);
    }

    /// A child inherits the mappings of its parent.
    pub fn inherit(&mut self, parent: ConnId, child: ConnId) {
        for arena in self.all.iter_mut().filter(|a| a.users.contains(&parent)) {
            arena.users.insert(child);
        }
    }

    /// A process is gone: returns the arenas that nobody has any more, with any rights.
    pub fn leave(&mut self, conn: ConnId) -> Vec<Arena> {
        for arena in &mut self.all {
            arena.users.remove(&conn);
        }
        let (mut orphans, live): (Vec<Arena>, _) =
            std::mem::take(&mut self.all).into_iter().partition(|a| a.users.is_empty());
        self.all = live;
        orphans.retain(|orphan| !self.all.iter().any(|a| a.mem.file == orphan.mem.file));
        orphans
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::memfd;

    #[test]
    fn reading_takes_no_memory() {
        const _: () = assert!(SOCK_OFF.is_multiple_of(4096) && 4096usize.is_multiple_of(size_of::<Sock>()));
        let fd = memfd("arena", ARENA_SIZE, SealFlags::SHRINK | SealFlags::GROW).unwrap();
        let map = Mapping::new(&fd, ARENA_SIZE).unwrap();
        map.at::<AtomicU64>(offset_of!(Header, magic)).store(MAGIC, Ordering::Relaxed);
        map.at::<AtomicU32>(offset_of!(Header, version)).store(fsocket_abi::VERSION, Ordering::Relaxed);
        map.at::<AtomicU32>(offset_of!(Header, high_water)).store(u32::MAX, Ordering::Relaxed);
        let mem = ArenaMem::open(ForeignFd::new(fd, 0)).unwrap();
        for i in [3, 4, 40_000, SOCKS - 1] {
            assert!(mem.sock(i).claim());
        }
        let before = mem.resident();
        let open: Vec<_> = mem.open_socks().map(|s| s as *const Sock).collect();
        assert_eq!(open, [3, 4, 40_000, SOCKS - 1].map(|i| mem.sock(i) as *const Sock));
        assert_eq!((mem.run(0), mem.run(8)), (Some(0..8), Some(40_000..40_008)));
        assert_eq!(mem.resident(), before);
        assert!(before < 1 << 16, "{before}");
    }
}
