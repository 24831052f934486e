//! What a fork group learns of the connections that it forks for: do they pay over shared memory?
//!
//! A child that is forked for one connection is set up for it, and taken apart behind it: some 300 us more
//! than over the kernel, which some 25 requests bring back. Children note here how their connection went;
//! the process that forks reads it before each fork, and has new connections begin in the kernel where they
//! are short. ADR 53.

use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};
use fsocket_abi::arena::BRIEF_SIZE;

/// Listeners of a process that are learned about.
pub const LISTENERS: usize = 32;

/// Receives and waits for the peer over shared memory after which a connection has lasted: each request is one of
/// them, or two where it was slept for.
const WAITS: u32 = 24;
/// The same in calls over the kernel: each request is two, as a rule.
const CALLS: u32 = 32;
/// So many short connections, at least, before others begin in the kernel.
const ENOUGH: u32 = 16;
/// The same after some changes there and back.
const ENOUGH_AT_MOST: u32 = 1024;
/// So many that have lasted, at least, before others begin over shared memory again.
const LASTED: u32 = 8;
/// Counts above are halved: the server may change.
const FADE: u32 = 64;

/// What is known of the connections of one listener. Processes write it without a lock: a count that is lost
/// delays a decision.
#[repr(C)]
pub struct Learned {
    /// Monitor's number of the listener; another one means that nothing is known.
    listener: AtomicU64,
    /// Connections that have ended before they had lasted, and those that have lasted.
    short: AtomicU32,
    lasted: AtomicU32,
    /// Forks for connections that have begun in the kernel.
    forks: AtomicU32,
    /// 1: new connections begin in the kernel.
    in_kernel: AtomicU32,
    /// Short connections before they do; 0: [`ENOUGH`].
    enough: AtomicU32,
}

/// Connections that were handed down over a fork, of which it is told whether the parent has closed them.
const TICKETS: usize = 256;

#[repr(C)]
struct Page {
    learned: [Learned; LISTENERS],
    /// By which the monitor knows a child for one of the fork group; 0: none yet.
    secret: AtomicU64,
    /// Tickets that were given out.
    tickets: AtomicU32,
    /// The last ticket of each remainder whose connection the parent has closed.
    closed: [AtomicU32; TICKETS],
}
const _: () = assert!(size_of::<Page>() <= BRIEF_SIZE);

/// In the arena of the process that forked first for a connection; its children share it.
#[link_section = ".data.fsocket_start"]
static PAGE: AtomicPtr<Page> = AtomicPtr::new(core::ptr::null_mut());
/// In a child that serves one connection: place of the listener plus one, and [`IN_KERNEL`]. 0: any other process.
#[link_section = ".data.fsocket_start"]
static SERVES: AtomicU32 = AtomicU32::new(0);
/// Waits or calls until its connection has lasted; 0: it has.
#[link_section = ".data.fsocket_start"]
static LEFT: AtomicU32 = AtomicU32::new(0);

const IN_KERNEL: u32 = 1 << 31;

fn page() -> Option<&'static Page> {
    // SAFETY: null, or as `provide` wants it; zero is valid.
    unsafe { PAGE.load(Ordering::Acquire).as_ref() }
}

/// Where a fork group that has no place yet may note it.
///
/// # Safety
/// Null, or [`BRIEF_SIZE`] bytes of shared memory, aligned as an arena, that stay mapped.
pub unsafe fn provide(memory: *mut u8) {
    if PAGE.load(Ordering::Relaxed).is_null() {
        PAGE.store(memory.cast(), Ordering::Release);
    }
}

/// What is known of the listener at `place`. None: nothing, and nothing can be.
pub fn of(place: usize, listener: u64) -> Option<&'static Learned> {
    let l = page()?.learned.get(place)?;
    if l.listener.load(Ordering::Relaxed) != listener {
        l.forget(listener);
    }
    Some(l)
}

