//! If one side of a channel breaks the protocol, the channel ends. That side gets no new channel
//! for a while (ADR 37).

use crate::shm::channels::ChannelMem;
use crate::{limits, ConnId, ListenerId};
use fsocket_abi::channel::SYN_CAP;
use fsocket_sync::atomic::Ordering;
use std::collections::HashMap;
use std::time::Instant;

/// The party that gets no channel to a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Whom {
    /// All processes of a user: a process that breaks the protocol could fork and try again.
    User(u32),
    /// A client that accuses the listener's side. The accusation counts only for the client
    /// itself.
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

    /// Whether this process must use the kernel for this listener.
    pub fn refuses(&self, listener: ListenerId, uid: u32, process: ConnId) -> bool {
        let now = Instant::now();
        let whom = [Whom::User(uid), Whom::Process(process)];
        whom.iter().any(|whom| self.until.get(&(listener, *whom)).is_some_and(|until| *until > now))
    }
}

/// Whether the positions of a queue have values that an honest client cannot have written. The
/// client is to blame, because workers only take entries one by one.
pub fn is_nonsense(mem: &ChannelMem, q: usize) -> bool {
    let queue = mem.queue(q);
    let head = queue.head.load(Ordering::Acquire);
    let tail = queue.tail.load(Ordering::Acquire);
    // (Loaded again: a worker may have moved the head between the two loads.)
    tail.wrapping_sub(head) > SYN_CAP as u32 && queue.head.load(Ordering::Acquire) == head
}
