//! SYN queues: exactly one worker takes each entry.

use crate::syn::{len, pop, push};
use fsocket_abi::channel::{SynQueue, SYN_CAP};
use fsocket_sync::model::every_way;
use loom::sync::Arc;

/// The client pushes `pushes` entries, while worker `i` looks `pops[i]` times.
fn run(pushes: usize, pops: &'static [usize], preemptions: Option<usize>) {
    every_way(preemptions, move || {
        let q = Arc::new(SynQueue::default());
        let workers: Vec<_> = pops
            .iter()
            .map(|&n| {
                let q = q.clone();
                loom::thread::spawn(move || {
                    let look = |_| {
                        // A worker's epoll instance reads the length without taking an entry.
                        assert!(len(&q) <= pushes as u32, "an empty queue looks full");
                        pop(&q).expect("an honest client")
                    };
                    (0..n).filter_map(look).collect::<Vec<_>>()
                })
            })
            .collect();
        let pushed: Vec<_> = (0..pushes).take_while(|&slot| push(&q, slot)).collect();
        assert!(pushed.len() >= pushes.min(SYN_CAP), "refused without being full");
        let mut taken: Vec<_> = workers
            .into_iter()
            .flat_map(|w| {
                let of_one = w.join().unwrap();
                assert!(of_one.is_sorted(), "one worker takes them in order");
                of_one
            })
            .collect();
        // The entries that no worker has taken.
        assert_eq!(len(&q) as usize, pushed.len() - taken.len());
        taken.extend(std::iter::from_fn(|| pop(&q).expect("an honest client")));
        taken.sort_unstable();
        assert_eq!(taken, pushed);
    });
}

#[test]
fn one_worker() {
    run(3, &[3], Some(4));
}

#[test]
fn two_workers() {
    run(2, &[1, 2], Some(3));
}

#[test]
fn two_workers_and_a_second_lap() {
    run(3, &[1, 1], Some(3));
}

/// There is one entry, so a length of two would be wrong.
#[test]
fn an_empty_queue_never_looks_full() {
    run(1, &[1, 1], Some(3));
}
