//! A page of memory that the processes of a fork group share about one listener. It is made
//! before the fork. All processes that have it run the same program for the same user.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use fsocket_sync::inside::Inside;
use fsocket_sys as sys;

/// Number of workers with an entry. Further workers have no entry and no CPU of their own.
pub const ENTRIES: usize = 448;
/// Number of threads that can block in the kernel's `accept` of the global socket. Further
/// threads wait in `poll`.
const BLOCKED: usize = 512;
/// Length of the mapping, bytes.
const LEN: usize = 8192;
/// The longest time for which a process may hold the lock, in nanoseconds.
const PATIENCE: u64 = 2_000_000_000;

#[repr(C)]
pub struct Page {
    /// Pid of the process that holds the lock: it opens the reservation, or takes from the global
    /// queue. 0: none.
    lock: AtomicU32,
    /// Counts changes of the global socket's options.
    pub options: AtomicU32,
    /// Socket options that the table of options has no place for.
    pub kept: fsocket_fdtable::table::Kept,
    /// `shutdown` was called on the listener.
    pub shut: AtomicU32,
    /// The monitor's BPF program selects in the kernel's group. It does so even after the
    /// monitor's end.
    pub selected: AtomicU32,
    /// A process watches the listener with EPOLLONESHOT, and asks again after each event, for the
    /// global socket only. It would not see connections of a local socket, so no process of its
    /// fork group has local sockets.
    pub turns: AtomicU32,
    /// Number of workers that were found dead.
    deaths: AtomicU32,
    /// Number of workers in the classic selector's group. `place` has them in the kernel's order.
    pub places: AtomicU32,
    /// Pid in the upper half, CPU + 1 in the lower; 0: free.
    pub entry: [AtomicU64; ENTRIES],
    /// Entry + 1 of the worker at each place. Place 0 of the group is the global socket, which is
    /// not in this array.
    pub place: [AtomicU32; 64],
    /// Threads that block in the kernel's `accept` of the global socket. (They are in the second
    /// page of memory, which is touched only if the global socket blocks.)
    pub blocked: Blocked,
}

/// Threads that block in one queue.
pub type Blocked = Inside<BLOCKED>;

const _: () = assert!(core::mem::size_of::<Page>() <= LEN);

/// A new page, shared with every child.
pub fn make() -> Option<*mut Page> {
    let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
    sys::mmap(LEN, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0).ok().map(|p| p as *mut Page)
}

/// `pid`: a process or a thread.
pub(super) fn is_alive(pid: u32) -> bool {
    // SAFETY: signal 0 is not sent; the call only checks whether the process exists.
    !matches!(unsafe { sys::raw(libc::SYS_kill, [pid as usize, 0, 0, 0, 0, 0]) },
        Err(e) if e.raw() == libc::ESRCH)
}

impl Page {
    /// Takes the lock. If the holder died or hangs, the lock is taken from it.
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

    /// Returns once the lock has been free at some moment during this call.
    pub fn wait_until_free(&self) {
        if self.lock.load(Ordering::SeqCst) != 0 {
            drop(self.lock());
        }
    }

    /// Enters the calling process as a worker. `choose` gets a function that counts the live
    /// workers on a CPU, and returns a CPU.
    pub fn enter(&self, choose: impl FnOnce(&dyn Fn(u32) -> u32) -> u32) -> (Option<u32>, u32) {
        self.deaths();
        let on = |cpu: u32| self.entry.iter().filter(|e| e.load(Ordering::Relaxed) as u32 == cpu + 1).count() as u32;
        let cpu = choose(&on);
        let me = (sys::getpid() as u64) << 32 | (cpu as u64 + 1);
        let free =
            self.entry.iter().position(|e| e.compare_exchange(0, me, Ordering::AcqRel, Ordering::Relaxed).is_ok());
        (free.map(|i| i as u32), cpu)
    }

    /// Frees the entries of dead workers. Returns how many workers have died since the page was
    /// made.
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

    /// Frees an entry. Its place stays until the socket is closed.
    pub fn exit(&self, entry: u32) {
        if let Some(e) = self.entry.get(entry as usize) {
            e.store(0, Ordering::Release);
        }
    }

    /// Is there a worker?
    pub fn any(&self) -> bool {
        self.entry.iter().any(|e| e.load(Ordering::Relaxed) != 0)
    }

    /// The kernel has put a new socket at the end of the group: gives it a place.
    pub fn add_place(&self, entry: u32) {
        let n = self.places.load(Ordering::Relaxed) as usize;
        // Places of dead workers are removed first: the kernel has filled each gap with the last
        // socket.
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

    /// The socket of an entry has left the kernel's group: removes its place.
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

    /// The place of a worker on this CPU in the kernel's group.
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
        // The lock may belong to another process by now, because this one took too long.
        let _ = self.0.lock.compare_exchange(me, 0, Ordering::Release, Ordering::Relaxed);
    }
}
