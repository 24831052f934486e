//! When to spin before sleeping: a short, measured time, and only while it
//! pays.
//!
//! A spin costs nobody anything while this CPU has nothing else to do, and everybody something
//! when it has. So there are three kinds:
//!
//! - A peer that answered within [`NEAR_US`] the last time is waited for at once and long: a
//!   sleep would cost more than all else.
//! - Any other is waited for [`FIRST_US`], which is less than the price of a sleep.
//! - Then long, if this CPU was not contended lately ([`contended`]). That begins with a yield: if
//!   another thread is runnable here it gets the CPU, and the spin is over.
//!
//! Each kind pauses for more and more waits when it misses, and is tried again when the *notification*
//! of two waits in a row would have come in time. How long the wake-up behind it took says
//! nothing about that.

use crate::{process, stats};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use fsocket_abi::arena::Counter;
use fsocket_sys::{self as sys, cpu};

/// Longest spin, microseconds. A sleep and wake-up costs about as much.
const BUDGET_US: u64 = 50;
/// The first one, where it is not known that the CPU is free.
const FIRST_US: u64 = 2;
/// A peer that answers so fast is at work on another CPU. (Answers of 16 KiB take 5 us. With 4 instead of 8 they
/// came to sleeping on a CPU that others want, 55 us a round trip in place of 19.)
const NEAR_US: u64 = 8;
/// And so fast where it has to be woken first. Two that both wait for the other to wake up, on CPUs that
/// others want, would never come back to [`NEAR_US`].
const WOKEN_US: u64 = 8;
/// Between two yields, microseconds.
const YIELD_US: u64 = 5;
/// A yield that took longer gave the CPU to another thread.
const SWITCH_US: u64 = 3;
/// So long a CPU counts as contended after that, microseconds.
const CONTENDED_US: u64 = 1000;
/// After a spin that missed, that many waits (doubling) do without.
const MAX_SKIP: u32 = 255;

/// A yield that took so long, microseconds, was not to a peer: another program wants the CPU, and
/// keeps it for its slice. A thread that sleeps gets the CPU when it is woken; one that yields waits.
const LOST_US: u64 = 100;
/// For that many times what was lost nobody in this process yields, and nobody spins for a peer
/// that may need this very CPU. So that yields cost a sixteenth at most.
const REST: u64 = 16;
/// Longest such time, microseconds.
const MAX_REST_US: u64 = 1_000_000;

/// By CPU, modulo: when a yield last gave it to another thread, ticks. A process's own
/// experience, so nobody else can keep it from spinning.
static CONTENDED: [AtomicU64; 64] = [const { AtomicU64::new(0) }; 64];

fn contended_at() -> &'static AtomicU64 {
    &CONTENDED[cpu::current() as usize % 64]
}

/// Was another thread waiting for this CPU a moment ago?
pub fn contended(now: u64) -> bool {
    now.wrapping_sub(contended_at().load(Ordering::Relaxed)) < CONTENDED_US * cpu::ticks_per_us()
}

/// Until then, ticks.
static REST_UNTIL: AtomicU64 = AtomicU64::new(0);

/// When yields may be tried again: `now`, or later. Ticks.
#[inline]
fn rest_until(now: u64) -> u64 {
    let until = REST_UNTIL.load(Ordering::Relaxed);
    // A clock that was set back must not keep us for ever.
    if until.wrapping_sub(now) <= MAX_REST_US * cpu::ticks_per_us() {
        until
    } else {
        now
    }
}

/// Yields the CPU. Returns the ticks afterwards.
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

/// Whether one kind of spin pays. Zero is valid.
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
    /// Is it this wait's turn?
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
    /// A wait that slept would have been worth it, or not. Two in a row, and it is tried again.
    fn would_have(&self, paid: bool) {
        if !paid {
            self.worth.store(0, Ordering::Relaxed);
        } else if self.worth.fetch_add(1, Ordering::Relaxed) >= 1 {
            self.skip.store(0, Ordering::Relaxed);
        }
    }
}

/// What is remembered of the last waits of one kind. Zero is valid.
#[derive(Default)]
pub struct Memory {
    /// The last wait was over within [`NEAR_US`].
    near: AtomicU32,
    /// So many in a row were told of within [`WOKEN_US`].
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

    /// Spin until `ready`, or give up. `peer_cpu`: where the peer runs (plus
    /// one; 0 unknown): never spin for somebody who needs this very CPU.
    #[inline]
    pub fn spin(&self, peer_cpu: u32, ready: impl FnMut() -> bool) -> bool {
        self.spin_noting(peer_cpu, ready, || {})
    }

    /// As [`Memory::spin`]; `note` is called when the wait turns out to be a longer one:
    /// each time before the CPU is given up, and when it is over in vain.
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
            // It may need this very CPU, and would not get it from us.
            return false;
        }
        if !near && (rested != start || contended(start)) {
            return false;
        }
        let end = start + BUDGET_US * us;
        // When the clock was last looked at: not at each hit, which is on the way of every message.
        let mut now = start;
        let mut next_yield = if near { rested.max(start + YIELD_US * us) } else { start };
        while now < end {
            if now >= next_yield {
                // Somebody else may need this CPU, perhaps the very peer.
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

    /// A sleep is over that began at `since`; `told`: when the peer said that it may be, 0: that
    /// is not known. Ticks.
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

/// Some looks, between two at the clock.
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
