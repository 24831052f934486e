//! What the processes that share a listener by fork know of each other: a page
//! made before the fork. Everybody in it runs the same program for the same user.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use fsocket_sys as sys;

/// Workers that are told apart; more have no entry and no CPU of their own.
pub const ENTRIES: usize = 448;
/// How long somebody may hold the lock, nanoseconds.
const PATIENCE: u64 = 2_000_000_000;

#[repr(C)]
pub struct Page {
    /// Pid of the process that opens the door, or that takes from the global
    /// queue; 0: nobody.
    lock: AtomicU32,
    /// Counts changes of the global socket's options.
    pub options: AtomicU32,
    /// Those that have no place of their own in the table of options.
    pub kept: fsocket_fdtable::table::Kept,
    /// `shutdown` was called on it.
    pub shut: AtomicU32,
    /// The monitor's program selects in the kernel's group, whether the monitor lives
    /// or not.
    pub selected: AtomicU32,
    /// A process is told once and then asks again (EPOLLONESHOT), for which it has but the global socket. So its
    /// processes of the fork group have no local ones, either: it would not see what comes there.
    pub turns: AtomicU32,
    /// Workers that were found dead.
    deaths: AtomicU32,
    /// Workers in the classic selector's group, in the kernel's order.
    pub places: AtomicU32,
    /// Pid in the upper half, CPU + 1 in the lower; 0: free.
    pub entry: [AtomicU64; ENTRIES],
    /// Entry + 1 of each place, the global socket's being 0 and not in here.
    pub place: [AtomicU32; 64],
}

const _: () = assert!(core::mem::size_of::<Page>() <= 4096);

/// A new page, shared with every child.
pub fn make() -> Option<*mut Page> {
    let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
    sys::mmap(4096, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0).ok().map(|p| p as *mut Page)
}

fn is_alive(pid: u32) -> bool {
    // SAFETY: signal 0 is none.
    !matches!(unsafe { sys::raw(libc::SYS_kill, [pid as usize, 0, 0, 0, 0, 0]) },
        Err(e) if e.raw() == libc::ESRCH)
}

impl Page {
    /// Waits for its turn; a holder that died or hangs is passed over.
    pub fn lock(&self) -> Turn<'_> {
        let me = sys::getpid() as u32;
        let mut since = 0;
        let mut tries = 0u32;
        loop {
            // Acquire: pairs with the release in `Turn::drop`.
            let held = match self.lock.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return Turn(self),
                Err(held) => held,
            };
            tries += 1;
            if tries < 64 {
                core::hint::spin_loop();
                continue;
            }
            let now = sys::now_ns();
            since = if since == 0 { now } else { since };
            if !is_alive(held) || now - since > PATIENCE {
                if self.lock.compare_exchange(held, me, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                    return Turn(self);
                }
                since = 0;
            }
            sys::nanosleep(50_000);
        }
    }

    /// Enter the calling process as a worker. `choose` gets the number of live
    /// workers on each CPU asked for and says which CPU it shall be.
    pub fn enter(&self, choose: impl FnOnce(&dyn Fn(u32) -> u32) -> u32) -> (Option<u32>, u32) {
        self.deaths();
        let on = |cpu: u32| self.entry.iter().filter(|e| e.load(Ordering::Relaxed) as u32 == cpu + 1).count() as u32;
        let cpu = choose(&on);
        let me = (sys::getpid() as u64) << 32 | (cpu as u64 + 1);
        let free =
            self.entry.iter().position(|e| e.compare_exchange(0, me, Ordering::AcqRel, Ordering::Relaxed).is_ok());
        (free.map(|i| i as u32), cpu)
    }

    /// Frees the entries of workers that have died. How many have, ever.
    pub fn deaths(&self) -> u32 {
        for e in &self.entry {
            let v = e.load(Ordering::Relaxed);
            if v != 0
                && !is_alive((v >> 32) as u32)
                && e.compare_exchange(v, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
            {
                self.deaths.fetch_add(1, Ordering::AcqRel);
            }
        }
        self.deaths.load(Ordering::Acquire)
    }

    /// Free an entry; its place stays until the socket is closed.
    pub fn exit(&self, entry: u32) {
        if let Some(e) = self.entry.get(entry as usize) {
            e.store(0, Ordering::Release);
        }
    }

    /// Is there any worker?
    pub fn any(&self) -> bool {
        self.entry.iter().any(|e| e.load(Ordering::Relaxed) != 0)
    }

    /// The kernel has put a new socket at the end of the group.
    pub fn add_place(&self, entry: u32) {
        let n = self.places.load(Ordering::Relaxed) as usize;
        // First those whose worker has died: the kernel has closed their gap
        // with the last one each.
        let mut k = 0;
        while k < (self.places.load(Ordering::Relaxed) as usize).min(self.place.len()) {
            let e = self.place[k].load(Ordering::Relaxed);
            let gone = self.entry.get((e as usize).wrapping_sub(1)).is_none_or(|e| e.load(Ordering::Relaxed) == 0);
            if gone {
                self.close_gap(k);
            } else {
                k += 1;
            }
        }
        let n = n.min(self.places.load(Ordering::Relaxed) as usize);
        if let Some(p) = self.place.get(n) {
            p.store(entry + 1, Ordering::Relaxed);
            self.places.store(n as u32 + 1, Ordering::Relaxed);
        }
    }

    /// The socket of an entry has left the kernel's group.
    pub fn remove_place(&self, entry: u32) {
        let n = (self.places.load(Ordering::Relaxed) as usize).min(self.place.len());
        if let Some(k) = self.place[..n].iter().position(|p| p.load(Ordering::Relaxed) == entry + 1) {
            self.close_gap(k);
        }
    }

    fn close_gap(&self, k: usize) {
        let last = (self.places.load(Ordering::Relaxed) as usize).min(self.place.len()).saturating_sub(1);
        self.place[k].store(self.place[last].load(Ordering::Relaxed), Ordering::Relaxed);
        self.places.store(last as u32, Ordering::Relaxed);
    }

    /// Place in the kernel's group of a worker on this CPU.
    pub fn place_of(&self, cpu: u32) -> Option<u32> {
        let n = (self.places.load(Ordering::Relaxed) as usize).min(self.place.len());
        let on_cpu = |p: &AtomicU32| {
            self.entry
                .get((p.load(Ordering::Relaxed) as usize).wrapping_sub(1))
                .is_some_and(|e| e.load(Ordering::Relaxed) as u32 == cpu + 1)
        };
        self.place[..n].iter().position(on_cpu).map(|k| k as u32 + 1)
    }
}

/// The page's lock.
pub struct Turn<'a>(&'a Page);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let me = sys::getpid() as u32;
        // Not ours any more: it took us too long.
        let _ = self.0.lock.compare_exchange(me, 0, Ordering::Release, Ordering::Relaxed);
    }
}
