//! Channels of a monitor that has died: they go on, and are whole again when the monitor after it knows
//! both sides ([`crate::again`]).

use super::{all, by_id, Chan};
use crate::ctl;
use core::sync::atomic::{AtomicU64, Ordering};
use fsocket_abi::channel::{CLIENT, SERVER, WORKERS};
use fsocket_sys as sys;

/// When the monitor has died, nanoseconds.
static SINCE: AtomicU64 = AtomicU64::new(0);
/// After that time one that nobody uses is given up: its other side has died, or never comes.
const GIVEN_UP_NS: u64 = 5_000_000_000;

impl Chan {
    #[inline]
    pub fn is_half(&self) -> bool {
        self.half.load(Ordering::Relaxed)
    }

    pub(super) fn set_half(&self, half: bool) {
        match (self.half.swap(half, Ordering::AcqRel), half) {
            (false, true) => ctl::halves(1),
            (true, false) => ctl::halves(-1),
            _ => {}
        };
    }

    pub fn is_used(&self) -> bool {
        let waits = |q| super::queue_len(self.queue(q)) > 0;
        self.desc_of.iter().any(|d| d.load(Ordering::Relaxed) != 0)
            || self.my_side() == SERVER && (0..=WORKERS).any(waits)
    }
}

/// The monitor has died.
pub fn halve_all() {
    SINCE.store(sys::now_ns(), Ordering::Relaxed);
    all().for_each(|c| c.set_half(true));
}

/// The monitor after it knows both sides of this one.
pub fn whole(id: u32) {
    for c in [CLIENT, SERVER].into_iter().filter_map(|side| by_id(id, side)) {
        c.set_half(false);
    }
}

/// Is it time to give up those that nobody uses any more? Not again for as long.
pub fn is_time_to_give_up() -> bool {
    let now = sys::now_ns();
    let due = now.saturating_sub(SINCE.load(Ordering::Relaxed)) >= GIVEN_UP_NS;
    if due {
        SINCE.store(now, Ordering::Relaxed);
    }
    due
}
