//! Moves connections to other hosts into shared memory with this host's agent, which carries them
//! over RDMA (ADR 60).
//!
//! This works as between network namespaces ([`super::crossing`]), but the other end is on another
//! host. A *stand-in*, a socket of the agent, takes the place of the other end. If the program has
//! opened the connection, the stand-in accepts; if the program has accepted it, the stand-in
//! opens. Only the ends of the two programs know when all bytes in flight have arrived, not the
//! stand-in. So the monitor sets the byte counts in the slot.

use crate::answer::{answer_json, any, Answer, Misbehaved};
use crate::clients::Outgoing;
use crate::context::Context;
use crate::descriptor;
use crate::shm::offers::End;
use crate::shm::stand_ins::{Accepted, Agent, Remote, Wish};
use crate::shm::state::Shm;
use crate::shm::upgrade::{end_of, listener_at};
use crate::{ConnId, ListenerId};
use fsocket_abi::channel::{slot_state, CLIENT, SERVER};
use fsocket_proto::{answer, notice, request, Message, Request};
use fsocket_sync::atomic::Ordering;
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use rustix::net::sockopt::socket_cookie;
use rustix::thread::futex;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

/// How long a program waits for the other host while its connection moves, in milliseconds.
const PATIENCE_MS: u64 = 500;
/// Requests that the agent has not answered yet, at most. The agent answers each of them, unless
/// the program has given up long before.
const WISHES: usize = 4096;

fn address((ip, port): ([u8; 16], u16)) -> SocketAddr {
    SocketAddr::new(Ipv6Addr::from(ip).to_canonical(), port)
}

fn wire(addr: SocketAddr) -> ([u8; 16], u16) {
    let ip = match addr.ip() {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    };
    (ip.octets(), addr.port())
}

impl Shm {
    /// [`request::Agent`].
    pub fn agent_comes(&mut self, ctx: &mut Context, id: ConnId) -> Answer<answer::Agent> {
        let client = ctx.clients.get(id).ok_or(Errno::BADF)?;
        let (pid, uid) = (client.pid, client.uid);
        let is_own = ctx.config.private && uid == rustix::process::geteuid().as_raw();
        // (Root of a container also has user number 0, so the network namespace is checked, too.)
        let is_here = descriptor::netns_cookie(client.fd.as_fd()).is_ok_and(|netns| netns == ctx.netns);
        if uid != 0 && !is_own || !is_here {
            return Err(Errno::PERM);
        }
        let links = ctx.config.links.as_ref().ok_or(Errno::OPNOTSUPP)?;
        if let Some(before) = &self.remote.agent {
            // The former agent was killed, and the monitor has not read the end of its socket yet.
            ctx.clients.doom(before.line, "another agent has come");
        }
        let (known, families) = (std::mem::take(&mut self.remote.known), std::mem::take(&mut self.remote.families));
        self.remote = Remote { agent: Some(Agent { line: id, pid }), known, families, ..Remote::default() };
        answer_json(uid, links).map(|(length, fd)| (answer::Agent { length }, fd))
    }

    /// Handles the agent's other messages. `None`: there is no answer.
    pub fn agent_says(&mut self, ctx: &mut Context, said: Request) -> Result<Option<Answer<Message>>, Misbehaved> {
        match said {
            Request::Link(msg) => return Ok(Some(any(self.link(ctx, msg).map(|()| (answer::Link {}, None))))),
            Request::Pair(msg) => return Ok(Some(any(self.pair(ctx, msg).map(|()| (answer::Pair {}, None))))),
            Request::RemoteCounts(msg) => self.remote.counts = (msg.name, [msg.sent, msg.received]),
            Request::Take(msg) => self.agent_takes(ctx, msg),
            Request::Refuse(msg) => self.agent_refuses(msg.wish),
            _ => return Err(Misbehaved("the agent says something unknown")),
        }
        Ok(None)
    }

