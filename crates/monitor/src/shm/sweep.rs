//! Removes channels that have lost a side for good, or whose protocol is broken.

use super::distrust::Whom;
use super::state::Shm;
use super::wake::close_all;
use crate::context::Context;
use crate::membarrier::heavy_fence;
use crate::shm::channels::Channel;
use crate::{ChannelId, ConnId};
use fsocket_abi::channel::{CLIENT, SERVER};
use fsocket_proto::request;
use fsocket_sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long a channel is kept for a connection that has left its queue but that no worker has
/// claimed.
const PATIENCE: Duration = Duration::from_secs(10);

impl Shm {
    /// When the next work on channels is due.
    pub fn next(&self) -> Option<Instant> {
        let looks = [self.look_again.map(|(at, _)| at), self.dispatch.next, self.pairs.ask_at, self.touches.due()];
        let looks = looks.into_iter().chain([self.waiting.next, self.moving.next.map(|(at, _)| at)]);
        looks.flatten().min()
    }

    pub fn look_again_if_due(&mut self, ctx: &mut Context) {
        self.ask_for_pairs_if_due(ctx);
        self.move_untaken_if_due(ctx);
        if self.touches.is_due(Instant::now()) {
            self.registry.touch();
        }
        match self.look_again {
            Some((at, waited)) if at <= Instant::now() => {
                self.look_again = None;
                self.sweep(ctx);
                // The pauses become longer, because a connection that no worker accepts may stay
                // forever.
                if let Some((_, wait)) = &mut self.look_again {
                    *wait = (waited * 2).min(Duration::from_secs(60));
                    self.look_again = Some((Instant::now() + *wait, *wait));
                }
            }
            _ => {}
        }
    }

    /// Removes a channel if nothing uses it. `used`: the client's family has sockets in it.
    pub(super) fn sweep_one(&mut self, ctx: &mut Context, id: ChannelId, crowded: bool, used: bool) {
        let Some(ch) = self.channels.get(id) else { return };
        if ch.client_ended && !ch.client_gone && !used {
            close_all(ch, CLIENT, &ctx.clients);
            ch.mem.set_client_gone();
            if let Some(ch) = self.channels.get_mut(id) {
                ch.client_gone = true;
            }
        }
        let Some(ch) = self.channels.get(id) else { return };
        let family_lives = |family| ctx.clients.iter().any(|(_, c)| c.family == family);
        let servers_gone = ch.listener_gone && !ch.server_families.iter().any(|f| family_lives(*f));
        if servers_gone {
            close_all(ch, SERVER, &ctx.clients);
        }
        // Workers can still accept a connection whose client has connected, sent data and ended.
        // The workers may not have received the channel yet. So the channel stays while any
        // connection in it is open, unless too many such channels stay. It also stays while a
        // connection has moved to the kernel and the peer has not fetched its end yet.
        let done = (ch.client_gone || ch.listener_gone)
            && !ch.switched.borrow().is_waiting()
            && ((servers_gone && !used)
                || self.is_empty(id)
                || (crowded && ch.client_gone && ch.mem.queued_all() == 0));
        if ch.client_gone && !done {
            let wait = Duration::from_secs(1);
            self.look_again.get_or_insert((Instant::now() + wait, wait));
        }
        if done {
            if !ch.listener_gone {
                let families = ch.server_families.clone();
                self.tell_gone(ctx, id, families, false);
            }
            self.remove_channel(ctx, id);
        }
    }

    /// Whether no process uses a connection of this channel. A worker may have taken a connection
    /// out of a queue and be about to claim it; without the channel it would refuse the
    /// connection. (The ended client may have written such a state into any slot, so this counts
    /// for [`PATIENCE`] only.)
    fn is_empty(&self, id: ChannelId) -> bool {
        let Some(ch) = self.channels.get(id) else { return false };
        let idle = ch.mem.slots_in_use() == 0;
        let claimed = (idle && ch.mem.is_being_claimed()).then(|| ch.claimed_from.get().unwrap_or_else(Instant::now));
        ch.claimed_from.set(claimed);
        idle && claimed.is_none_or(|since| since.elapsed() >= PATIENCE)
    }

