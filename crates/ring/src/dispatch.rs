//! To which worker of a listener a client gives a new connection, and which one it wakes:
//! workers that wait first, busy ones last (Affinity-Accept, 3.3.1, with a SYN queue for
//! the accept queue and the client for the core that takes the SYN).

use fsocket_abi::channel::{SynQueue, SYN_CAP, WORKERS};
use fsocket_sync::doorbell::Want;

/// A queue is busy above 75 % of what it holds, until its average is below 10 %.
const HIGH: u32 = SYN_CAP as u32 * 3 / 4;
const LOW: u32 = (SYN_CAP as u32 * ONE) / 10;
/// Averages are 16.16 fixed point, and move by 1 / (2 * SYN_CAP) of the difference.
const ONE: u32 = 1 << 16;

/// Which workers' queues have been long lately. Kept by the client, which adds to them.
#[derive(Clone, Copy)]
pub struct Busy {
    average: [u32; WORKERS],
    mask: u64,
}

impl Busy {
    pub const fn new() -> Busy {
        Busy { average: [0; WORKERS], mask: 0 }
    }

    /// Bit per worker.
    pub fn mask(&self) -> u64 {
        self.mask
    }

    /// A connection was added to worker `w`'s queue, which is `len` long now. The averages of
    /// busy ones move, too: nothing may be added to them any more that could.
    pub fn added(&mut self, w: u32, lens: impl Fn(u32) -> u32) {
        let mut look = self.mask | 1 << w;
        while look != 0 {
            let w = look.trailing_zeros();
            look &= look - 1;
            let len = lens(w).min(SYN_CAP as u32);
            let average = &mut self.average[w as usize % WORKERS];
            let now = len * ONE;
            let step = now.abs_diff(*average) / (2 * SYN_CAP as u32);
            *average = if now > *average { *average + step } else { *average - step };
            // An average that was never high says nothing; a queue that is empty does.
            if len > HIGH {
                self.mask |= 1 << w;
            } else if *average < LOW {
                self.mask &= !(1 << w);
            }
        }
    }
}

impl Default for Busy {
    fn default() -> Busy {
        Busy::new()
    }
}

/// The workers of a listener, a bit each.
#[derive(Clone, Copy, Debug, Default)]
pub struct Workers {
    /// The workers that are there, a bit each.
    pub all: u64,
    /// Whose queue has been long lately.
    pub busy: u64,
    /// Whose CPU has no time left, while another's has.
    pub avoid: u64,
    /// No balance: they take turns.
    pub turns: bool,
}

impl Workers {
    /// Those that a connection goes to while any of them has room to spare.
    fn good(self) -> u64 {
        self.all & !(self.busy | self.avoid)
    }
}

/// The worker for a new connection; None: none has room. `start` turns, so that all have
/// their share. `sleeps`: does one of these waiters?
pub fn choose<'a>(
    workers: Workers,
    start: u32,
    queue: impl Fn(u32) -> &'a SynQueue,
    sleeps: impl Fn(u64) -> bool,
) -> Option<u32> {
    let n = 64 - workers.all.leading_zeros();
    let order = |among: u64| (0..n).map(move |i| start.wrapping_add(i) % n.max(1)).filter(move |w| among >> w & 1 != 0);
    let len = |w: u32| crate::syn::len(queue(w));
    let has_room = |w: &u32| len(*w) < SYN_CAP as u32;
    if workers.turns {
        return order(workers.all).find(has_room);
    }
    let good = workers.good();
    let waits = |w: &u32| len(*w) == 0 && sleeps(queue(*w).want.armed());
    // A waiting worker has time, however long the queue was, but not on a CPU that has none.
    order(workers.all & !workers.avoid)
        .find(waits)
        .or_else(|| order(good).find(|w| len(*w) == 0))
        .or_else(|| order(good).filter(has_room).min_by_key(|w| len(*w)))
        .or_else(|| order(workers.all).find(waits))
        .or_else(|| order(workers.all).filter(has_room).min_by_key(|w| len(*w)))
}