    fn link(&mut self, ctx: &Context, msg: request::Link) -> Result<(), Errno> {
        let host = IpAddr::V6(Ipv6Addr::from(msg.host)).to_canonical();
        if !msg.up {
            if self.remote.linked.remove(&host) {
                tracing::info!(%host, "connections to this host no longer move to RDMA");
            }
            return Ok(());
        }
        let configured = ctx.config.links.as_ref().is_some_and(|l| l.peers.iter().any(|p| p.ip() == host));
        if !configured || ctx.locals.contains(&wire(SocketAddr::new(host, 0)).0) {
            return Err(Errno::INVAL);
        }
        let agent = self.remote.agent(ctx).and_then(|id| ctx.clients.get(id)).ok_or(Errno::NOENT)?;
        if agent.works.is_empty() {
            return Err(Errno::NOENT);
        }
        tracing::info!(%host, "connections to this host may move to RDMA");
        self.remote.families.insert(agent.family);
        self.remote.linked.insert(host);
        self.remote.known.insert(host);
        self.registry.set_pairs();
        Ok(())
    }

    /// Notes an accepted end: that of a stand-in, or that of a program's connection with a linked
    /// host.
    pub fn offer_remote(
        &mut self,
        ctx: &Context,
        id: ConnId,
        name: u64,
        end: &End,
        fd: BorrowedFd<'_>,
    ) -> Option<Result<(), Errno>> {
        if self.remote.is_agent(ctx, id) {
            let cookie = match socket_cookie(fd) {
                Ok(cookie) => cookie,
                Err(e) => return Some(Err(e)),
            };
            self.remote.stand_ins.insert(cookie, name);
            return Some(Ok(()));
        }
        if !self.remote.is_linked(ctx, end) {
            return self.remote.known.contains(&end.2.ip()).then_some(Ok(()));
        }
        let works = &ctx.clients.get(id)?.works;
        let listener = listener_at(&self.listeners, works, end);
        Some(listener.ok_or(Errno::NOENT).map(|l| self.remote.offers.add(*end, id, (name, l))))
    }

    /// Handles [`request::Meet`] for a connection to a linked host or for a stand-in. Returns the
    /// listener of the channel.
    pub fn meet_remote(
        &mut self,
        ctx: &mut Context,
        id: ConnId,
        fd: BorrowedFd<'_>,
    ) -> Option<Result<ListenerId, Errno>> {
        if self.remote.is_agent(ctx, id) {
            let pair = socket_cookie(fd).ok().and_then(|cookie| self.remote.pairs.get(&cookie));
            return Some(pair.map(|p| p.listener).ok_or(Errno::NOENT));
        }
        let end = end_of(fd).ok()?;
        if !self.remote.is_linked(ctx, &end) {
            // ENOENT lets the program try later: the host may be linked again.
            return self.remote.known.contains(&end.2.ip()).then_some(Err(Errno::NOENT));
        }
        let agent = self.remote.agent(ctx)?;
        let listener = ctx.clients.get(agent).and_then(|c| c.works.first().copied());
        if ctx.is_off(id) {
            return Some(Err(Errno::BUSY));
        }
        if listener.is_some() {
            let _ = ctx.note_party(id, true);
        }
        Some(listener.ok_or(Errno::NOENT))
    }

    /// Handles [`request::Upgrade`] after [`Shm::meet_remote`]. Returns how long the other host
    /// may take, in milliseconds.
    pub fn upgrade_remote(
        &mut self,
        ctx: &mut Context,
        id: ConnId,
        msg: request::Upgrade,
        fd: BorrowedFd<'_>,
    ) -> Option<Result<u64, Errno>> {
        let asked = if self.remote.is_agent(ctx, id) {
            let pair = socket_cookie(fd).ok().and_then(|cookie| self.remote.pairs.get(&cookie).copied());
            pair.ok_or(Errno::NOENT).and_then(|p| self.stand_in_opens(ctx, id, msg, &p))
        } else {
            let end = end_of(fd).ok()?;
            if !self.remote.is_linked(ctx, &end) {
                return self.remote.known.contains(&end.2.ip()).then_some(Err(Errno::NOENT));
            }
            self.wish(ctx, id, msg, &end)
        };
        Some(asked.map(|()| PATIENCE_MS))
    }

