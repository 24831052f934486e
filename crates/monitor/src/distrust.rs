//! Channels in which a side breaks the protocol end, and that side gets no new one for a while (ADR 37).

use crate::channels::ChannelMem;
use crate::wake::close_all;
use crate::{limits, ChannelId, ConnId, ListenerId, Monitor};
use fsocket_abi::channel::{CLIENT, SERVER, SYN_CAP};
use fsocket_proto::Msg;
use fsocket_sync::atomic::Ordering;
use std::collections::HashMap;
use std::time::Instant;

/// Who gets no channel to a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Whom {
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
    fn add(&mut self, listener: ListenerId, whom: Whom) {
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

impl Monitor {
    /// [`fsocket_proto::kind::BROKEN`].
    pub(crate) fn broken(&mut self, id: ConnId, msg: &Msg) {
        let Ok(channel) = ChannelId::try_from(msg.id) else { return };
        let Some(family) = self.clients.get(id).map(|c| c.family) else { return };
        let Some(ch) = self.channels.get(channel) else { return };
        if ch.is_party(SERVER, family) {
            self.end_broken(channel, None);
        } else if ch.is_party(CLIENT, family) {
            self.end_broken(channel, Some(id));
        }
    }

    /// Ends a channel with everything in it. `by`: the client that blames the listener's side; else
    /// the client is to blame.
    pub(crate) fn end_broken(&mut self, channel: ChannelId, by: Option<ConnId>) {
        let Some(ch) = self.channels.get(channel) else { return };
        let (listener, uid, pid) = (ch.listener, ch.client_uid, ch.client_pid);
        tracing::warn!(channel, listener, uid, pid, by_listener = by.is_some(), "a channel's protocol is broken");
        ch.mem.set_listener_closed();
        for side in [CLIENT, SERVER] {
            close_all(ch, side, &self.clients);
        }
        let families: Vec<_> = ch.server_families.iter().copied().chain([ch.client_family]).collect();
        self.distrust.add(listener, by.map_or(Whom::User(uid), Whom::Process));
        self.tell_gone(channel, families, true);
        self.remove_channel(channel);
    }
}
