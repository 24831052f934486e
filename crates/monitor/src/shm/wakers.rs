//! Lets processes wake each other's threads: by messages at first, then by pipes.
//!
//! A thread sleeps on a descriptor. No other process may be able to block that descriptor, to
//! drain it, or to set it to blocking mode. So the monitor makes a pipe for each pair of
//! processes. The sleeper has the only file description of the read end. The process that wakes it
//! has a file description of its own, which was opened separately. So neither can change the
//! other's flags. Neither can open the pipe again, because the inode belongs to the monitor. See
//! ADR 38.

use crate::clients::Outgoing;
use crate::context::Context;
use crate::shm::pipes::{pipe, Pair};
use crate::shm::state::Shm;
use crate::{shares, ChannelId, ConnId};
use fsocket_abi::channel::{waker_key, KEY_WAKER};
use fsocket_proto::{notice, request};
use std::rc::Rc;

/// Pipes of one channel, at most. Honest processes need at most one for each waiter and each
/// process that may wake it.
const PIPES: usize = 1024;
/// Pipes that a sleeper was sent and has not confirmed, at most.
const UNREADY: usize = 64;

/// The subject of a WAKER or WAKER_READY message.
struct Named {
    channel: ChannelId,
    pair: Pair,
}

impl Shm {
    fn named(&self, ctx: &Context, id: ConnId, msg: &request::Waker) -> Option<Named> {
        let ch = self.channels.get(msg.channel)?;
        let party = |conn, side| ctx.clients.get(conn).is_some_and(|c| ch.is_party(side, c.family));
        // The sleeper must be on the named side, and the process that wakes it on the other one.
        let side = msg.waiter.side;
        let pair = (id, msg.waker, msg.waiter, msg.ringer);
        (party(id, side) && party(msg.ringer, 1 - side)).then_some(Named { channel: msg.channel, pair })
    }

    /// Handles [`request::Ring`]: wakes the sleeper.
    pub fn ring(&mut self, ctx: &Context, id: ConnId, msg: request::Ring) {
        let Ok(ch) = self.party(ctx, id, msg.channel) else { return };
        let fits = |family| ch.is_party(msg.waiter.side, family);
        ctx.clients.wake(msg.key, fits, msg.channel, (msg.waiter, Some(id)));
        let waker = ((msg.key & KEY_WAKER) as u8).checked_sub(1);
        let rung = waker.and_then(|waker| Some((id, ctx.clients.by_key(msg.key, fits)?, waker)));
        if let (Some(rung), Some(ch)) = (rung, self.channels.get_mut(msg.channel)) {
            ch.pipes.note_rung(rung);
        }
    }

    /// Handles [`request::Waker`]: sends the sleeper its end of a new pipe.
    pub fn waker(&mut self, ctx: &mut Context, id: ConnId, msg: request::Waker) {
        let Some(named) = self.named(ctx, id, &msg) else { return };
        let (Some(ch), Some(client)) = (self.channels.get(named.channel), ctx.clients.get(id)) else { return };
        // The other process must have rung this waker before, and must be reading its messages.
        if !ch.pipes.was_rung((msg.ringer, id, msg.waker)) || !ctx.clients.has_room(id, msg.ringer, 1) {
            return;
        }
        if client.pipes_unready >= UNREADY || ch.pipes.0.contains_key(&named.pair) || ch.pipes.0.len() >= PIPES {
            return;
        }
        let uid = client.uid;
        // If there are no descriptors, the process is still woken by messages.
        if !self.has_share(ctx, uid, shares::PIPE) {
            return;
        }
        let (Some(ch), Some(client)) = (self.channels.get_mut(named.channel), ctx.clients.get_mut(id)) else { return };
        let Ok((read, write)) = pipe(uid) else { return };
        client.pipes_unready += 1;
        ch.pipes.0.insert(named.pair, Some(write));
        let request::Waker { waker, channel, waiter, ringer } = msg;
        ctx.clients.send(id, Outgoing::with(notice::WakerRead { waker, channel, waiter, ringer }, Rc::new(read)));
    }

    /// Handles [`request::WakerReady`]: sends the other process its end.
    pub fn waker_ready(&mut self, ctx: &mut Context, id: ConnId, msg: request::WakerReady) {
        let request::WakerReady { waker, channel, waiter, ringer } = msg;
        let Some(named) = self.named(ctx, id, &request::Waker { waker, channel, waiter, ringer }) else { return };
        let (Some(ch), Some(client)) = (self.channels.get_mut(channel), ctx.clients.get_mut(id)) else { return };
        let Some(write) = ch.pipes.0.get_mut(&named.pair).and_then(Option::take) else { return };
        client.pipes_unready -= 1;
        let key = waker_key(client.nonce, usize::from(waker));
        let told = notice::WakerWrite { key, channel, waiter };
        if !ctx.clients.send_for(id, ringer, Outgoing::with(told, Rc::new(write))) {
            // The pipe is closed, and messages still wake the sleeper.
            ch.pipes.0.remove(&named.pair);
        }
    }
}