    /// Removes a channel that has no connections any more.
    pub fn remove_channel(&mut self, ctx: &mut Context, id: ChannelId) {
        let Some(ch) = self.channels.remove(id) else { return };
        self.pairs.channel_gone(id);
        self.registry.set_owner(ch.bound.into_keys(), 0);
        let mut leases = ch.leases;
        if let Some(client) = ctx.clients.get_mut(ch.client) {
            leases.extend(client.leases.leave(id));
        }
        self.return_ports(ctx, ch.client_family, leases);
        for sleeper in ch.pipes.unready() {
            if let Some(c) = ctx.clients.get_mut(sleeper) {
                c.pipes_unready -= 1;
            }
        }
        if let Some(l) = self.listeners.get_mut(ch.listener) {
            l.channels.remove(&id);
            l.opened = l.opened.saturating_add(ch.mem.opened());
        }
        // (A channel of a former monitor may have no listener yet.)
        if ch.listener != 0 {
            self.registry.serves_no_more(ch.addr.port);
        }
        tracing::debug!(channel = id, "channel ended");
    }

    /// [`request::Rest`].
    pub fn rests(&mut self, ctx: &mut Context, id: ConnId, request::Rest { channel }: request::Rest) {
        let own = |ch: &&Channel| ch.client == id && ch.is_whole() && !ch.client_ended && !ch.listener_gone;
        let Some(ch) = self.channels.get(channel).filter(own) else { return };
        if !ch.mem.is_at_rest() {
            return; // without the fence, which costs all CPUs time
        }
        let closed = ch.mem.listener_closed();
        if closed.swap(1, Ordering::SeqCst) != 0 {
            return;
        }
        // As in `end_listening`: after this fence, a client that did not see the change has its
        // connection in the channel.
        heavy_fence();
        if !ch.bound.is_empty() || ch.switched.borrow().is_waiting() || !ch.mem.is_at_rest() {
            return closed.store(0, Ordering::SeqCst);
        }
        let families: Vec<_> = ch.server_families.iter().copied().chain([ch.client_family]).collect();
        self.tell_gone(ctx, channel, families, false);
        self.remove_channel(ctx, channel);
    }

    /// [`request::Broken`].
    pub fn broken(&mut self, ctx: &mut Context, id: ConnId, request::Broken { channel }: request::Broken) {
        let Some(family) = ctx.clients.get(id).map(|c| c.family) else { return };
        let Some(ch) = self.channels.get(channel) else { return };
        if ch.is_party(SERVER, family) {
            self.end_broken(ctx, channel, None);
        } else if ch.is_party(CLIENT, family) {
            self.end_broken(ctx, channel, Some(id));
        }
    }

    /// Ends a channel with all its connections. `by`: the client that blames the listener's side.
    /// `None`: the client is to blame.
    pub fn end_broken(&mut self, ctx: &mut Context, channel: ChannelId, by: Option<ConnId>) {
        let Some(ch) = self.channels.get(channel) else { return };
        let (listener, uid, pid) = (ch.listener, ch.client_uid, ch.client_pid);
        tracing::warn!(channel, listener, uid, pid, by_listener = by.is_some(), "a channel's protocol is broken");
        ch.mem.listener_closed().store(1, Ordering::SeqCst);
        for side in [CLIENT, SERVER] {
            close_all(ch, side, &ctx.clients);
        }
        let families: Vec<_> = ch.server_families.iter().copied().chain([ch.client_family]).collect();
        self.distrust.add(listener, by.map_or(Whom::User(uid), Whom::Process));
        self.tell_gone(ctx, channel, families, true);
        self.remove_channel(ctx, channel);
    }
}