    /// A stand-in has opened a slot for a connection that a program has accepted.
    fn stand_in_opens(
        &mut self,
        ctx: &mut Context,
        id: ConnId,
        msg: request::Upgrade,
        to: &Accepted,
    ) -> Result<(), Errno> {
        let family = ctx.clients.get(to.by).ok_or(Errno::NOENT)?.family;
        let ch = self.party(ctx, id, msg.channel)?;
        if ch.client != id || ch.listener != to.listener {
            return Err(Errno::INVAL);
        }
        if !ch.is_party(SERVER, family) || ctx.is_off(to.by) {
            return Err(Errno::NOENT);
        }
        let at = &ch.mem.slot(msg.slot).migrated[0];
        at.base.store(to.counts[0], Ordering::Relaxed);
        at.limit.store(to.counts[1], Ordering::Release);
        self.remote.pairs.retain(|_, p| (p.by, p.name) != (to.by, to.name));
        self.hand_over(ctx, &msg, to.by, to.name)
    }

    /// A program's connection is about to move, so the agent must ask the other host.
    fn wish(&mut self, ctx: &mut Context, id: ConnId, msg: request::Upgrade, end: &End) -> Result<(), Errno> {
        let agent = self.remote.agent(ctx).ok_or(Errno::NOENT)?;
        let (family, agents) =
            (ctx.clients.get(id).ok_or(Errno::BADF)?.family, &ctx.clients.get(agent).ok_or(Errno::NOENT)?.works);
        let ch = self.party(ctx, id, msg.channel)?;
        if !ch.is_party(CLIENT, family) || !agents.contains(&ch.listener) {
            return Err(Errno::INVAL);
        }
        if ctx.is_off(id) || self.remote.wishes.len() >= WISHES {
            return Err(Errno::BUSY);
        }
        let line = self.remote.agent.as_ref().map(|a| a.line).ok_or(Errno::NOENT)?;
        if !ctx.clients.has_room(id, line, 2) {
            return Err(Errno::BUSY);
        }
        let at = &ch.mem.slot(msg.slot).migrated[0];
        let (sent, received) = (at.base.load(Ordering::Relaxed), at.limit.load(Ordering::Relaxed));
        self.remote.last_wish += 1;
        let wish = self.remote.last_wish;
        self.remote.wishes.insert(wish, Wish { asked: msg });
        ctx.clients.send_for(id, line, Outgoing::of(notice::RemoteCounts { wish, sent, received }));
        let ends = [wire(end.1), wire(end.2)];
        ctx.clients.send_for(id, line, Outgoing::of(notice::Open { wish, ends }));
        Ok(())
    }

    fn agent_takes(&mut self, ctx: &mut Context, msg: request::Take) {
        let (Some(Wish { asked }), Some(name)) =
            (self.remote.wishes.remove(&msg.wish), self.remote.stand_ins.remove(&msg.cookie))
        else {
            return;
        };
        let (Some(ch), Some(agent)) = (self.channels.get(asked.channel), self.remote.agent(ctx)) else { return };
        let slot = ch.mem.slot(asked.slot);
        if slot.state.load(Ordering::Acquire) != slot_state::of(slot_state::OFFERED, asked.generation) {
            return;
        }
        // These are the values that the peer of the program would write.
        slot.migrated[0].limit.store(msg.sent, Ordering::Relaxed);
        slot.migrated[0].base.store(msg.received, Ordering::Release);
        let _ = self.hand_over(ctx, &asked, agent, name);
    }

    fn agent_refuses(&mut self, wish: u64) {
        let Some(Wish { asked }) = self.remote.wishes.remove(&wish) else { return };
        let Some(ch) = self.channels.get(asked.channel) else { return };
        let (word, of) = (&ch.mem.slot(asked.slot).state, |state| slot_state::of(state, asked.generation));
        let (from, to) = (of(slot_state::OFFERED), of(slot_state::REFUSED));
        if word.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            let _ = futex::wake(word, futex::Flags::empty(), 1);
        }
    }

    fn pair(&mut self, ctx: &Context, msg: request::Pair) -> Result<(), Errno> {
        let [own, peer] = msg.ends.map(address);
        let (named, counts) = self.remote.counts;
        let end = (ctx.netns, own, peer);
        if named != msg.name || !self.remote.is_linked(ctx, &end) {
            return Err(Errno::INVAL);
        }
        let (by, (name, listener)) = self.remote.offers.take(&end).ok_or(Errno::NOENT)?;
        self.remote.pairs.insert(msg.name, Accepted { by, name, listener, counts });
        Ok(())
    }
}
