//! Idle watchers: if there is something to look at, a parked watcher has been woken.

use super::every_way;
use crate::atomic::{AtomicU32, Ordering};
use crate::idle;
use loom::sync::Arc;

#[derive(Default)]
struct Group {
    idle: AtomicU32,
    added: AtomicU32,
    rings: AtomicU32,
}

impl Group {
    /// Like the BPF program at a SYN.
    fn add(&self) {
        self.added.fetch_add(1, Ordering::SeqCst);
        if idle::must_ring(&self.idle) {
            self.rings.fetch_add(1, Ordering::SeqCst);
        }
    }
}

/// The watcher looks at the count, and parks if the count is unchanged. Returns the count that it
/// has seen, and whether it is parked.
type Watch = fn(&Group, u32) -> (u32, bool);

/// Like the monitor.
fn proper(g: &Group, seen: u32) -> (u32, bool) {
    let now = g.added.load(Ordering::SeqCst);
    (now, now == seen && idle::park(&g.idle, || g.added.load(Ordering::SeqCst) != now))
}

/// An incorrect watcher: it does not look again after it has parked.
fn hasty(g: &Group, seen: u32) -> (u32, bool) {
    let now = g.added.load(Ordering::SeqCst);
    (now, now == seen && idle::park(&g.idle, || false))
}

fn run(adders: u32, each: u32, looks: u32, watch: Watch) {
    every_way(Some(3), move || {
        let group = Arc::new(Group::default());
        let threads: Vec<_> = (0..adders)
            .map(|_| {
                let g = group.clone();
                loom::thread::spawn(move || (0..each).for_each(|_| g.add()))
            })
            .collect();
        let (mut seen, mut lies) = (0, false);
        for _ in 0..looks {
            if lies && group.rings.swap(0, Ordering::SeqCst) == 0 {
                continue;
            }
            (seen, lies) = watch(&group, seen);
        }
        threads.into_iter().for_each(|t| t.join().unwrap());
        let rung = group.rings.load(Ordering::SeqCst) != 0;
        let missed = group.added.load(Ordering::SeqCst) != seen;
        assert!(!lies || rung || !missed, "nobody looks any more");
        assert!(group.rings.load(Ordering::SeqCst) <= 1, "rung twice for one idle watcher");
    });
}

#[test]
fn one_addition() {
    run(1, 1, 1, proper);
}

#[test]
fn two_additions_two_looks() {
    run(1, 2, 2, proper);
}

#[test]
fn two_cpus() {
    run(2, 1, 2, proper);
}

#[test]
#[should_panic(expected = "nobody looks any more")]
fn looking_before_lying_down_is_not_enough() {
    run(1, 1, 1, hasty);
}
