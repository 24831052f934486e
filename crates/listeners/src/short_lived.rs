//! What a fork group learns about the connections that it forks for: do they gain over shared
//! memory?
//!
//! A child that is forked for one connection costs some 300 us more over shared memory than over the kernel. Some 25
//! requests make up for that. Such a child notes at its end whether its connection was short. The process that forks
//! reads the notes before each fork. If most connections are short, it leaves the listener to the kernel for good. ADR
//! 76.

use crate::arena;
use crate::cow::Sparing;
use crate::listen::{self, Listener};
use crate::table::{self, Desc, Kind, DESCS};
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};
use fsocket_abi::arena::{LEARNED_OFF, LEARNED_SIZE};
use fsocket_ring as ring;
use fsocket_sys as sys;

/// Number of listeners of a process whose connections are counted.
const LISTENERS: usize = 32;
/// A connection with fewer answers and fewer bytes is short.
const ANSWERS: u64 = 12;
const BYTES: u64 = 1 << 20;
/// After this many short connections within [`PERIOD_NS`] the kernel serves the listener. (The cost of a few
/// does not matter: a probe of a database every second is no reason.)
const ENOUGH: u32 = 16;
const PERIOD_NS: u64 = 2_000_000_000;
/// Counts above this are halved, because the server may change.
const FADE: u32 = 64;

/// Counters for the connections of one listener. Processes write them without a lock: a lost count
/// delays the decision.
#[repr(C)]
struct Learned {
    /// The monitor's number of the listener. Counts for another number are void.
    listener: AtomicU64,
    /// Number of forks for connections.
    forks: AtomicU32,
    /// Number of short connections that have ended.
    short: AtomicU32,
    /// The beginning of the period, and the value of `short` then.
    since: AtomicU64,
    before: AtomicU32,
}
const _: () = assert!(size_of::<[Learned; LISTENERS]>() <= LEARNED_SIZE);

/// Lies in the arena of the process that forked first for a connection; its children share it.
#[link_section = ".data.fsocket_start"]
static PAGE: AtomicPtr<[Learned; LISTENERS]> = AtomicPtr::new(core::ptr::null_mut());
/// The connection that this process has accepted last, since its last fork ([`Which`]); 0: none.
#[link_section = ".data.fsocket_start"]
static ACCEPTED: AtomicU64 = AtomicU64::new(0);
/// In a child: the connection that it was forked for; 0: none.
#[link_section = ".data.fsocket_start"]
static SERVED: AtomicU64 = AtomicU64::new(0);

/// A connection and its listener: generation and index of the description, and the listener's place plus one.
#[derive(Clone, Copy)]
struct Which(u64);

impl Which {
    fn new(d: &Desc, place: usize) -> Which {
        Which(u64::from(d.generation()) << 32 | u64::from(d.index()) << 8 | (place as u64 + 1))
    }
    fn load(from: &AtomicU64) -> Option<Which> {
        Some(from.load(Ordering::Relaxed)).filter(|which| *which != 0).map(Which)
    }
    fn place(self) -> usize {
        (self.0 as u8 as usize).wrapping_sub(1)
    }
    fn is(self, d: &Desc) -> bool {
        (self.0 >> 32) as u32 == d.generation() && self.0 as u32 >> 8 == d.index()
    }
    /// The description, if it still is that connection.
    fn desc(self) -> Option<&'static Desc> {
        let is_it = |d: &&Desc| self.is(d) && matches!(d.kind(), Kind::Shm | Kind::Kernel) && d.is_used();
        DESCS.get(self.0 as u32 >> 8).filter(is_it)
    }
}

/// `fd` was accepted on `l`.
pub fn accepted(l: &Listener, fd: i32) {
    SERVED.put(0);
    let place = listen::place_of(l);
    if let Some(d) = table::lookup(fd).filter(|_| place < LISTENERS) {
        ACCEPTED.store(Which::new(d, place).0, Ordering::Relaxed);
    }
}

/// The process is about to fork. Returns a listener that the kernel should serve: the process forks for its
/// connections, and they are short.
pub fn before_fork() -> Option<&'static Desc> {
    let accepted = Which::load(&ACCEPTED)?;
    ACCEPTED.store(0, Ordering::Relaxed);
    accepted.desc()?;
    let l = listen::at(accepted.place())?;
    let id = l.id.load(Ordering::Relaxed);
    let arena = arena::ARENA.load(Ordering::Acquire);
    if PAGE.load(Ordering::Relaxed).is_null() && !arena.is_null() {
        // SAFETY: an arena is ARENA_SIZE bytes, and stays mapped or is replaced by empty memory.
        PAGE.store(unsafe { arena.add(LEARNED_OFF) }.cast(), Ordering::Release);
    }
    let learned = learned(accepted.place()).filter(|_| id != 0)?;
    if learned.listener.load(Ordering::Relaxed) != id {
        learned.forget(id);
    }
    if learned.forks_again(sys::now_ns()) {
        return l.desc();
    }
    SERVED.store(accepted.0, Ordering::Relaxed);
    None
}

/// After a fork, in the parent: the child serves that connection.
pub fn after_fork() {
    SERVED.put(0);
}

/// True between [`before_fork`] and the fork, and in a child that serves one connection.
pub fn is_for_connection() -> bool {
    SERVED.load(Ordering::Relaxed) != 0
}

