//! Ports of clients: leased in blocks, or bound by the client itself.

use super::channels::Channel;
use super::ports::BLOCK;
use super::state::Shm;
use crate::answer::Answer;
use crate::context::Context;
use crate::descriptor;
use crate::foreign::ForeignFd;
use crate::{limits, ChannelId, ConnId, FamilyId};
use fsocket_abi::channel::{CLIENT, SLOTS};
use fsocket_proto::registry::lessee;
use fsocket_proto::{answer, request};
use rustix::io::Errno;
use std::collections::{BTreeSet, HashSet};

impl Shm {
    /// [`request::Ports`].
    pub fn ports(
        &mut self,
        ctx: &mut Context,
        id: ConnId,
        msg: request::Ports,
        fd: Option<ForeignFd>,
    ) -> Answer<answer::Ports> {
        if let Some(first) = msg.again {
            return self.lease_again(ctx, id, msg.channel, first);
        }
        if let Some(fd) = fd {
            let port = self.bound_port(ctx, id, msg.channel, &fd)?;
            return Ok((answer::Ports { first: port, count: 1 }, None));
        }
        // A port for a channel that another process has made is leased until the asking process
        // ends.
        let is_own = self.channels.get(msg.channel).is_some_and(|ch| ch.client == id);
        let first = self.lease_ports(ctx, id, if is_own { msg.channel } else { 0 })?;
        Ok((answer::Ports { first, count: BLOCK.into() }, None))
    }

    pub fn lease_ports(&mut self, ctx: &mut Context, id: ConnId, channel: ChannelId) -> Result<u16, Errno> {
        let many = ctx.clients.get(id).is_some_and(|c| c.leases.len() >= limits::LEASES_UNSHARED);
        let shared = many.then(|| self.shared_ports(ctx, id, channel)).flatten();
        let first = match shared {
            Some(first) => first,
            None => self
                .free_ports(ctx, id)
                .or_else(|_| {
                    self.reclaim_ports(ctx);
                    self.free_ports(ctx, id)
                })
                .or_else(|e| self.shared_ports(ctx, id, channel).ok_or(e))?,
        };
        self.registry.set_owner(first..=first + (BLOCK - 1), channel);
        if let Some(client) = ctx.clients.get_mut(id) {
            client.leases.add(channel, first);
        }
        Ok(first)
    }

    /// A block that the process already uses for other channels, with other destinations. Blocks
    /// are shared only when few are left: if one of two connections with the same port moves to
    /// the kernel, the other one gets another port there (before Linux 6.8).
    fn shared_ports(&self, ctx: &Context, id: ConnId, channel: ChannelId) -> Option<u16> {
        let (ch, client) = (self.channels.get(channel)?, ctx.clients.get(id)?);
        let meets = |other: &ChannelId| self.channels.get(*other).is_none_or(|other| ch.meets(other));
        let fits = |(first, others): &(u16, &[ChannelId])| {
            self.registry.owner(*first) == lessee(channel) && !others.iter().any(meets)
        };
        // Each channel starts its search at another block, so that channels spread over the
        // blocks.
        let turn = channel as usize % client.leases.len().max(1);
        let from = |n| client.leases.each().skip(n);
        let found = from(turn).chain(from(0).take(turn)).find(fits).map(|(first, _)| first)?;
        let has = client.leases.each().filter(|(_, channels)| channels.contains(&channel)).count();
        (has < SLOTS / usize::from(BLOCK)).then_some(found)
    }

    fn free_ports(&mut self, ctx: &mut Context, id: ConnId) -> Result<u16, Errno> {
        self.may_lease(ctx, id)?;
        let used = |p| self.listeners.has_port(p) || self.registry.owner(p) != 0;
        self.ports.lease(used).ok_or(Errno::AGAIN)
    }

    pub fn may_lease(&self, ctx: &Context, id: ConnId) -> Result<(), Errno> {
        let client = ctx.clients.get(id).ok_or(Errno::BADF)?;
        if client.leases.len() >= limits::LEASES_PER_PROCESS
            || (client.uid != 0 && self.leases_of(ctx, client.uid) >= limits::LEASES_PER_UID)
        {
            return Err(Errno::AGAIN);
        }
        Ok(())
    }

    /// Number of a user's leases: those of its processes, of channels whose process has ended, and
    /// of fork groups that still have connections.
    pub fn leases_of(&self, ctx: &Context, uid: u32) -> usize {
        let processes = || ctx.clients.iter().filter(|(_, c)| c.uid == uid);
        let families: BTreeSet<FamilyId> = processes().map(|(_, c)| c.family).collect();
        let of_channels =
            self.channels.iter().filter(|ch| ch.client_uid == uid).flat_map(|ch| ch.leases.iter().copied());
        let kept = self.family_leases.iter().filter(|(family, _)| families.contains(family));
        let all: BTreeSet<u16> = processes()
            .flat_map(|(_, c)| c.leases.each().map(|(first, _)| first))
            .chain(of_channels)
            .chain(kept.flat_map(|(_, leases)| leases.iter().copied()))
            .collect();
        all.len()
    }

