//! Connections to other hosts that go over to shared memory with this host's agent, which carries them (ADR 60).
//!
//! As between network namespaces ([`super::crossing`]), but the other end is on another host. A stand-in of the agent's
//! goes over in its place: where the program has opened the connection, the stand-in accepts; where the program has
//! accepted it, the stand-in opens. At what moment the stream is at rest the two programs' ends say, and not the
//! stand-in's, so the counts in the slot are put in place here.

use crate::answer::{answer_json, reply, Answer, Misbehaved};
use crate::clients::Outgoing;
use crate::context::Context;
use crate::descriptor;
use crate::shm::offers::End;
use crate::shm::stand_ins::{Accepted, Agent, Remote, Wish};
use crate::shm::state::Shm;
use crate::shm::upgrade::{end_of, listener_at};
use crate::{ChannelId, ConnId};
use fsocket_abi::channel::{slot_state, CLIENT, SERVER, SLOTS};
use fsocket_proto::{agent, Msg};
use fsocket_sync::atomic::Ordering;
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use rustix::net::sockopt::socket_cookie;
use rustix::thread::futex;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

/// How long a program waits for the other host when its connection goes over, milliseconds.
const PATIENCE_MS: u64 = 500;
/// Wishes that the agent has not answered. It answers each, or the program has given up long ago.
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
    /// [`fsocket_proto::kind::AGENT`].
    pub fn agent_comes(&mut self, ctx: &mut Context, id: ConnId, msg: &Msg) -> Answer {
        let client = ctx.clients.get(id).ok_or(Errno::BADF)?;
        let (pid, uid) = (client.pid, client.uid);
        let is_own = ctx.config.private && uid == rustix::process::geteuid().as_raw();
        // (The root of a container has the number 0, too.)
        let is_here = descriptor::netns_cookie(client.fd.as_fd()).is_ok_and(|netns| netns == ctx.netns);
        if uid != 0 && !is_own || !is_here {
            return Err(Errno::PERM);
        }
        let links = ctx.config.links.as_ref().ok_or(Errno::OPNOTSUPP)?;
        if let Some(before) = &self.remote.agent {
            // It has been killed, and its end has not been read.
            ctx.clients.doom(before.line, "another agent has come");
        }
        let (known, families) = (std::mem::take(&mut self.remote.known), std::mem::take(&mut self.remote.families));
        self.remote = Remote { agent: Some(Agent { line: id, pid }), known, families, ..Remote::default() };
        answer_json(msg, uid, links)
    }

    /// The agent's other messages.
    pub fn agent_says(&mut self, ctx: &mut Context, id: ConnId, msg: &Msg) -> Result<(), Misbehaved> {
        let done = match msg.kind {
            agent::LINK => self.link(ctx, IpAddr::V6(Ipv6Addr::from(msg.addr.ip)).to_canonical(), msg.arg0 == 1),
            agent::PAIR => self.pair(ctx, msg),
            agent::COUNTS => {
                self.remote.counts = (msg.id, [msg.arg0, msg.arg1]);
                return Ok(());
            }
            agent::TAKE => {
                self.agent_takes(ctx, msg);
                return Ok(());
            }
            agent::REFUSE => {
                self.agent_refuses(msg.id);
                return Ok(());
            }
            _ => return Err(Misbehaved("the agent says something unknown")),
        };
        let result = done.err().map_or(0, |e| e.raw_os_error());
        ctx.clients.send(id, Outgoing { msg: Msg { result, ..reply(msg) }, fd: None, unasked: false });
        Ok(())
    }

    fn link(&mut self, ctx: &Context, host: IpAddr, up: bool) -> Result<(), Errno> {
        if !up {
            if self.remote.linked.remove(&host) {
                tracing::info!(%host, "connections to this host do not go over any more");
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
        tracing::info!(%host, "connections to this host may go over");
        self.remote.families.insert(agent.family);
        self.remote.linked.insert(host);
        self.remote.known.insert(host);
        self.registry.set_pairs();
        Ok(())
    }

    /// An accepted end: the agent's stand-in, or a program's of a connection with a host that is linked.
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

    /// [`fsocket_proto::kind::MEET`] of a connection to a host that is linked, or of a stand-in.
    pub fn meet_remote(&mut self, ctx: &mut Context, id: ConnId, msg: &Msg, fd: BorrowedFd<'_>) -> Option<Answer> {
        if self.remote.is_agent(ctx, id) {
            let pair = socket_cookie(fd).ok().and_then(|cookie| self.remote.pairs.get(&cookie).copied());
            return Some(pair.ok_or(Errno::NOENT).and_then(|p| self.channel_to(ctx, id, p.listener, msg, 0)));
        }
        let end = end_of(fd).ok()?;
        if !self.remote.is_linked(ctx, &end) {
            // It may be again.
            return self.remote.known.contains(&end.2.ip()).then_some(Err(Errno::NOENT));
        }
        let agent = self.remote.agent(ctx)?;
        let listener = ctx.clients.get(agent).and_then(|c| c.works.first().copied());
        Some(match listener {
            _ if ctx.is_off(id) => Err(Errno::BUSY),
            Some(listener) => {
                let _ = ctx.note_party(id, true);
                self.channel_to(ctx, id, listener, msg, 0)
            }
            None => Err(Errno::NOENT),
        })
    }

    /// [`fsocket_proto::kind::UPGRADE`] after [`Shm::meet_remote`].
    pub fn upgrade_remote(
        &mut self,
        ctx: &mut Context,
        id: ConnId,
        channel: ChannelId,
        msg: &Msg,
        fd: BorrowedFd<'_>,
    ) -> Option<Answer> {
        if self.remote.is_agent(ctx, id) {
            let pair = socket_cookie(fd).ok().and_then(|cookie| self.remote.pairs.get(&cookie).copied());
            return Some(pair.ok_or(Errno::NOENT).and_then(|p| self.stand_in_opens(ctx, id, channel, msg, &p)));
        }
        let end = end_of(fd).ok()?;
        if !self.remote.is_linked(ctx, &end) {
            return self.remote.known.contains(&end.2.ip()).then_some(Err(Errno::NOENT));
        }
        Some(self.wish(ctx, id, channel, msg, &end))
    }

    /// The stand-in has opened a slot for a connection that a program has accepted.
    fn stand_in_opens(
        &mut self,
        ctx: &mut Context,
        id: ConnId,
        channel: ChannelId,
        msg: &Msg,
        to: &Accepted,
    ) -> Answer {
        let family = ctx.clients.get(to.by).ok_or(Errno::NOENT)?.family;
        let ch = self.party(ctx, id, channel)?;
        if ch.client != id || ch.listener != to.listener || msg.arg0 >= SLOTS as u64 {
            return Err(Errno::INVAL);
        }
        if !ch.is_party(SERVER, family) || ctx.is_off(to.by) {
            return Err(Errno::NOENT);
        }
        let at = &ch.mem.slot(msg.arg0 as usize).migrated[0];
        at.base.store(to.counts[0], Ordering::Relaxed);
        at.limit.store(to.counts[1], Ordering::Release);
        self.remote.pairs.retain(|_, p| (p.by, p.name) != (to.by, to.name));
        self.hand_over(ctx, channel, msg, to.by, to.name)?;
        Ok((Msg { arg2: PATIENCE_MS, ..reply(msg) }, None))
    }

    /// A program's connection is to go over, and the other host is asked.
    fn wish(&mut self, ctx: &mut Context, id: ConnId, channel: ChannelId, msg: &Msg, end: &End) -> Answer {
        let agent = self.remote.agent(ctx).ok_or(Errno::NOENT)?;
        let (family, agents) =
            (ctx.clients.get(id).ok_or(Errno::BADF)?.family, &ctx.clients.get(agent).ok_or(Errno::NOENT)?.works);
        let ch = self.party(ctx, id, channel)?;
        if !ch.is_party(CLIENT, family) || !agents.contains(&ch.listener) || msg.arg0 >= SLOTS as u64 {
            return Err(Errno::INVAL);
        }
        if ctx.is_off(id) || self.remote.wishes.len() >= WISHES {
            return Err(Errno::BUSY);
        }
        let line = self.remote.agent.as_ref().map(|a| a.line).ok_or(Errno::NOENT)?;
        if !ctx.clients.has_room(id, line, 2) {
            return Err(Errno::BUSY);
        }
        let at = &ch.mem.slot(msg.arg0 as usize).migrated[0];
        let counts = [at.base.load(Ordering::Relaxed), at.limit.load(Ordering::Relaxed)];
        self.remote.last_wish += 1;
        let wish = self.remote.last_wish;
        self.remote.wishes.insert(wish, Wish { channel, asked: *msg });
        let named = |kind| Msg { id: wish, ..Msg::new(kind) };
        let said = Msg { arg0: counts[0], arg1: counts[1], ..named(agent::COUNTS) };
        let open = agent::with_ends(named(agent::OPEN), [wire(end.1), wire(end.2)]);
        for msg in [said, open] {
            ctx.clients.send_for(id, line, Outgoing { msg, fd: None, unasked: true });
        }
        Ok((Msg { arg2: PATIENCE_MS, ..reply(msg) }, None))
    }

    fn agent_takes(&mut self, ctx: &mut Context, msg: &Msg) {
        let (Some(wish), Some(name)) = (self.remote.wishes.remove(&msg.id), self.remote.stand_ins.remove(&msg.arg0))
        else {
            return;
        };
        let (Some(ch), Some(agent)) = (self.channels.get(wish.channel), self.remote.agent(ctx)) else { return };
        let slot = ch.mem.slot(wish.asked.arg0 as usize);
        if slot.state.load(Ordering::Acquire) != slot_state::of(slot_state::OFFERED, wish.asked.arg1 as u32) {
            return;
        }
        // As the stand-in's peer would say it.
        slot.migrated[0].limit.store(msg.arg1, Ordering::Relaxed);
        slot.migrated[0].base.store(msg.arg2, Ordering::Release);
        let _ = self.hand_over(ctx, wish.channel, &wish.asked, agent, name);
    }

    fn agent_refuses(&mut self, wish: u64) {
        let Some(Wish { channel, asked }) = self.remote.wishes.remove(&wish) else { return };
        let Some(ch) = self.channels.get(channel) else { return };
        let (word, of) = (&ch.mem.slot(asked.arg0 as usize).state, |state| slot_state::of(state, asked.arg1 as u32));
        let (from, to) = (of(slot_state::OFFERED), of(slot_state::REFUSED));
        if word.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            let _ = futex::wake(word, futex::Flags::empty(), 1);
        }
    }

    fn pair(&mut self, ctx: &Context, msg: &Msg) -> Result<(), Errno> {
        let [own, peer] = agent::ends(msg).map(address);
        let (named, counts) = self.remote.counts;
        let end = (ctx.netns, own, peer);
        if named != msg.id || !self.remote.is_linked(ctx, &end) {
            return Err(Errno::INVAL);
        }
        let (by, (name, listener)) = self.remote.offers.take(&end).ok_or(Errno::NOENT)?;
        self.remote.pairs.insert(msg.id, Accepted { by, name, listener, counts });
        Ok(())
    }
}