/// The number `fd` of the connection `d` is about to be closed, and no other number refers to it.
#[inline]
pub fn closes(fd: i32, d: &Desc) {
    if Which::load(&SERVED).is_some_and(|served| served.is(d)) {
        ended(is_short(fd, d).into());
    }
}

/// The process ends.
#[inline]
pub fn at_exit() {
    if let Some(served) = Which::load(&SERVED) {
        let open = served.desc().and_then(|d| Some((table::fd_of(d)?, d)));
        ended(open.is_some_and(|(fd, d)| is_short(fd, d)).into());
    }
}

/// The connection `d` moves to the kernel for good, because the rest of it gains nothing over shared memory. `always`:
/// all connections of such a server do so.
pub fn leaves(d: &Desc, always: bool) {
    if Which::load(&SERVED).is_some_and(|served| served.is(d)) {
        ended(if always { ENOUGH } else { 1 });
    }
}

/// Counts as this many short connections.
#[cold]
fn ended(short: u32) {
    let served = Which(SERVED.swap(0, Ordering::Relaxed));
    if let Some(l) = learned(served.place()).filter(|_| short > 0) {
        l.short.fetch_add(short, Ordering::Relaxed);
    }
}

fn learned(place: usize) -> Option<&'static Learned> {
    // SAFETY: null, or inside an arena, aligned, which stays mapped; zero is valid, and so is any other value.
    unsafe { PAGE.load(Ordering::Acquire).as_ref() }?.get(place)
}

fn is_short(fd: i32, d: &Desc) -> bool {
    if d.is_conn() {
        let s = d.sock();
        let bytes = s.tx.bytes().saturating_add(s.rx.bytes());
        return ring::records(&s.tx) < ANSWERS && bytes < BYTES;
    }
    /// Offset into `struct tcp_info` (linux/tcp.h): data segments sent.
    const DATA_SEGS_OUT: usize = 156;
    let mut info = [0u8; DATA_SEGS_OUT + 4];
    let known = sys::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, &mut info).is_ok();
    let sent = info[DATA_SEGS_OUT..].first_chunk().map_or(0, |b| u32::from_ne_bytes(*b));
    known && u64::from(sent) < ANSWERS
}

impl Learned {
    fn forget(&self, listener: u64) {
        for n in [&self.short, &self.forks, &self.before] {
            n.store(0, Ordering::Relaxed);
        }
        self.since.store(0, Ordering::Relaxed);
        self.listener.store(listener, Ordering::Relaxed);
    }

    /// The process is about to fork for another connection. True: the connections are so short that the kernel serves
    /// them faster. Connections that have not ended do not count as short, for example 64 that are opened at once.
    fn forks_again(&self, now: u64) -> bool {
        let short = self.short.load(Ordering::Relaxed);
        if now.saturating_sub(self.since.load(Ordering::Relaxed)) > PERIOD_NS {
            self.since.store(now, Ordering::Relaxed);
            self.before.store(short, Ordering::Relaxed);
        }
        let forks = self.forks.load(Ordering::Relaxed);
        let lately = short.saturating_sub(self.before.load(Ordering::Relaxed));
        if lately >= ENOUGH && short / 3 >= forks.saturating_sub(short) {
            return true;
        }
        self.forks.store(forks.saturating_add(1), Ordering::Relaxed);
        if forks >= FADE {
            for n in [&self.forks, &self.short, &self.before] {
                n.store(n.load(Ordering::Relaxed) / 2, Ordering::Relaxed);
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn new() -> Learned {
        // SAFETY: zero is valid.
        let l: Learned = unsafe { core::mem::zeroed() };
        l.forget(1);
        l
    }

    /// The number of forks after which the kernel serves the listener, if each connection ends before the next fork.
    /// `short` of `of` connections are short, and one comes each `ms` milliseconds.
    fn forks(l: &Learned, short: u32, of: u32, ms: u64) -> Option<u32> {
        (0..2000).find(|i| {
            let decided = l.forks_again(PERIOD_NS * 2 + u64::from(*i) * ms * MS);
            l.short.fetch_add((i % of < short).into(), Ordering::Relaxed);
            decided
        })
    }

    #[test]
    fn short_ones_decide_and_long_ones_do_not() {
        assert_eq!(forks(&new(), 1, 1, 1), Some(ENOUGH));
        assert_eq!(forks(&new(), 0, 1, 1), None);
        assert_eq!(forks(&new(), 1, 2, 1), None, "half of them");
        assert!(forks(&new(), 9, 10, 1).is_some_and(|n| n < FADE));
    }

    #[test]
    fn few_in_a_second_do_not_matter() {
        assert_eq!(forks(&new(), 1, 1, 1000), None);
        assert_eq!(forks(&new(), 1, 1, 200), None);
        assert_eq!(forks(&new(), 1, 1, 100), Some(ENOUGH));
    }

    #[test]
    fn a_server_may_change() {
        let l = new();
        assert_eq!(forks(&l, 0, 1, 1), None);
        assert!(forks(&l, 1, 1, 1).is_some_and(|n| n < 4 * FADE));
    }

    #[test]
    fn any_counts_are_survived() {
        for word in [0, 1, u32::MAX] {
            let l = new();
            for n in [&l.short, &l.forks, &l.before] {
                n.store(word, Ordering::Relaxed);
            }
            (0..100).for_each(|now| _ = l.forks_again(now));
        }
    }
}
