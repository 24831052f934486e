//! Tokens: the right to send, or to receive, on a stream.
//!
//! One thread owns a direction at first and enters without an atomic
//! read-modify-write and without a fence: it raises its own `busy` flag and
//! looks again whether it still owns. Another thread that wants in sets the
//! owner to [`SHARED`] and runs a `membarrier`: after that, either the old
//! owner's flag is visible to it, or the old owner will see that it lost the
//! token. From then on everybody, the old owner included, uses an ordinary
//! lock. Nobody waits for a thread that is not inside an operation, and nobody
//! sleeps while inside one.

use crate::{process, stats};
use core::sync::atomic::Ordering;
use fsocket_abi::arena::{Counter, Half};
use fsocket_sync::light_fence;
use fsocket_sys as sys;

/// Owner value: use the lock.
const SHARED: u64 = 1;
/// Owner value: somebody takes over; whoever finds this helps.
const REVOKING: u64 = 2;

/// The calling thread is already inside: a signal handler interrupted it.
#[derive(Debug, Clone, Copy)]
pub struct Busy;

/// Entered; leaves on drop.
pub struct Entered<'a> {
    h: &'a Half,
    shared: bool,
}

#[inline(always)]
pub fn enter(h: &Half) -> Result<Entered<'_>, Busy> {
    let me = process::thread();
    if h.owner.load(Ordering::Relaxed) == me && h.busy.load(Ordering::Relaxed) == 0 {
        h.busy.store(1, Ordering::Relaxed);
        light_fence();
        if h.owner.load(Ordering::Relaxed) == me {
            return Ok(Entered { h, shared: false });
        }
        h.busy.store(0, Ordering::Release);
    }
    enter_slowly(h, me)
}

#[cold]
#[inline(never)]
fn enter_slowly(h: &Half, me: u64) -> Result<Entered<'_>, Busy> {
    loop {
        match h.owner.load(Ordering::Acquire) {
            0 => {
                let _ = h.owner.compare_exchange(0, me, Ordering::AcqRel, Ordering::Relaxed);
            }
            SHARED => return lock(h, me),
            o if o == me => {
                if h.busy.load(Ordering::Relaxed) != 0 {
                    return Err(Busy);
                }
                h.busy.store(1, Ordering::Relaxed);
                light_fence();
                if h.owner.load(Ordering::Relaxed) == me {
                    return Ok(Entered { h, shared: false });
                }
                h.busy.store(0, Ordering::Release);
            }
            o => {
                if o != REVOKING {
                    if h.owner.compare_exchange(o, REVOKING, Ordering::AcqRel, Ordering::Relaxed).is_err() {
                        continue;
                    }
                    stats::count(Counter::TakeOvers);
                }
                sys::heavy_fence();
                // Seeing the flag down once is enough: raised later, the owner
                // finds that it lost the token. Acquire pairs with the release
                // in `drop`.
                wait(|| h.busy.load(Ordering::Acquire) == 0);
                let _ = h.owner.compare_exchange(REVOKING, SHARED, Ordering::AcqRel, Ordering::Relaxed);
            }
        }
    }
}

fn lock(h: &Half, me: u64) -> Result<Entered<'_>, Busy> {
    if h.shared.load(Ordering::Relaxed) == me {
        return Err(Busy);
    }
    // Acquire pairs with the release in `drop`.
    wait(|| h.shared.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed).is_ok());
    Ok(Entered { h, shared: true })
}

fn wait(mut done: impl FnMut() -> bool) {
    let mut n = 0u32;
    while !done() {
        n += 1;
        match n {
            0..=200 => core::hint::spin_loop(),
            201..=400 => sys::sched_yield(),
            _ => sys::nanosleep(50_000),
        }
    }
}

impl Drop for Entered<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        // Release: our positions, for the acquire of whoever enters next.
        if self.shared {
            self.h.shared.store(0, Ordering::Release);
        } else {
            self.h.busy.store(0, Ordering::Release);
        }
    }
}

/// No thread of this process has ever entered: values of a recycled socket.
pub fn reset(h: &Half) {
    h.owner.store(0, Ordering::Relaxed);
    h.busy.store(0, Ordering::Relaxed);
    h.shared.store(0, Ordering::Relaxed);
}
