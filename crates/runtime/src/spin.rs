//! Decides whether a thread spins before it sleeps: only for a short, measured time, and only
//! while that pays. The data path asks here when it has found no data, before it sleeps
//! (`crates/wait`).
//!
//! A spin is free while this CPU has nothing else to do, and costs other threads time when it has.
//! So there are three kinds:
//!
//! If the peer answered within [`NEAR_US`] the last time, the thread spins at once and long,
//! because a sleep would cost more than the answer takes.
//! Otherwise the first spin lasts [`FIRST_US`], which is less than the cost of a sleep.
//! Then comes a long spin, if this CPU was not contended recently ([`contended`]). It begins with
//! a yield: if another thread is runnable here, that thread gets the CPU, and the spin ends.
//!
//! A kind of spin that misses is skipped for some waits, more each time. It is tried again when
//! two waits in a row would have been short enough, measured until the *notification*. The time of
//! the wake-up itself does not count.

use crate::{process, stats};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use fsocket_abi::arena::Counter;
use fsocket_sys::{self as sys, cpu};

/// The longest spin in microseconds. A sleep and a wake-up cost about as much.
const BUDGET_US: u64 = 50;
/// Length of the first spin in microseconds, while it is unknown whether the CPU is free.
const FIRST_US: u64 = 2;
/// A peer that answers within this time in microseconds runs on another CPU. (Answers of 16 KiB
/// take 5 us. With a limit of 4, such peers began to sleep on a contended CPU: 55 us a round trip
/// instead of 19.)
const NEAR_US: u64 = 8;
/// The same limit if the thread had slept. Without it, two threads that wake each other on
/// contended CPUs would never get back to answers within [`NEAR_US`].
const WOKEN_US: u64 = 8;
/// Time between two yields, in microseconds.
const YIELD_US: u64 = 5;
/// If a yield took longer than this, in microseconds, another thread had the CPU.
const SWITCH_US: u64 = 3;
/// After such a yield, the CPU counts as contended for this time, in microseconds.
const CONTENDED_US: u64 = 1000;
/// The most waits that skip a spin after it has missed. The number doubles with each miss.
const MAX_SKIP: u32 = 255;

/// If a yield took longer than this, in microseconds, another program uses the CPU for its full
/// time slice. A thread that sleeps gets the CPU when it is woken; one that yields has to wait for
/// the slice.
const LOST_US: u64 = 100;
/// For this multiple of the lost time, no thread of the process yields, or spins for a peer that
/// may need this CPU. So yields cost at most a sixteenth of the time.
const REST: u64 = 16;
/// The longest such pause, in microseconds.
const MAX_REST_US: u64 = 1_000_000;

/// For each CPU (modulo 64): when a yield of this process last gave the CPU to another thread, in
/// ticks. It is not shared, so another process cannot keep this one from spinning.
static CONTENDED: [AtomicU64; 64] = [const { AtomicU64::new(0) }; 64];

fn contended_at() -> &'static AtomicU64 {
    &CONTENDED[cpu::current() as usize % 64]
}

/// Was another thread waiting for this CPU recently?
pub fn contended(now: u64) -> bool {
    now.wrapping_sub(contended_at().load(Ordering::Relaxed)) < CONTENDED_US * cpu::ticks_per_us()
}

/// End of the pause after a long yield, in ticks.
static REST_UNTIL: AtomicU64 = AtomicU64::new(0);

/// When yields may be tried again, in ticks: `now`, or later.
#[inline]
fn rest_until(now: u64) -> u64 {
    let until = REST_UNTIL.load(Ordering::Relaxed);
    // A clock that was set back must not prevent spins for ever.
    if until.wrapping_sub(now) <= MAX_REST_US * cpu::ticks_per_us() {
        until
    } else {
        now
    }
}

/// Yields the CPU. Returns the time afterwards, in ticks.
#[inline]
fn yield_at(now: u64) -> u64 {
    sys::sched_yield();
    let (after, us) = (cpu::ticks(), cpu::ticks_per_us());
    let lost = after.saturating_sub(now);
    if lost > SWITCH_US * us {
        contended_at().store(after, Ordering::Relaxed);
    }
    if lost > LOST_US * us {
        REST_UNTIL.store(after + (lost * REST).min(MAX_REST_US * us), Ordering::Relaxed);
    }
    after
}

/// Records whether one kind of spin pays. All bytes zero is a valid value.
#[derive(Default)]
struct Pays {
    skip: AtomicU32,
    penalty: AtomicU32,
    worth: AtomicU32,
}

impl Pays {
    const fn new() -> Self {
        Pays { skip: AtomicU32::new(0), penalty: AtomicU32::new(0), worth: AtomicU32::new(0) }
    }
    fn reset(&self) {
        [&self.skip, &self.penalty, &self.worth].into_iter().for_each(|a| a.store(0, Ordering::Relaxed));
    }
    /// May this wait spin?
    fn turn(&self) -> bool {
        let skip = self.skip.load(Ordering::Relaxed);
        if skip != 0 {
            self.skip.store(skip - 1, Ordering::Relaxed);
        }
        skip == 0
    }
    fn hit(&self) {
        if self.penalty.load(Ordering::Relaxed) != 0 {
            self.penalty.store(0, Ordering::Relaxed);
        }
    }
    fn missed(&self) {
        let p = (self.penalty.load(Ordering::Relaxed) * 2 + 1).min(MAX_SKIP);
        self.penalty.store(p, Ordering::Relaxed);
        self.skip.store(p, Ordering::Relaxed);
        self.worth.store(0, Ordering::Relaxed);
    }
    /// Records whether a spin would have paid in a wait that slept. After two in a row the spin is
    /// tried again.
    fn would_have(&self, paid: bool) {
        if !paid {
            self.worth.store(0, Ordering::Relaxed);
        } else if self.worth.fetch_add(1, Ordering::Relaxed) >= 1 {
            self.skip.store(0, Ordering::Relaxed);
        }
    }
}

