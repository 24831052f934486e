//! Chooses the worker of a listener that gets a new connection, and the worker to wake: waiting
//! workers come first, busy ones last. (Affinity-Accept, 3.3.1. A SYN queue stands for the accept
//! queue there, and the client for the core that takes the SYN.)

use fsocket_abi::channel::{SynQueue, SYN_CAP, WORKERS};
use fsocket_sync::doorbell::Want;

/// A queue becomes busy above 75 % of its capacity, and stays so until its average is below 10 %.
const HIGH: u32 = SYN_CAP as u32 * 3 / 4;
const LOW: u32 = (SYN_CAP as u32 * ONE) / 10;
/// Averages are 16.16 fixed point, and move by 1 / (2 * SYN_CAP) of the difference.
const ONE: u32 = 1 << 16;

/// The workers whose queues were long lately. The client keeps this, because the client adds to
/// the queues.
#[derive(Clone, Copy)]
pub struct Busy {
    average: [u32; WORKERS],
    mask: u64,
}

impl Busy {
    pub const fn new() -> Busy {
        Busy { average: [0; WORKERS], mask: 0 }
    }

    /// The busy workers, one bit each.
    pub fn mask(&self) -> u64 {
        self.mask
    }

    /// A connection was added to the queue of worker `w`; `lens` returns the lengths of the
    /// queues. The averages of busy workers change as well, because their queues may get no more
    /// connections.
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
            // (An empty queue is not busy, even if its average was never high.)
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

/// Sets of workers of a listener, one bit for each worker.
#[derive(Clone, Copy, Debug, Default)]
pub struct Workers {
    /// All workers that exist.
    pub all: u64,
    /// Workers whose queue was long lately.
    pub busy: u64,
    /// Workers whose CPU has no time left, while another CPU has some.
    pub avoid: u64,
    /// The listener is not balanced: the workers take turns.
    pub turns: bool,
}

impl Workers {
    /// The preferred workers, which are used as long as one of them has room.
    fn good(self) -> u64 {
        self.all & !(self.busy | self.avoid)
    }
}

/// The worker for a new connection; None: no worker has room. The caller changes `start` each
/// time, so that all workers get their share. `sleeps`: does one of the waiters in this word
/// sleep?
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
    // A waiting worker has time, however long its queue was; except if its CPU has none.
    order(workers.all & !workers.avoid)
        .find(waits)
        .or_else(|| order(good).find(|w| len(*w) == 0))
        .or_else(|| order(good).filter(has_room).min_by_key(|w| len(*w)))
        .or_else(|| order(workers.all).find(waits))
        .or_else(|| order(workers.all).filter(has_room).min_by_key(|w| len(*w)))
}

/// Decides which worker to wake, after a connection was put into the queue of `chosen`. `ring`
/// wakes the waiters of a word, and returns whether one of them slept. A thread that sleeps at
/// the chosen worker comes first, then any other sleeping worker, because that one may have begun
/// to sleep after the choice. (An armed thread need not sleep: an epoll instance stays armed
/// while no thread waits in it.) Each thread looks at all queues after arming and before it
/// sleeps, so either it sees the connection or this function sees the thread. (A worker to be
/// avoided is not woken instead of a good one: the good one computes now, and will look later. If
/// it does not, the monitor notices.)
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
        // SAFETY: the type has atomics and padding, for which zero is valid.
        core::array::from_fn(|_| unsafe { core::mem::zeroed() })
    }

    /// Treats every armed waiter as sleeping.
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
        // New connections go to another worker, and this one's queue is empty in the end.
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
