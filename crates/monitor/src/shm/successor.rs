//! `exec`: the next program of a process inherits from the former program.
//!
//! The program that is about to be replaced announces its *successor* ([`request::Adopt`] with
//! `successor`). It says which listeners the successor will have ([`request::Keep`]), and enters
//! the successor's nonce as a holder of its connections. Then the next program takes over. It maps
//! the arenas ([`request::InheritedArena`]) and channels ([`request::ChannelHandle`]) of those
//! connections, and registers the listeners among its descriptors. At the end the next program
//! reports that everything is taken over ([`request::Settled`]).

use crate::answer::{Answer, Misbehaved};
use crate::context::Context;
use crate::shm::state::Shm;
use crate::ConnId;
use fsocket_proto::{answer, request};
use rustix::io::Errno;

impl Shm {
    /// Notes that the successor will hold a listener.
    pub fn keep_for_successor(&mut self, ctx: &mut Context, id: ConnId, msg: request::Keep) -> Result<(), Misbehaved> {
        let Some(client) = ctx.clients.get(id) else { return Ok(()) };
        let (family, listener) = (client.family, msg.listener);
        if !client.holds.contains(&listener) {
            return Ok(());
        }
        // The successor may already have sent HELLO and even LISTEN: the monitor may read its
        // socket before this one.
        let is_successor = |c: &crate::clients::Client| c.nonce == msg.nonce && c.successor_of == Some(id);
        let successor =
            ctx.clients.family_members(family).into_iter().find(|m| ctx.clients.get(*m).is_some_and(is_successor));
        let successor = successor.ok_or(Misbehaved("KEEP for an unknown successor"))?;
        if let (Some(c), Some(l)) = (ctx.clients.get_mut(successor), self.listeners.get_mut(listener)) {
            if c.holds.insert(listener) {
                c.unclaimed.insert(listener);
            }
            l.holders.insert(successor);
        }
        Ok(())
    }

    /// Returns the next arena in which the successor may have connections.
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

    /// Returns the memory of a channel to a process on one of its sides.
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

    /// The successor has taken over everything for which it has descriptors. The rest of its
    /// inheritance counts as closed.
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

    /// The programs that this process has replaced and whose end the monitor has not seen yet.
    pub fn predecessors(&self, ctx: &Context, id: ConnId) -> Vec<ConnId> {
        let Some(me) = ctx.clients.get(id).filter(|c| c.is_successor) else { return Vec::new() };
        let same = |m: &ConnId| *m != id && ctx.clients.get(*m).is_some_and(|c| c.pid == me.pid);
        ctx.clients.family_members(me.family).into_iter().filter(same).collect()
    }

    /// Gives the successor the queues of the worker that it replaces, so that connections keep
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
