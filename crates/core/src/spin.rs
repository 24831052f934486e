//! When to spin before sleeping: a short, measured time, and only while it
//! pays.

use crate::{process, stats};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use fsocket_abi::arena::Counter;
use fsocket_sys::{self as sys, cpu};

/// Longest spin, microseconds. A sleep and wake-up costs about as much.
const BUDGET_US: u64 = 50;
/// A wait that ended within this time would have been worth a spin.
const WORTH_US: u64 = 120;
/// After a spin that missed, that many waits (doubling) go straight to sleep.
const MAX_SKIP: u32 = 255;

/// A yield that took so long, microseconds, was not to a peer: another program wants the CPU, and
/// keeps it for its slice. Who sleeps is let in when he is woken; who yields waits.
const LOST_US: u64 = 100;
/// For that many times what was lost nobody in this process yields, and nobody spins for a peer
/// that may need this very CPU. So that yields cost a sixteenth at most.
const REST: u64 = 16;
/// Longest such time, microseconds.
const MAX_REST_US: u64 = 1_000_000;

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
    if lost > LOST_US * us {
        REST_UNTIL.store(after + (lost * REST).min(MAX_REST_US * us), Ordering::Relaxed);
    }
    after
}

/// Yields the CPU to a peer that needs it, unless others would have it instead.
pub fn give_way() {
    let now = cpu::ticks();
    if rest_until(now) == now {
        yield_at(now);
    }
}

/// What is remembered of the last waits of one kind. Zero is valid.
#[derive(Default)]
pub struct Memory {
    skip: AtomicU32,
    penalty: AtomicU32,
    short: AtomicU32,
}

impl Memory {
    pub const fn new() -> Self {
        Memory { skip: AtomicU32::new(0), penalty: AtomicU32::new(0), short: AtomicU32::new(0) }
    }

    pub fn reset(&self) {
        self.skip.store(0, Ordering::Relaxed);
        self.penalty.store(0, Ordering::Relaxed);
        self.short.store(0, Ordering::Relaxed);
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
        if process::cpus() == 1 || (peer_cpu != 0 && peer_cpu == cpu::current()) {
            return false;
        }
        let skip = self.skip.load(Ordering::Relaxed);
        if skip != 0 {
            self.skip.store(skip - 1, Ordering::Relaxed);
            return false;
        }
        let us = cpu::ticks_per_us();
        let start = cpu::ticks();
        let end = start + BUDGET_US * us;
        let rested = rest_until(start);
        if peer_cpu == 0 && rested != start {
            // It may need this very CPU, and would not get it from us.
            return false;
        }
        let mut next_yield = rested.max(start + 5 * us);
        loop {
            for _ in 0..8 {
                if ready() {
                    stats::count(Counter::SpinHits);
                    self.penalty.store(0, Ordering::Relaxed);
                    return true;
                }
                core::hint::spin_loop();
            }
            let now = cpu::ticks();
            if now >= end {
                break;
            }
            if now >= next_yield {
                // Somebody else may need this CPU, perhaps the very peer.
                note();
                let after = yield_at(now);
                if after - now > 3 * us {
                    if ready() {
                        return true;
                    }
                    break;
                }
                next_yield = after + 5 * us;
            }
        }
        stats::count(Counter::SpinMisses);
        let p = (self.penalty.load(Ordering::Relaxed) * 2 + 1).min(MAX_SKIP);
        self.penalty.store(p, Ordering::Relaxed);
        self.skip.store(p, Ordering::Relaxed);
        self.short.store(0, Ordering::Relaxed);
        false
    }

    /// A sleep is over; it took `ticks`. Two short ones in a row, and spinning
    /// is tried again.
    pub fn slept(&self, ticks: u64) {
        if ticks > WORTH_US * cpu::ticks_per_us() {
            self.short.store(0, Ordering::Relaxed);
        } else if self.short.fetch_add(1, Ordering::Relaxed) >= 1 {
            self.skip.store(0, Ordering::Relaxed);
        }
    }
}
