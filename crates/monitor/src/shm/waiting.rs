//! Finds connections that wait in accept queues in shared memory and that no process takes.
//!
//! A process with the library may hold a listener but leave `accept` to programs without the
//! library. Those see only the kernel's accept queue. So a connection moves to the kernel's queue
//! if nothing was taken out of its own queue for a second ([`super::untaken`]). A server that was
//! merely busy accepts the connection there. New connections use the kernel until a process with
//! the library has emptied that queue.
//!
//! The monitor watches a channel after the channel was made, or after its client has announced a
//! connection. It stops when the queues are empty and nothing has come since its last look. So a
//! client that connects all the time need not announce anything.

use crate::membarrier::heavy_fence;
use crate::shm::channels::{Channel, ChannelMem, Channels};
use crate::shm::dispatch::Dispatch;
use crate::shm::switched::Named;
use crate::{ChannelId, ListenerId};
use fsocket_sync::atomic::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// Time between two looks.
const LOOK: Duration = Duration::from_millis(500);
/// A connection has waited too long if it was the first of its queue at this many looks.
const LOOKS: u32 = 3;

/// The channels in which a connection may wait.
#[derive(Default)]
pub struct Waiting {
    watched: BTreeMap<ChannelId, Watched>,
    pub next: Option<Instant>,
}

/// The result of the last look at a channel.
#[derive(Default)]
struct Watched {
    heads: Heads,
    /// Number of connections that had been opened by then.
    opened: u64,
}

/// The head of each queue that is not empty, and how many looks have found the same head.
type Heads = BTreeMap<usize, (u32, u32)>;

impl Waiting {
    /// Watches a channel in which a connection has come or will soon come.
    pub fn arrives(&mut self, channel: ChannelId) {
        self.watched.entry(channel).or_default();
        self.next.get_or_insert_with(|| Instant::now() + LOOK);
    }
}

/// The queues that are not empty now, with the notes of former looks.
fn look(mem: &ChannelMem, before: &Heads) -> Heads {
    let waits = |q: &usize| mem.queued(*q) > 0;
    let found = |q: usize| {
        let head = mem.queue(q).head.load(Ordering::Acquire);
        let looks = before.get(&q).filter(|(was, _)| *was == head).map_or(0, |(_, looks)| *looks);
        (q, (head, looks + 1))
    };
    mem.touched_queues().filter(waits).map(found).collect()
}

impl Waiting {
    /// Looks at the watched channels if it is time. Returns the listeners at which a connection
    /// has waited too long.
    pub fn look_if_due(&mut self, channels: &Channels, dispatch: &Dispatch) -> BTreeSet<ListenerId> {
        let now = Instant::now();
        let mut untaken = BTreeSet::new();
        if self.next.is_none_or(|at| at > now) {
            return untaken;
        }
        let mut quiet = Vec::new();
        self.watched.retain(|id, watched| {
            let Some(ch) = channels.get(*id).filter(|ch| !ch.listener_gone) else { return false };
            let before = std::mem::replace(&mut watched.opened, ch.mem.opened());
            watched.heads = look(&ch.mem, &watched.heads);
            if watched.heads.values().any(|(_, looks)| *looks >= LOOKS) {
                untaken.insert(ch.listener);
            }
            // (A channel that the dispatcher also watches is kept: the dispatcher decides when to
            // stop.)
            if watched.heads.is_empty() && watched.opened == before && !dispatch.looks_at(*id) {
                quiet.push(ch);
            }
            true
        });
        self.stop(&quiet);
        self.next = (!self.watched.is_empty()).then(|| now + LOOK);
        untaken
    }

    /// Stops watching channels in which nothing waits. Their clients announce the next connection.
    fn stop(&mut self, quiet: &[&Channel]) {
        if quiet.is_empty() {
            return;
        }
        let was: Vec<u32> = quiet.iter().map(|ch| ch.mem.idle().swap(1, Ordering::SeqCst)).collect();
        // A client puts a connection into a queue, then reads the `idle` word. So either it sees
        // the word set, or the look below sees its connection.
        heavy_fence();
        for (ch, was) in quiet.iter().zip(was) {
            match look(&ch.mem, &Heads::new()).is_empty() {
                true => _ = self.watched.remove(&ch.id),
                // (If the word was set before, the dispatcher still waits for an announcement.)
                false => _ = ch.mem.idle().compare_exchange(1, was, Ordering::SeqCst, Ordering::SeqCst),
            }
        }
    }
}

/// Connections on their way to kernel queues ([`super::untaken`]).
#[derive(Default)]
pub struct Moving {
    /// Listeners whose queues must be emptied.
    pub listeners: BTreeSet<ListenerId>,
    /// Connections that were taken out, and whose kernel socket is not connected yet.
    pub begun: Vec<Named>,
    /// When to go on, and how long the pause was.
    pub next: Option<(Instant, Duration)>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_of_which_something_is_taken_is_not_stuck() {
        let mem = ChannelMem::new(1, 0).unwrap();
        let mut heads = look(&mem, &Heads::new());
        assert!(heads.is_empty());
        mem.queue(3).tail.store(2, Ordering::Relaxed);
        for looks in 1..=LOOKS {
            heads = look(&mem, &heads);
            assert_eq!(heads, [(3, (0, looks))].into());
            mem.queue(3).tail.store(2 + looks, Ordering::Relaxed);
        }
        mem.queue(3).head.store(1, Ordering::Relaxed);
        heads = look(&mem, &heads);
        assert_eq!(heads, [(3, (1, 1))].into());
        mem.queue(3).head.store(2 + LOOKS, Ordering::Relaxed);
        assert!(look(&mem, &heads).is_empty());
    }
}
