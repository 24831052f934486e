//! Finds a mapped channel by the monitor's number in constant time, also if there is none.

use crate::cow::Sparing;
use crate::lock::Lock;
use crate::pieces::Pieces;
use core::sync::atomic::{fence, AtomicBool, AtomicU32, Ordering};

/// Number of places.
pub const MAX: u32 = 1 << 13;

const HEADS: usize = 1024;

/// Chains of channels whose numbers hash to the same head. Each link is the channel's index + 1; 0
/// ends the chain.
static HEAD: [AtomicU32; HEADS] = [const { AtomicU32::new(0) }; HEADS];
static NEXT: Pieces<AtomicU32, 1024, { MAX as usize / 1024 }> = Pieces::new();
/// Odd while a thread changes the chains.
static CHANGES: AtomicU32 = AtomicU32::new(0);
static CHANGING: Lock<()> = Lock::new(());
/// A channel may be missing from the chains: a signal handler added it while the interrupted
/// thread changed them.
static OUTSIDE: AtomicBool = AtomicBool::new(false);
/// Number of mapped channels.
static COUNT: AtomicU32 = AtomicU32::new(0);

fn head(id: u32) -> &'static AtomicU32 {
    // One client's numbers are consecutive. Those of other clients begin at multiples of a power
    // of two.
    &HEAD[(id.wrapping_mul(0x9E37_79B9) >> 22) as usize % HEADS]
}

fn change(f: impl FnOnce() -> bool) -> bool {
    let Ok(_changing) = CHANGING.lock() else { return false };
    CHANGES.fetch_add(1, Ordering::Relaxed);
    // Before the change; `find` loads in the reverse order.
    fence(Ordering::Release);
    let done = f();
    CHANGES.fetch_add(1, Ordering::Release);
    done
}

/// Adds a channel that got its number.
pub fn add(place: u32, id: u32) {
    COUNT.fetch_add(1, Ordering::Relaxed);
    let put = change(|| {
        let head = head(id);
        let Some(next) = NEXT.make(place as usize) else { return false };
        next.store(head.load(Ordering::Relaxed), Ordering::Relaxed);
        head.store(place + 1, Ordering::Relaxed);
        true
    });
    if !put {
        OUTSIDE.store(true, Ordering::Release);
    }
}

/// Removes a channel that loses its number.
pub fn remove(place: u32, id: u32) {
    COUNT.fetch_sub(1, Ordering::Relaxed);
    let me = place + 1;
    let taken = change(|| {
        let mut at = head(id);
        while at.load(Ordering::Relaxed) != 0 {
            let Some(next) = NEXT.get(at.load(Ordering::Relaxed) as usize - 1) else { break };
            if at.load(Ordering::Relaxed) == me {
                at.store(next.load(Ordering::Relaxed), Ordering::Relaxed);
                break;
            }
            at = next;
        }
        true
    });
    // (If the channel stays in its chain, the chain still leads to the others.)
    if !taken {
        OUTSIDE.store(true, Ordering::Release);
    }
}

pub fn is_empty() -> bool {
    COUNT.load(Ordering::Relaxed) == 0
}

/// The index cannot answer; the caller must look at all channels.
pub struct Unsure;

/// Calls `at` with the indices of channels in this number's chain, and returns its first result.
pub fn find<T>(id: u32, at: impl Fn(u32) -> Option<T>) -> Result<Option<T>, Unsure> {
    for _ in 0..100 {
        let before = CHANGES.load(Ordering::Acquire);
        if let Some(found) = chain(id).find_map(&at) {
            return Ok(Some(found));
        }
        fence(Ordering::Acquire);
        if before & 1 == 0 && CHANGES.load(Ordering::Relaxed) == before && !OUTSIDE.load(Ordering::Acquire) {
            return Ok(None);
        }
    }
    Err(Unsure)
}

/// While other threads change the chain, the iterator may return wrong indices.
fn chain(id: u32) -> impl Iterator<Item = u32> {
    let at = |word: &AtomicU32| word.load(Ordering::Acquire).checked_sub(1).filter(|i| *i < MAX);
    core::iter::successors(at(head(id)), move |i| at(NEXT.get(*i as usize)?)).take(MAX as usize)
}

/// In a forked child: another thread may have been changing the chains at the fork.
pub fn become_child() {
    if CHANGING.reset_after_fork() {
        CHANGES.put(CHANGES.load(Ordering::Relaxed) & !1);
        OUTSIDE.store(true, Ordering::Relaxed);
    }
}
