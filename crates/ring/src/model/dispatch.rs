//! Dispatch: a connection in the queue of a worker that does not look is not left alone by
//! one that goes to sleep.

use crate::dispatch::{choose, wake, Workers};
use crate::syn::{len, push};
use fsocket_abi::channel::SynQueue;
use fsocket_sync::model::{every_way, membarrier};
use loom::sync::Arc;

const BOTH: Workers = Workers { all: 0b11, busy: 0, avoid: 0, turns: false };

/// Worker 0 computes; worker 1 goes to sleep; a client connects.
fn run(wakes: fn(u32, &[SynQueue; 2]) -> u64) {
    every_way(Some(3), move || {
        let queues: Arc<[SynQueue; 2]> = Arc::default();
        let q = queues.clone();
        let sleeper = loom::thread::spawn(move || {
            q[1].want.arm_and_fence(2, membarrier);
            q.iter().all(|q| len(q) == 0)
        });
        let chosen = choose(BOTH, 0, |w| &queues[w as usize]).unwrap();
        assert!(push(&queues[chosen as usize], 7));
        let woken = wakes(chosen, &queues);
        let sleeps = sleeper.join().unwrap();
        assert!(!sleeps || woken & 2 != 0, "it sleeps, and nobody wakes it");
    });
}

#[test]
fn who_goes_to_sleep_is_woken_or_sees_it() {
    run(|chosen, all| wake(chosen, BOTH, |w| &all[w as usize]));
}

/// Worker 0 was chosen before worker 1 waited.
#[test]
#[should_panic(expected = "nobody wakes it")]
fn waking_only_the_chosen_one_is_not_enough() {
    run(|chosen, all| all[chosen as usize].want.take());
}
