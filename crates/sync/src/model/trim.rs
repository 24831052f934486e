//! The client does not use a slot again while the server frees the memory of a ring in it.

use super::every_way;
use crate::atomic::{AtomicU32, Ordering};
use crate::trim;
use loom::sync::Arc;

#[derive(Default)]
struct Slot {
    client_closed: AtomicU32,
    trims: [AtomicU32; 2],
    /// The bytes that the next connection has put into the ring.
    bytes: AtomicU32,
}

/// The server, which has closed, frees the ring. The client closes and, if it may, begins the next
/// connection.
fn run(looks: bool) {
    every_way(None, move || {
        let s = Arc::new(Slot::default());
        let server = s.clone();
        let server = loom::thread::spawn(move || {
            let is_free = || server.client_closed.load(Ordering::Acquire) != 0;
            trim::while_in_use(&server.trims[1], is_free, || server.bytes.store(0, Ordering::Relaxed));
        });
        s.client_closed.store(1, Ordering::Release);
        let used = !looks || trim::is_quiet([&s.trims[0], &s.trims[1]]);
        if used {
            s.bytes.store(7, Ordering::Relaxed);
        }
        server.join().unwrap();
        assert!(!used || s.bytes.load(Ordering::Relaxed) == 7, "bytes of the next connection are lost");
    });
}

#[test]
fn a_slot_is_not_used_while_a_ring_is_freed() {
    run(true);
}

#[test]
#[should_panic(expected = "are lost")]
fn both_closed_is_not_enough() {
    run(false);
}
