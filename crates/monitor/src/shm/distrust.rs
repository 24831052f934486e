//! Channels in which a side breaks the protocol end, and that side gets no new one for a while (ADR 37).

use crate::shm::channels::ChannelMem;
use crate::{limits, ConnId, ListenerId};
use fsocket_abi::channel::SYN_CAP;
use fsocket_sync::atomic::Ordering;
use std::collections::HashMap;
use std::time::Instant;

/// A party that gets no channel to a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Whom {
    /// Each process of a user: one that breaks the protocol can fork.
    User(u32),
    /// A client that says the listener's side broke it; it speaks for itself only.
    Process(ConnId),
}

#[derive(Debug, Default)]
pub struct Distrust {
    until: HashMap<(ListenerId, Whom), Instant>,
}

impl Distrust {
    pub fn add(&mut self, listener: ListenerId, whom: Whom) {
        let now = Instant::now();
        self.until.retain(|_, until| *until > now);
        self.until.insert((listener, whom), now + limits::DISTRUST);
    }

    /// Is this process to use the kernel?
    pub fn refuses(&self, listener: ListenerId, uid: u32, process: ConnId) -> bool {
        let now = Instant::now();
        let whom = [Whom::User(uid), Whom::Process(process)];
        whom.iter().any(|whom| self.until.get(&(listener, *whom)).is_some_and(|until| *until > now))
    }
}

/// Does a queue say of itself what no client lets it? Its client is then the one to blame: a worker
/// takes what is there, one after the other.
pub fn is_nonsense(mem: &ChannelMem, q: usize) -> bool {
    let queue = mem.queue(q);
    let head = queue.head.load(Ordering::Acquire);
    let tail = queue.tail.load(Ordering::Acquire);
    // A worker may have gone on between the two.
    tail.wrapping_sub(head) > SYN_CAP as u32 && queue.head.load(Ordering::Acquire) == head
}
