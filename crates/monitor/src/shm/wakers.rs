//! Waking threads of other processes: by a message at first, then by a pipe that two processes
//! share with nobody.
//!
//! A thread sleeps on a descriptor that only its own process has. What it may be woken by, a peer
//! must not be able to block, to drain for others, or to make blocking. So each pair of processes
//! has a pipe of its own, made here: the sleeper holds the only description of the read end, the
//! waking process a description of its own, opened once more. Neither can change the other's flags, and
//! neither can open the pipe again: the inode is this process's. See ADR 38.

use crate::clients::Outgoing;
use crate::context::Context;
use crate::shm::pipes::{pipe, Pair};
use crate::shm::state::Shm;
use crate::{shares, ChannelId, ConnId};
use fsocket_abi::channel::{waker_key, KEY_WAKER};
use fsocket_proto::{notice, request};
use std::rc::Rc;

/// Pipes of one channel: every waiter of both sides for each process that may wake it, as far as
/// honest processes ever come.
const PIPES: usize = 1024;
/// Pipes of which the sleeper has not said yet that it watches them.
const UNREADY: usize = 64;

/// What a WAKER or WAKER_READY names.
struct Named {
    channel: ChannelId,
    pair: Pair,
}

impl Shm {
    fn named(&self, ctx: &Context, id: ConnId, msg: &request::Waker) -> Option<Named> {
        let ch = self.channels.get(msg.channel)?;
        let party = |conn, side| ctx.clients.get(conn).is_some_and(|c| ch.is_party(side, c.family));
        // The sleeper on its side, the other process on the other.
        let side = msg.waiter.side;
        let pair = (id, msg.waker, msg.waiter, msg.ringer);
        (party(id, side) && party(msg.ringer, 1 - side)).then_some(Named { channel: msg.channel, pair })
    }

    /// [`request::Ring`]: passed on to the sleeper.
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

    /// [`request::Waker`]: the sleeper's end of a pipe.
    pub fn waker(&mut self, ctx: &mut Context, id: ConnId, msg: request::Waker) {
        let Some(named) = self.named(ctx, id, &msg) else { return };
        let (Some(ch), Some(client)) = (self.channels.get(named.channel), ctx.clients.get(id)) else { return };
        // The process that is to get an end has rung, and reads what it is sent.
        if !ch.pipes.was_rung((msg.ringer, id, msg.waker)) || !ctx.clients.has_room(id, msg.ringer, 1) {
            return;
        }
        if client.pipes_unready >= UNREADY || ch.pipes.0.contains_key(&named.pair) || ch.pipes.0.len() >= PIPES {
            return;
        }
        let uid = client.uid;
        // Out of descriptors: messages go on waking it.
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

    /// [`request::WakerReady`]: the other process's end.
    pub fn waker_ready(&mut self, ctx: &mut Context, id: ConnId, msg: request::WakerReady) {
        let request::WakerReady { waker, channel, waiter, ringer } = msg;
        let Some(named) = self.named(ctx, id, &request::Waker { waker, channel, waiter, ringer }) else { return };
        let (Some(ch), Some(client)) = (self.channels.get_mut(channel), ctx.clients.get_mut(id)) else { return };
        let Some(write) = ch.pipes.0.get_mut(&named.pair).and_then(Option::take) else { return };
        client.pipes_unready -= 1;
        let key = waker_key(client.nonce, usize::from(waker));
        let told = notice::WakerWrite { key, channel, waiter };
        if !ctx.clients.send_for(id, ringer, Outgoing::with(told, Rc::new(write))) {
            // The pipe ends, and messages go on waking the sleeper.
            ch.pipes.0.remove(&named.pair);
        }
    }
}