/// Do new connections of the listener at `place` begin in the kernel?
pub fn is_in_kernel(place: usize, listener: u64) -> bool {
    let l = page().and_then(|p| p.learned.get(place));
    l.is_some_and(|l| l.in_kernel.load(Ordering::Relaxed) != 0 && l.listener.load(Ordering::Relaxed) == listener)
}

/// By which the monitor knows a child for one of the fork group, if there is such a thing yet.
pub fn secret() -> Option<u64> {
    page().map(|p| p.secret.load(Ordering::Relaxed)).filter(|s| *s != 0)
}

/// The same; else it is `new`, which nobody can guess.
pub fn secret_or(new: u64) -> Option<u64> {
    let _ = page()?.secret.compare_exchange(0, new, Ordering::Relaxed, Ordering::Relaxed);
    secret()
}

/// Of a connection that is handed down over a fork.
pub fn ticket() -> Option<u32> {
    Some(page()?.tickets.fetch_add(1, Ordering::Relaxed).wrapping_add(1)).filter(|t| *t != 0)
}

/// The parent has closed it.
pub fn closed(ticket: u32) {
    if let Some(p) = page() {
        // Release: nothing of the parent's follows on that connection.
        p.closed[ticket as usize % TICKETS].store(ticket, Ordering::Release);
    }
}

/// Has it? (Of many at once some are forgotten, and stay where they are.)
pub fn is_closed(ticket: u32) -> bool {
    page().is_some_and(|p| p.closed[ticket as usize % TICKETS].load(Ordering::Acquire) == ticket)
}

/// Before a fork for a connection of the listener at `place`: what the child finds. `is_kernels`: the connection
/// is the kernel's.
pub fn expect(place: usize, in_kernel: bool, is_kernels: bool) {
    SERVES.store((place as u32 + 1) | if in_kernel { IN_KERNEL } else { 0 }, Ordering::Relaxed);
    LEFT.store(if is_kernels { CALLS } else { WAITS }, Ordering::Relaxed);
}

/// Between [`expect`] and the fork, and in the child until its connection has lasted.
pub fn is_for_connection() -> bool {
    LEFT.load(Ordering::Relaxed) != 0
}

/// This process serves no single connection: it has forked for one, or accepts itself.
pub fn is_another() {
    use crate::cow::Sparing;
    LEFT.put(0);
}

/// A receive from, or a wait for the peer over shared memory, or a call of the kernel's on a connection. True: it
/// is counted, and so is the next one.
#[inline]
pub fn turn() -> bool {
    let left = LEFT.load(Ordering::Relaxed);
    if left != 0 {
        took_turn(left);
    }
    left != 0
}

