//! Channels of a monitor that has died. Their connections continue. Such a channel is *half* until
//! the next monitor knows both sides. Each side shows the channel to that monitor (`again` in
//! lifecycle).

use super::{all, by_id, Chan};
use crate::{ctl, waker};
use core::sync::atomic::{AtomicU64, Ordering};
use fsocket_abi::channel::{CLIENT, SERVER, WORKERS};
use fsocket_sys as sys;

/// When the monitor died, or when half channels were last given up, in nanoseconds.
static SINCE: AtomicU64 = AtomicU64::new(0);
/// An unused half channel is given up after this time, because its other side has died or does not
/// come.
const GIVEN_UP_NS: u64 = 5_000_000_000;

impl Chan {
    /// True: the monitor does not know both sides.
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

    /// Has the channel open connections, or waiting ones?
    pub fn is_used(&self) -> bool {
        let waits = |q| super::queue_len(self.queue(q)) > 0;
        self.desc_of.iter().any(|d| d.load(Ordering::Relaxed) != 0)
            || self.my_side() == SERVER && (0..=WORKERS).any(waits)
    }
}

/// Marks all channels as half, because the monitor has died.
pub fn halve_all() {
    SINCE.store(sys::now_ns(), Ordering::Relaxed);
    all().for_each(|c| c.set_half(true));
    waker::monitor_died();
}

/// The next monitor now knows both sides of the channel with this number.
pub fn whole(id: u32) {
    for c in [CLIENT, SERVER].into_iter().filter_map(|side| by_id(id, side)) {
        c.set_half(false);
    }
}

/// Is it time to give up unused half channels? If true, the time starts again.
pub fn is_time_to_give_up() -> bool {
    let now = sys::now_ns();
    let due = now.saturating_sub(SINCE.load(Ordering::Relaxed)) >= GIVEN_UP_NS;
    if due {
        SINCE.store(now, Ordering::Relaxed);
    }
    due
}