/// What a thread remembers of its last waits of one kind. All bytes zero is a valid value.
#[derive(Default)]
pub struct Memory {
    /// The last wait was over within [`NEAR_US`].
    near: AtomicU32,
    /// Number of consecutive waits whose notification came within [`WOKEN_US`].
    woken: AtomicU32,
    first: Pays,
    long: Pays,
}

impl Memory {
    pub const fn new() -> Self {
        Memory { near: AtomicU32::new(0), woken: AtomicU32::new(0), first: Pays::new(), long: Pays::new() }
    }

    pub fn reset(&self) {
        self.near.store(0, Ordering::Relaxed);
        self.woken.store(0, Ordering::Relaxed);
        self.first.reset();
        self.long.reset();
    }

    /// Spins until `ready` returns true. False: the caller should sleep. `peer_cpu`: the peer's
    /// CPU + 1; 0: unknown. The thread does not spin if the peer needs this very CPU.
    #[inline]
    pub fn spin(&self, peer_cpu: u32, ready: impl FnMut() -> bool) -> bool {
        self.spin_noting(peer_cpu, ready, || {})
    }

    /// Like [`Memory::spin`]. Calls `note` when the wait turns out to be longer: before each
    /// yield, and when the spin has missed.
    #[inline]
    pub fn spin_noting(&self, peer_cpu: u32, mut ready: impl FnMut() -> bool, mut note: impl FnMut()) -> bool {
        let hit = self.spin_for(peer_cpu, &mut ready, &mut note);
        if !hit {
            note();
        }
        hit
    }

    #[inline]
    fn spin_for(&self, peer_cpu: u32, mut ready: impl FnMut() -> bool, mut note: impl FnMut()) -> bool {
        if process::cpus() == 1 || !process::may_spin() || (peer_cpu != 0 && peer_cpu == cpu::current()) {
            return false;
        }
        let (us, start) = (cpu::ticks_per_us(), cpu::ticks());
        let near = self.near.load(Ordering::Relaxed) != 0;
        if !near && self.first.turn() {
            loop {
                if looks(&mut ready) {
                    return self.hit(&self.first, 0);
                }
                if cpu::ticks() >= start + FIRST_US * us {
                    break;
                }
            }
            self.first.missed();
        }
        if !self.long.turn() {
            return false;
        }
        let rested = rest_until(start);
        if peer_cpu == 0 && rested != start {
            // The peer may need this very CPU, and would not get it during the spin.
            return false;
        }
        if !near && (rested != start || contended(start)) {
            return false;
        }
        let end = start + BUDGET_US * us;
        // The clock is not read for each look.
        let mut now = start;
        let mut next_yield = if near { rested.max(start + YIELD_US * us) } else { start };
        while now < end {
            if now >= next_yield {
                // Another thread may need this CPU, perhaps even the peer.
                note();
                let before = cpu::ticks();
                now = yield_at(before);
                if now - before > SWITCH_US * us {
                    self.near.store(0, Ordering::Relaxed);
                    if ready() {
                        return true;
                    }
                    break;
                }
                next_yield = now + YIELD_US * us;
            }
            if looks(&mut ready) {
                return self.hit(&self.long, now - start);
            }
            now = cpu::ticks();
        }
        stats::count(Counter::SpinMisses);
        self.near.store(0, Ordering::Relaxed);
        self.long.missed();
        false
    }

    #[inline]
    fn hit(&self, pays: &Pays, took: u64) -> bool {
        stats::count(Counter::SpinHits);
        pays.hit();
        let near = (took <= NEAR_US * cpu::ticks_per_us()) as u32;
        if self.near.load(Ordering::Relaxed) != near {
            self.near.store(near, Ordering::Relaxed);
        }
        true
    }

    /// Called after a sleep that began at `since`. `notified_at`: when the peer rang; 0: unknown.
    /// All times in ticks.
    pub fn slept(&self, since: u64, notified_at: u64) {
        let within = |us| notified_at != 0 && notified_at.wrapping_sub(since) <= us * cpu::ticks_per_us();
        if !within(WOKEN_US) {
            self.woken.store(0, Ordering::Relaxed);
        } else if self.woken.fetch_add(1, Ordering::Relaxed) >= 1 {
            self.near.store(1, Ordering::Relaxed);
        }
        self.first.would_have(within(FIRST_US));
        self.long.would_have(within(BUDGET_US));
    }
}

/// Looks several times, because reading the clock costs more than a look.
#[inline]
fn looks(ready: &mut impl FnMut() -> bool) -> bool {
    for _ in 0..8 {
        if ready() {
            return true;
        }
        core::hint::spin_loop();
    }
    false
}
