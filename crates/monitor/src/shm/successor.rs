//! `exec`: the next program of a process inherits from the one before.
//!
//! The program that is about to be replaced announces its *successor* ([`request::Adopt`]
//! with `successor`), says which listeners it leaves to it ([`request::Keep`]), and enters the successor's
//! nonce as a holder of the connections. The next program takes over from there:
//! it maps the arenas ([`request::InheritedArena`]) and channels ([`request::ChannelHandle`])
//! in which those connections live, registers the listeners that it has found among its
//! descriptors, and says when it is done ([`request::Settled`]).

use crate::answer::{Answer, Misbehaved};
use crate::context::Context;
use crate::shm::state::Shm;
use crate::ConnId;
use fsocket_proto::{answer, request};
use rustix::io::Errno;

impl Shm {
    /// A listener goes to the successor as well.
    pub fn keep_for_successor(&mut self, ctx: &mut Context, id: ConnId, msg: request::Keep) -> Result<(), Misbehaved> {
        let Some(client) = ctx.clients.get(id) else { return Ok(()) };
        let (family, listener) = (client.family, msg.listener);
        if !client.holds.contains(&listener) {
            return Ok(());
        }
        // It may have said HELLO, and even LISTEN: its socket may be read before this one.
        let is_successor = |c: &crate::clients::Client| c.nonce == msg.nonce && c.successor_of == Some(id);
        let successor =
            ctx.clients.family_members(family).into_iter().find(|m| ctx.clients.get(*m).is_some_and(is_successor));
        let successor = successor.ok_or(Misbehaved("KEEP for nobody"))?;
        if let (Some(c), Some(l)) = (ctx.clients.get_mut(successor), self.listeners.get_mut(listener)) {
            if c.holds.insert(listener) {
                c.unclaimed.insert(listener);
            }
            l.holders.insert(successor);
        }
        Ok(())
    }

    /// One of the arenas in which the successor may have connections.
    pub fn inherited_arena(
        &self,
        ctx: &Context,
        id: ConnId,
        msg: request::InheritedArena,
    ) -> Answer<answer::InheritedArena> {
        let mut inherited = ctx.arenas.iter().filter(|a| a.creator != id && a.users.contains(&id));
        let arena = inherited.nth(msg.index.min(1 << 20) as usize).ok_or(Errno::NOENT)?;
        Ok((answer::InheritedArena {}, Some(arena.mem.fd.clone())))
    }

    /// The memory of a channel, for a process on one side of it.
    pub fn channel_handle(
        &mut self,
        ctx: &Context,
        id: ConnId,
        msg: request::ChannelHandle,
    ) -> Answer<answer::ChannelHandle> {
        let family = ctx.clients.get(id).ok_or(Errno::BADF)?.family;
        let channel = self.channels.get_mut(msg.channel).filter(|ch| ch.is_party(msg.side.0, family));
        let channel = channel.ok_or(Errno::NOENT)?;
        channel.known_to.insert(id);
        Ok((answer::ChannelHandle { listener: channel.listener }, Some(channel.mem.fd())))
    }

    /// The successor has taken what it has descriptors for; the rest of what it inherited goes
    /// as if it had been closed.
    pub fn settled(&mut self, ctx: &mut Context, id: ConnId) -> Answer<answer::Settled> {
        if let Some(c) = ctx.clients.get_mut(id) {
            c.successor_of = None;
        }
        let left = ctx.clients.get_mut(id).map(|c| std::mem::take(&mut c.unclaimed)).unwrap_or_default();
        for listener in left {
            self.unlisten(ctx, id, listener, false);
        }
        Ok((answer::Settled {}, None))
    }

    /// The program that a successor has replaced, as long as we have not seen its end.
    pub fn predecessors(&self, ctx: &Context, id: ConnId) -> Vec<ConnId> {
        let Some(me) = ctx.clients.get(id).filter(|c| c.is_successor) else { return Vec::new() };
        let same = |m: &ConnId| *m != id && ctx.clients.get(*m).is_some_and(|c| c.pid == me.pid);
        ctx.clients.family_members(me.family).into_iter().filter(same).collect()
    }

    /// The queues of the worker that was replaced are the successor's, so that connections keep
    /// their order.
    pub fn take_places(&mut self, ctx: &mut Context, of: ConnId, numbers: &[(crate::ListenerId, usize)]) {
        let is_successor = |c: &crate::clients::Client| c.successor_of == Some(of);
        let Some(id) = ctx.clients.iter().find(|(_, c)| is_successor(c)).map(|(id, _)| id) else { return };
        let Some(client) = ctx.clients.get_mut(id) else { return };
        for (listener, number) in numbers {
            if client.holds.contains(listener)
                && self.listeners.get_mut(*listener).is_some_and(|l| l.inherit(id, *number))
            {
                client.works.insert(*listener);
            }
        }
    }
}
