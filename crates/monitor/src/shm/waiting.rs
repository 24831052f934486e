//! Connections that wait in SYN queues, and that no process takes.
//!
//! A process may hold a listener and leave accepting to programs without the library, which know the kernel's queue
//! only. So a connection that waited for a second while nothing was taken out of its queue goes into the kernel's queue
//! ([`super::untaken`]), whoever listens. A server that was busy for so long accepts it there. New connections are
//! the kernel's until a process with the library has emptied that queue.
//!
//! A channel is looked at from when it is made or its client says that something comes, until its queues are empty
//! and nothing has come since the last look. So a client that connects all the time says nothing.

use crate::membarrier::heavy_fence;
use crate::shm::channels::{Channel, ChannelMem, Channels};
use crate::shm::dispatch::Dispatch;
use crate::shm::switched::Named;
use crate::{ChannelId, ListenerId};
use fsocket_sync::atomic::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// Between two looks.
const LOOK: Duration = Duration::from_millis(500);
/// A connection that has been there for so many looks, all of which found the same one first, has waited long enough.
const LOOKS: u32 = 3;

/// Channels in which something may wait.
#[derive(Default)]
pub struct Waiting {
    watched: BTreeMap<ChannelId, Watched>,
    pub next: Option<Instant>,
}

/// What the last look at a channel has found.
#[derive(Default)]
struct Watched {
    heads: Heads,
    /// Connections that had come.
    opened: u64,
}

/// Of each queue that was not empty: its head, and how many looks have found that.
type Heads = BTreeMap<usize, (u32, u32)>;

impl Waiting {
    /// Something comes in a channel, or soon will.
    pub fn arrives(&mut self, channel: ChannelId) {
        self.watched.entry(channel).or_default();
        self.next.get_or_insert_with(|| Instant::now() + LOOK);
    }
}

/// The queues that are not empty, with what was known of them.
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
    /// Looks, if it is time: listeners at which a connection has waited for too long.
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
            // (Those that the balance looks at, too, are told by it when it looks no more.)
            if watched.heads.is_empty() && watched.opened == before && !dispatch.looks_at(*id) {
                quiet.push(ch);
            }
            true
        });
        self.stop(&quiet);
        self.next = (!self.watched.is_empty()).then(|| now + LOOK);
        untaken
    }

    /// Channels in which nothing waits: their clients say when something comes.
    fn stop(&mut self, quiet: &[&Channel]) {
        if quiet.is_empty() {
            return;
        }
        let was: Vec<u32> = quiet.iter().map(|ch| ch.mem.idle().swap(1, Ordering::SeqCst)).collect();
        // A client puts a connection into a queue, and then looks at that word: it has seen it, or the connection is
        // seen here.
        heavy_fence();
        for (ch, was) in quiet.iter().zip(was) {
            match look(&ch.mem, &Heads::new()).is_empty() {
                true => _ = self.watched.remove(&ch.id),
                // (Where the balance waits to be told it still is.)
                false => _ = ch.mem.idle().compare_exchange(1, was, Ordering::SeqCst, Ordering::SeqCst),
            }
        }
    }
}

/// Connections on their way into kernel queues ([`super::untaken`]).
#[derive(Default)]
pub struct Moving {
    /// Listeners whose queues are to be emptied.
    pub listeners: BTreeSet<ListenerId>,
    /// Connections that have been taken, and whose socket is not connected yet.
    pub begun: Vec<Named>,
    /// When to go on, and how long that was.
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
