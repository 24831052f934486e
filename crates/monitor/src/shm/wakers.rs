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
use fsocket_proto::{kind, waiter, Msg};
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
    fn named(&self, ctx: &Context, id: ConnId, msg: &Msg) -> Option<Named> {
        let channel = ChannelId::try_from(msg.arg0).ok()?;
        let (side, _) = waiter::unpack(msg.arg1)?;
        let ch = self.channels.get(channel)?;
        let party = |conn, side| ctx.clients.get(conn).is_some_and(|c| ch.is_party(side, c.family));
        // The sleeper on its side, the other process on the other.
        let pair = (id, u8::try_from(msg.id).ok()?, msg.arg1, msg.arg2);
        (party(id, side) && party(msg.arg2, 1 - side)).then_some(Named { channel, pair })
    }

    /// [`kind::RING`]: passed on to the sleeper.
    pub fn ring(&mut self, ctx: &mut Context, id: ConnId, msg: &Msg) {
        let Ok(channel) = ChannelId::try_from(msg.arg0) else { return };
        let (Some((side, _)), Ok(ch)) = (waiter::unpack(msg.arg1), self.party(ctx, id, channel)) else { return };
        let fits = |family| ch.is_party(side, family);
        ctx.clients.wake(msg.id, fits, [msg.arg0, msg.arg1, id]);
        let waker = ((msg.id & KEY_WAKER) as u8).checked_sub(1);
        let rung = waker.and_then(|waker| Some((id, ctx.clients.by_key(msg.id, fits)?, waker)));
        if let (Some(rung), Some(ch)) = (rung, self.channels.get_mut(channel)) {
            ch.pipes.note_rung(rung);
        }
    }

    /// [`kind::WAKER`]: the sleeper's end of a pipe.
    pub fn waker(&mut self, ctx: &mut Context, id: ConnId, msg: &Msg) {
        let Some(named) = self.named(ctx, id, msg) else { return };
        let (Some(ch), Some(client)) = (self.channels.get(named.channel), ctx.clients.get(id)) else { return };
        // The process that is to get an end has rung, and reads what it is sent.
        if !ch.pipes.was_rung((msg.arg2, id, named.pair.1)) || !ctx.clients.has_room(id, msg.arg2, 1) {
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
        let out = Msg { arg2: msg.arg2, ..place(kind::WAKER_READ, msg.id, named.channel, msg.arg1) };
        ctx.clients.send(id, Outgoing { msg: out, fd: Some(Rc::new(read)), unasked: true });
    }

    /// [`kind::WAKER_READY`]: the other process's end.
    pub fn waker_ready(&mut self, ctx: &mut Context, id: ConnId, msg: &Msg) {
        let Some(named) = self.named(ctx, id, msg) else { return };
        let (Some(ch), Some(client)) = (self.channels.get_mut(named.channel), ctx.clients.get_mut(id)) else { return };
        let Some(write) = ch.pipes.0.get_mut(&named.pair).and_then(Option::take) else { return };
        client.pipes_unready -= 1;
        let key = waker_key(client.nonce, usize::from(named.pair.1));
        let out = place(kind::WAKER_WRITE, key, named.channel, msg.arg1);
        if !ctx.clients.send_for(id, msg.arg2, Outgoing { msg: out, fd: Some(Rc::new(write)), unasked: true }) {
            // The pipe ends, and messages go on waking the sleeper.
            ch.pipes.0.remove(&named.pair);
        }
    }
}

fn place(kind: u32, id: u64, channel: ChannelId, waiter: u64) -> Msg {
    Msg { id, arg0: u64::from(channel), arg1: waiter, ..Msg::new(kind) }
}
