//! Places of channels by the monitor's number: found in constant time, also one that is not there.

use crate::cow::Sparing;
use crate::lock::Lock;
use crate::pieces::Pieces;
use core::sync::atomic::{fence, AtomicBool, AtomicU32, Ordering};

/// Places there are.
pub const MAX: u32 = 1 << 13;

const HEADS: usize = 1024;

/// Chains of channels whose numbers have the same head: place + 1; 0 ends one.
static HEAD: [AtomicU32; HEADS] = [const { AtomicU32::new(0) }; HEADS];
static NEXT: Pieces<AtomicU32, 1024, { MAX as usize / 1024 }> = Pieces::new();
/// Odd while they are changed.
static CHANGES: AtomicU32 = AtomicU32::new(0);
static CHANGING: Lock<()> = Lock::new(());
/// One is in no chain: a signal handler came with it on top of a change.
static OUTSIDE: AtomicBool = AtomicBool::new(false);
/// Channels that are mapped.
static COUNT: AtomicU32 = AtomicU32::new(0);

fn head(id: u32) -> &'static AtomicU32 {
    // Numbers of one client follow each other; those of others begin at multiples of a power of two.
    &HEAD[(id.wrapping_mul(0x9E37_79B9) >> 22) as usize % HEADS]
}

fn change(f: impl FnOnce() -> bool) -> bool {
    let Ok(_changing) = CHANGING.lock() else { return false };
    CHANGES.fetch_add(1, Ordering::Relaxed);
    // Before the change; `chained` does the reverse.
    fence(Ordering::Release);
    let done = f();
    CHANGES.fetch_add(1, Ordering::Release);
    done
}

/// A channel has its number from now on.
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

/// It had that number.
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
    // (A chain that has a channel too much leads on to the others still.)
    if !taken {
        OUTSIDE.store(true, Ordering::Release);
    }
}

pub fn is_empty() -> bool {
    COUNT.load(Ordering::Relaxed) == 0
}

/// All have to be looked at.
pub struct Unsure;

/// The result of `at` for the place of the channel with this number.
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

/// While others change it, it may lead anywhere.
fn chain(id: u32) -> impl Iterator<Item = u32> {
    let at = |word: &AtomicU32| word.load(Ordering::Acquire).checked_sub(1).filter(|i| *i < MAX);
    core::iter::successors(at(head(id)), move |i| at(NEXT.get(*i as usize)?)).take(MAX as usize)
}

/// In a forked child: another thread may have been in the middle of a change.
pub fn become_child() {
    if CHANGING.reset_after_fork() {
        CHANGES.put(CHANGES.load(Ordering::Relaxed) & !1);
        OUTSIDE.store(true, Ordering::Relaxed);
    }
}
