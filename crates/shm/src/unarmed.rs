//! Waits that no wake-up can end.

use crate::stats;
use fsocket_abi::arena::Counter;
use fsocket_sys as sys;

/// A wait of a thread that has no waker which a peer could ring, so the thread polls. It polls
/// less often the longer nothing happens. So many idle threads cost little, and the delay of an
/// event is only a fraction of the idle time.
#[derive(Default)]
pub struct Unarmed {
    since: Option<u64>,
}

impl Unarmed {
    const LEAST_NS: u64 = 2_000_000;
    const MOST_NS: u64 = 100_000_000;
    const SHARE: u64 = 8;

    /// The length of the next sleep, in nanoseconds.
    pub fn piece(&mut self) -> u64 {
        stats::count(Counter::SleepsCut);
        let now = sys::now_ns();
        let since = *self.since.get_or_insert(now);
        Self::of(now.saturating_sub(since))
    }

    fn of(waited: u64) -> u64 {
        (waited / Self::SHARE).clamp(Self::LEAST_NS, Self::MOST_NS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_without_a_waker_looks_ever_more_seldom() {
        let (mut at, mut looks) = (0, 0);
        while at < 10_000_000_000 {
            at += Unarmed::of(at);
            looks += 1;
        }
        assert!((100..200).contains(&looks), "{looks} times in ten seconds");
        assert_eq!((Unarmed::of(0), Unarmed::of(80_000_000)), (2_000_000, 10_000_000));
    }
}
