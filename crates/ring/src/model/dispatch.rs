//! Dispatch: if a connection is in the queue of a busy worker, a worker that goes to sleep must
//! not leave it there.

use crate::dispatch::{choose, wake, Workers};
use crate::syn::{len, push};
use fsocket_abi::channel::SynQueue;
use fsocket_sync::doorbell::Want;
use fsocket_sync::model::{every_way, membarrier};
use loom::sync::Arc;

const BOTH: Workers = Workers { all: 0b11, busy: 0, avoid: 0, turns: false };

/// Worker 0 computes, worker 1 goes to sleep, and a client connects at the same time.
///
/// `armed`: worker 0 has an armed epoll instance, in which no thread waits now.
fn run(armed: bool, wakes: fn(u32, &[SynQueue; 2], &mut dyn FnMut(&Want) -> bool)) {
    every_way(Some(3), move || {
        let queues: Arc<[SynQueue; 2]> = Arc::default();
        let q = queues.clone();
        let sleeper = loom::thread::spawn(move || {
            q[1].want.arm_and_fence(2, membarrier);
            q.iter().all(|q| len(q) == 0)
        });
        if armed {
            queues[0].want.hint(1);
        }
        let chosen = choose(BOTH, 0, |w| &queues[w as usize], |want| want & 2 != 0).unwrap();
        assert!(push(&queues[chosen as usize], 7));
        let mut woken = 0;
        wakes(chosen, &queues, &mut |want| {
            let taken = want.take();
            woken |= taken;
            taken & 2 != 0
        });
        let sleeps = sleeper.join().unwrap();
        assert!(!sleeps || woken & 2 != 0, "it sleeps, and nobody wakes it");
    });
}

#[test]
fn who_goes_to_sleep_is_woken_or_sees_it() {
    for armed in [false, true] {
        run(armed, |chosen, all, ring| wake(chosen, BOTH, |w| &all[w as usize], ring));
    }
}

/// The client has chosen worker 0 before worker 1 waited.
#[test]
#[should_panic(expected = "nobody wakes it")]
fn waking_only_the_chosen_one_is_not_enough() {
    run(false, |chosen, all, ring| {
        ring(&all[chosen as usize].want);
    });
}

/// Worker 0's armed instance gets the event, but no thread waits in it.
#[test]
#[should_panic(expected = "nobody wakes it")]
fn waking_the_first_that_is_armed_is_not_enough() {
    run(true, |chosen, all, ring| {
        wake(
            chosen,
            BOTH,
            |w| &all[w as usize],
            |want| {
                ring(want);
                true
            },
        )
    });
}