/// After a connection was put into the queue of `chosen`: which worker to wake, by `ring`, which wakes waiters of
/// a word and says whether one of them slept. A thread that sleeps there comes first, then one that sleeps anywhere:
/// it may have begun to since the worker was chosen, and one that is armed may do something else (an epoll
/// instance stays armed while nobody waits in it). Each looks into all queues after arming,
/// before it sleeps, so that one of the two sees the other. (A worker that is to be avoided is not woken for
/// one that is not: that one computes, and will look; if it does not, the monitor sees it.)
pub fn wake<'a>(
    chosen: u32,
    workers: Workers,
    queue: impl Fn(u32) -> &'a SynQueue,
    mut ring: impl FnMut(&Want) -> bool,
) {
    let mut rouse = |w| {
        let want = &queue(w).want;
        !want.is_silent() && ring(want)
    };
    if rouse(chosen) || workers.turns {
        return;
    }
    let others = if workers.avoid >> chosen & 1 != 0 { workers.all } else { workers.all & !workers.avoid };
    (0..64 - others.leading_zeros()).filter(|w| others >> w & 1 != 0).find(|w| rouse(*w));
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use fsocket_sync::atomic::Ordering::Relaxed;

    fn queues() -> [SynQueue; 3] {
        // SAFETY: atomics and padding, for which zero is valid.
        core::array::from_fn(|_| unsafe { core::mem::zeroed() })
    }

    /// Every armed waiter.
    fn all_sleep(want: u64) -> bool {
        want != 0
    }

    fn woken<'a>(chosen: u32, workers: Workers, queue: impl Fn(u32) -> &'a SynQueue) -> u64 {
        let mut woken = 0;
        wake(chosen, workers, queue, |want| {
            let taken = want.take();
            woken |= taken;
            taken != 0
        });
        woken
    }

    #[test]
    fn who_is_armed_and_does_not_sleep_is_not_enough() {
        let q = queues();
        let of = |w: u32| &q[w as usize];
        let _ = q[0].want.arm(1);
        let _ = q[1].want.arm(2);
        assert_eq!(choose(are(0b11, 0, 0), 0, of, |want| want & 2 != 0), Some(1));
        let mut rung = 0;
        wake(0, are(0b11, 0, 0), of, |want| {
            let taken = want.take();
            if taken != 0 {
                rung = rung << 4 | taken;
            }
            taken & 2 != 0
        });
        assert_eq!(rung, 0x12, "first 1, which waits no longer, then 2, which does");
    }

    fn fill(q: &SynQueue, n: u32) {
        q.head.store(0, Relaxed);
        q.tail.store(n, Relaxed);
    }

    fn are(all: u64, busy: u64, avoid: u64) -> Workers {
        Workers { all, busy, avoid, turns: false }
    }

    #[test]
    fn who_waits_comes_first_and_who_is_busy_last() {
        let q = queues();
        let of = |w: u32| &q[w as usize];
        assert_eq!(choose(are(0b111, 0, 0), 1, of, all_sleep), Some(1));
        let _ = q[2].want.arm(1);
        assert_eq!(choose(are(0b111, 0, 0), 1, of, all_sleep), Some(2));
        fill(&q[2], 1);
        assert_eq!(choose(are(0b111, 0b010, 0), 1, of, all_sleep), Some(0), "1 is busy, 2 has something");
        fill(&q[0], 9);
        fill(&q[1], 3);
        fill(&q[2], 5);
        assert_eq!(choose(are(0b111, 0, 0), 0, of, all_sleep), Some(1), "the shortest");
        assert_eq!(choose(are(0b111, 0b010, 0), 0, of, all_sleep), Some(2), "the shortest that is not busy");
        assert_eq!(choose(are(0b010, 0b010, 0), 0, of, all_sleep), Some(1), "nobody else is there");
        fill(&q[1], SYN_CAP as u32);
        assert_eq!(choose(are(0b010, 0, 0), 0, of, all_sleep), None);
        assert_eq!(choose(are(0, 0, 0), 0, of, all_sleep), None);
    }

    #[test]
    fn whose_cpu_has_no_time_is_avoided_until_all_others_are_busy() {
        let q = queues();
        let of = |w: u32| &q[w as usize];
        let _ = q[1].want.arm(1);
        assert_eq!(choose(are(0b011, 0, 0b010), 1, of, all_sleep), Some(0), "though 1 waits");
        fill(&q[0], HIGH);
        assert_eq!(choose(are(0b011, 0, 0b010), 1, of, all_sleep), Some(0));
        assert_eq!(choose(are(0b011, 0b001, 0b010), 0, of, all_sleep), Some(1));
        assert_eq!(woken(0, are(0b011, 0, 0b010), of), 0, "0 computes, and will look");
        assert_eq!(woken(1, are(0b011, 0, 0b010), of), 1);
        let _ = q[1].want.arm(1);
        assert_eq!(woken(0, are(0b011, 0, 0b011), of), 1);
    }

    #[test]
    fn turns() {
        let q = queues();
        let of = |w: u32| &q[w as usize];
        let workers = Workers { turns: true, ..are(0b101, 0b001, 0b001) };
        let _ = q[2].want.arm(1);
        fill(&q[0], 7);
        assert_eq!(
            [0, 1, 2, 3].map(|start| choose(workers, start, of, all_sleep)),
            [Some(0), Some(2), Some(2), Some(0)]
        );
        assert_eq!(woken(0, workers, of), 0, "it is the first one's");
        fill(&q[0], SYN_CAP as u32);
        assert_eq!(choose(workers, 0, of, all_sleep), Some(2));
    }

    #[test]
    fn busy_is_soon_seen_and_slowly_forgotten() {
        let mut b = Busy::new();
        for len in 1..=HIGH {
            b.added(1, |_| len);
        }
        assert_eq!(b.mask(), 0);
        b.added(1, |_| HIGH + 1);
        assert_eq!(b.mask(), 0b10);
        // Connections go to another worker, and this one's queue is empty at last.
        let mut additions = 0;
        while b.mask() != 0 {
            b.added(0, |_| 0);
            additions += 1;
            assert!(additions < 10_000);
        }
        assert!(additions > 50, "{additions}");
    }

    #[test]
    fn somebody_who_waits_elsewhere_is_woken() {
        let q = queues();
        let of = |w: u32| &q[w as usize];
        let _ = q[2].want.arm(4);
        assert_eq!(woken(0, are(0b111, 0, 0), of), 4);
        assert_eq!(woken(0, are(0b111, 0, 0), of), 0);
        let _ = q[2].want.arm(4);
        assert_eq!(woken(0, are(0b011, 0, 0), of), 0, "that worker is gone");
    }
}