    /// Whether this port is leased to the client of a channel, or bound by the client.
    pub fn has_port(&self, ch: &Channel, port: u16) -> bool {
        let kept = || self.family_leases.get(&ch.client_family);
        self.registry.owner(port) == lessee(ch.id) || kept().is_some_and(|kept| kept.contains(&(port / BLOCK * BLOCK)))
    }

    /// Gives a channel the port to which its client has bound a socket. The kernel gives a port to
    /// one socket only, so the socket that is shown last is the real holder.
    fn bound_port(&mut self, ctx: &mut Context, id: ConnId, channel: ChannelId, fd: &ForeignFd) -> Result<u16, Errno> {
        let (port, netns) = (descriptor::bound_port(fd.as_fd())?, descriptor::netns_cookie(fd.as_fd())?);
        let ch = self.channels.get(channel).filter(|ch| ch.client == id).ok_or(Errno::NOENT)?;
        if ch.netns != netns || ch.bound.len() >= limits::BOUND_PER_CHANNEL {
            return Err(Errno::ADDRINUSE);
        }
        let owner = self.registry.owner(port);
        let holder = self.channels.made_by(owner).find(|ch| ch.bound.contains_key(&port)).map(|ch| (ch.id, ch.netns));
        match holder {
            Some((other, place)) if other == channel || place == netns => {
                self.channels.get_mut(other).map(|ch| ch.bound.remove(&port));
            }
            None if owner == 0 || owner == lessee(channel) => {}
            _ => return Err(Errno::ADDRINUSE),
        }
        let ours = owner == lessee(channel) && holder.is_none();
        if !ours {
            let cookie = rustix::net::sockopt::socket_cookie(fd.as_fd())?;
            ctx.broker.bound(fd.as_fd());
            if let Some(ch) = self.channels.get_mut(channel) {
                ch.bound.insert(port, cookie);
            }
            self.registry.set_owner(std::iter::once(port), channel);
        }
        Ok(port)
    }

    /// Frees ports of clients that have ended, when no other ports are left. Channels with waiting
    /// connections keep theirs. (Open connections that such a client has left at a server do no
    /// harm: an accepted connection uses the listener's port anyway.) Each call looks at some
    /// channels. The next call goes on behind them.
    pub fn reclaim_ports(&mut self, ctx: &mut Context) {
        const SOME: usize = 16;
        let left = |ch: &&Channel| ch.client_ended && !ch.leases.is_empty();
        let all = self.channels.from(self.reclaimed).chain(self.channels.from(0));
        let some: Vec<ChannelId> = all.take(self.channels.number()).filter(left).map(|ch| ch.id).take(SOME).collect();
        self.reclaimed = some.last().map_or(0, |last| last.saturating_add(1));
        for id in some {
            let Some(ch) = self.channels.get_mut(id).filter(|ch| ch.mem.queued_all() == 0) else { continue };
            let (family, leases) = (ch.client_family, std::mem::take(&mut ch.leases));
            self.return_ports(ctx, family, leases);
        }
    }

    /// Frees the ports of a channel or process that has ended. If the fork group still has a
    /// connection from a port, the block is kept until the group ends.
    pub fn return_ports(&mut self, ctx: &mut Context, family: FamilyId, leases: Vec<u16>) {
        let kept = self.family_leases.remove(&family).unwrap_or_default();
        if leases.is_empty() && kept.is_empty() {
            return;
        }
        let in_use: BTreeSet<u16> = ctx
            .arenas
            .in_family(family)
            .flat_map(|a| a.mem.open_socks())
            .filter(|s| s.place().side == CLIENT)
            .map(|s| s.local().1)
            .collect();
        let alive = ctx.clients.iter().any(|(_, c)| c.family == family);
        let gone: BTreeSet<u16> = leases.into_iter().chain(kept).collect();
        let of_clients: HashSet<u16> = ctx.clients.iter().flat_map(|(_, c)| c.leases.each()).map(|(f, _)| f).collect();
        let of_channel = |first| self.channels.made_by(self.registry.owner(first)).any(|ch| ch.leases.contains(&first));
        let is_shared = |first: &u16| of_clients.contains(first) || of_channel(*first);
        for first in gone.into_iter().filter(|first| !is_shared(first)).collect::<Vec<_>>() {
            // From now on no connection starts from this block.
            self.registry.set_owner(first..=first + (BLOCK - 1), 0);
            if alive && in_use.range(first..=first + (BLOCK - 1)).next().is_some() {
                self.family_leases.entry(family).or_default().push(first);
            } else {
                self.ports.give_back(first);
            }
        }
    }
}