#[cold]
fn took_turn(left: u32) {
    LEFT.store(left - 1, Ordering::Relaxed);
    if left == 1 {
        if let Some(l) = served() {
            l.lasted.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// The process ends, or puts its connection into the kernel for good: what is left of it gains nothing over
/// shared memory.
#[inline]
pub fn at_end() {
    if LEFT.load(Ordering::Relaxed) != 0 {
        ended();
    }
}

#[cold]
fn ended() {
    LEFT.store(0, Ordering::Relaxed);
    // (There the forks are counted, and what has lasted: this page is not touched for the others.)
    if SERVES.load(Ordering::Relaxed) & IN_KERNEL == 0 {
        if let Some(l) = served() {
            l.short.fetch_add(1, Ordering::Relaxed);
        }
    }
}

fn served() -> Option<&'static Learned> {
    page()?.learned.get((SERVES.load(Ordering::Relaxed) & !IN_KERNEL).checked_sub(1)? as usize)
}

impl Learned {
    fn forget(&self, listener: u64) {
        for n in [&self.short, &self.lasted, &self.forks, &self.in_kernel, &self.enough] {
            n.store(0, Ordering::Relaxed);
        }
        self.listener.store(listener, Ordering::Relaxed);
    }

    pub fn in_kernel(&self) -> bool {
        self.in_kernel.load(Ordering::Relaxed) != 0
    }

    /// The process is about to fork for a connection. Some: new ones had better begin in the kernel, or over
    /// shared memory again; [`Learned::turn_to`] says that they do.
    pub fn judge(&self) -> Option<bool> {
        let lasted = self.lasted.load(Ordering::Relaxed);
        if self.in_kernel() {
            let forks = self.forks.load(Ordering::Relaxed).saturating_add(1);
            self.forks.store(forks, Ordering::Relaxed);
            if lasted >= LASTED && lasted >= forks / 2 {
                return Some(false);
            }
            if forks >= FADE {
                self.halve();
            }
            return None;
        }
        let short = self.short.load(Ordering::Relaxed);
        if short >= self.enough() && short / 3 >= lasted {
            return Some(true);
        }
        if short.saturating_add(lasted) >= FADE.max(2 * self.enough()) {
            self.halve();
        }
        None
    }

    /// (Any process of the fork group may have written anything there.)
    fn enough(&self) -> u32 {
        self.enough.load(Ordering::Relaxed).clamp(ENOUGH, ENOUGH_AT_MOST)
    }

    fn halve(&self) {
        for n in [&self.short, &self.lasted, &self.forks] {
            n.store(n.load(Ordering::Relaxed) / 2, Ordering::Relaxed);
        }
    }

    pub fn turn_to(&self, in_kernel: bool) {
        for n in [&self.short, &self.lasted, &self.forks] {
            n.store(0, Ordering::Relaxed);
        }
        if !in_kernel {
            // A server of both kinds is not to go back and forth.
            self.enough.store((2 * self.enough()).min(ENOUGH_AT_MOST), Ordering::Relaxed);
        }
        self.in_kernel.store(in_kernel.into(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn new() -> Learned {
        // SAFETY: zero is valid.
        unsafe { core::mem::zeroed() }
    }
    fn add(l: &Learned, short: u32, lasted: u32) {
        l.short.fetch_add(short, Ordering::Relaxed);
        l.lasted.fetch_add(lasted, Ordering::Relaxed);
    }

    #[test]
    fn short_connections_go_to_the_kernel_and_long_ones_come_back() {
        let l = new();
        add(&l, ENOUGH - 1, 0);
        assert_eq!(l.judge(), None);
        add(&l, 1, 0);
        assert_eq!(l.judge(), Some(true));
        l.turn_to(true);
        assert!((0..1000).all(|_| l.judge().is_none()), "short ones stay there");
        let forks = (0..1000).position(|_| {
            add(&l, 0, 1);
            l.judge() == Some(false)
        });
        assert!(forks.is_some_and(|n| n < FADE as usize), "{forks:?}");
        l.turn_to(false);
        add(&l, ENOUGH, 0);
        assert_eq!(l.judge(), None, "damped");
        add(&l, ENOUGH, 0);
        assert_eq!(l.judge(), Some(true));
    }

    #[test]
    fn most_must_be_short() {
        let l = new();
        for _ in 0..1000 {
            add(&l, 2, 1);
            assert_eq!(l.judge(), None);
        }
        // It changes: what was long ago counts less and less.
        assert!((0..200).any(|_| {
            add(&l, 1, 0);
            l.judge() == Some(true)
        }));
    }

    #[test]
    fn any_counts_are_survived() {
        for word in [0, 1, u32::MAX] {
            let l = new();
            for n in [&l.short, &l.lasted, &l.forks, &l.in_kernel, &l.enough] {
                n.store(word, Ordering::Relaxed);
            }
            for _ in 0..100 {
                if let Some(to) = l.judge() {
                    l.turn_to(to);
                }
            }
            assert!((ENOUGH..=ENOUGH_AT_MOST).contains(&l.enough()));
        }
    }

    #[test]
    fn a_burst_of_connections_that_are_not_over_decides_nothing() {
        let l = new();
        assert!((0..1000).all(|_| l.judge().is_none()));
    }
}
