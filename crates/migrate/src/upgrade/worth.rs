//! When a connection between network namespaces tries to go over. That costs both ends and the monitor, and the opener,
//! whose try decides, has seen whether it paid for earlier ones.

use super::calls::CALLS;
use crate::table::Desc;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use fsocket_ring as ring;
use fsocket_sys as sys;

/// As how many calls a request behind an answer counts there.
pub(super) const TURN: u32 = CALLS / 2;
/// A try costs both processes and the monitor some 200 us of their time, as eight requests in the kernel do. The third
/// request is worth it if few connections get there; where one follows the other some twentieth is.
const LATER: u32 = 16 * TURN;
/// So many requests in shared memory save what a change of path costs, or so many bytes.
const PAYS: u64 = 14;
const PAYS_BYTES: u64 = 1 << 20;
/// [`Desc::moved`]
const EARLY: u8 = 1;
const LATE: u8 = 2;

/// When the next early try of this process may be.
static AGAIN: AtomicU64 = AtomicU64::new(0);
/// A hundred times what it costs one side, nanoseconds.
const PAUSE_NS: u64 = 10_000_000;
/// How often that is doubled, and [`LATER`].
static PAUSE: Doubled = Doubled(AtomicU32::new(0), 8);
static LONGER: Doubled = Doubled(AtomicU32::new(0), 4);

/// Once more, up to so often, for each connection that has gone over and ended too soon; once less for each that has lasted.
struct Doubled(AtomicU32, u32);

impl Doubled {
    fn get(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }
    fn learn(&self, paid: bool) {
        let now = self.get();
        let next = if paid { now.saturating_sub(1) } else { (now + 1).min(self.1) };
        self.0.store(next, Ordering::Relaxed);
    }
}

/// After how many calls a try is no early one. The accepter is to have offered its end before the opener tries.
fn later(opener: bool) -> u32 {
    if opener {
        (LATER << LONGER.get()) + 2 * TURN
    } else {
        LATER
    }
}

/// Whether a try after so many calls is an early one. Err: it is not worth it, but after so many calls.
pub(super) fn first_try(d: &Desc, opener: bool, calls: u32) -> Result<bool, u32> {
    let is_early = d.across.load(Ordering::Relaxed) && calls < later(opener);
    if is_early && sys::now_ns() < AGAIN.load(Ordering::Relaxed) {
        return Err(later(opener));
    }
    Ok(is_early)
}

pub(super) fn tried(opener: bool) {
    let often = if opener { PAUSE.get() } else { 0 };
    AGAIN.store(sys::now_ns() + (PAUSE_NS << often), Ordering::Relaxed);
}

/// It has gone over; we have opened it.
pub(super) fn moved(d: &Desc) {
    let is_early = d.calls.load(Ordering::Relaxed) < later(true);
    d.moved.store(if is_early { EARLY } else { LATE }, Ordering::Relaxed);
}

/// It ends, over shared memory.
pub fn ended(d: &Desc) {
    let what = match d.moved.load(Ordering::Relaxed) {
        EARLY => &PAUSE,
        LATE => &LONGER,
        _ => return,
    };
    d.moved.store(0, Ordering::Relaxed);
    let s = d.sock();
    let bytes = s.tx.bytes.load(Ordering::Relaxed).saturating_add(s.rx.bytes.load(Ordering::Relaxed));
    what.learn(ring::records(&s.tx) >= PAYS || bytes >= PAYS_BYTES);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doubled_within_bounds() {
        let often = Doubled(AtomicU32::new(1), 3);
        let seen = [false, false, false, false, true, true, true, true, true].map(|paid| {
            often.learn(paid);
            often.get()
        });
        assert_eq!(seen, [2, 3, 3, 3, 2, 1, 0, 0, 0]);
    }
}
