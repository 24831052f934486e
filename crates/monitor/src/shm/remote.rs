//! Connections to other hosts that go over to shared memory with this host's agent, which carries them (ADR 59).
//!
//! As between network namespaces ([`super::crossing`]), but the other end is on another host. A stand-in of the agent's
//! goes over in its place: where the program has opened the connection, the stand-in accepts; where the program has
//! accepted it, the stand-in opens. At what moment the stream is at rest the two programs' ends say, and not the
//! stand-in's, so the counts in the slot are put in place here.

use crate::answer::{answer_json, reply, Answer, Misbehaved};
use crate::clients::Outgoing;
use crate::context::Context;
use crate::shm::offers::{End, Offers};
use crate::shm::state::Shm;
use crate::shm::upgrade::{end_of, listener_at};
use crate::{ChannelId, ConnId, FamilyId, ListenerId};
use fsocket_abi::channel::{slot_state, CLIENT, SERVER, SLOTS};
use fsocket_proto::{agent, Msg};
use fsocket_sync::atomic::Ordering;
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use rustix::net::sockopt::socket_cookie;
use rustix::thread::futex;
use serde::{Deserialize, Serialize};
use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;

/// How long a program waits for the other host when its connection goes over, milliseconds.
const PATIENCE_MS: u64 = 200;
/// Wishes that the agent has not answered. It answers each, or the program has given up long ago.
const WISHES: usize = 4096;

/// `[hosts.rdma]`; see fastsocketd.toml(5).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Links {
    /// Of this host, on its RDMA device.
    pub address: SocketAddr,
    /// Of other hosts.
    pub peers: Vec<SocketAddr>,
    /// The file with the key that all of them have.
    pub key: PathBuf,
}

struct Agent {
    line: ConnId,
    pid: u32,
}

/// A process wants its connection to go over into a slot.
struct Wish {
    channel: ChannelId,
    asked: Msg,
}

/// The program's end of a connection for which a stand-in opens.
#[derive(Clone, Copy)]
struct Accepted {
    by: ConnId,
    name: u64,
    listener: ListenerId,
    /// Of the other host's end: sent and received.
    counts: [u64; 2],
}

#[derive(Default)]
pub struct Remote {
    agent: Option<Agent>,
    /// Hosts that can be reached, and those that could once.
    linked: HashSet<IpAddr>,
    known: HashSet<IpAddr>,
    /// Of agents: what they leave open has not ended.
    families: HashSet<FamilyId>,
    last_wish: u64,
    wishes: HashMap<u64, Wish>,
    /// Accepted ends of connections with such hosts: what the process calls each, and the listener.
    offers: Offers<End, (u64, ListenerId)>,
    /// By cookie: what the agent calls its stand-ins that accept.
    stand_ins: HashMap<u64, u64>,
    /// By cookie of the stand-in that opens.
    pairs: HashMap<u64, Accepted>,
    counts: (u64, [u64; 2]),
}

impl Remote {
    pub fn is_line(&self, id: ConnId) -> bool {
        self.agent.as_ref().is_some_and(|a| a.line == id)
    }

    /// The process with its library.
    fn is_agent(&self, ctx: &Context, id: ConnId) -> bool {
        self.agent.as_ref().is_some_and(|a| ctx.clients.get(id).is_some_and(|c| c.is_process() && c.pid == a.pid))
    }

    fn agent(&self, ctx: &Context) -> Option<ConnId> {
        let pid = self.agent.as_ref()?.pid;
        ctx.clients.iter().find(|(_, c)| c.is_process() && c.pid == pid).map(|(id, _)| id)
    }

    /// Whether the ends of this family are the agent's: if it dies, the other host's program has not closed anything.
    pub fn carries(&self, family: FamilyId) -> bool {
        self.families.contains(&family)
    }

    fn is_linked(&self, ctx: &Context, end: &End) -> bool {
        end.0 == ctx.netns && self.linked.contains(&end.2.ip())
    }

    /// A process is gone, or the agent's line.
    pub fn leave(&mut self, id: ConnId) {
        self.offers.leave(id);
        self.pairs.retain(|_, p| p.by != id);
        if self.is_line(id) {
            tracing::warn!("the agent has ended: no connection to another host goes over");
            *self = Remote {
                known: std::mem::take(&mut self.known),
                families: std::mem::take(&mut self.families),
                ..Remote::default()
            };
        }
    }
}

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
        if uid != 0 && !is_own {
            return Err(Errno::PERM);
        }
        let links = ctx.config.links.as_ref().ok_or(Errno::OPNOTSUPP)?;
        if let Some(before) = &self.remote.agent {
            // It has been killed, and its end has not been read.
            ctx.clients.doom(before.line, "another agent has come");
        }
        let (known, families) = (std::mem::take(&mut self.remote.known), std::mem::take(&mut self.remote.families));
        self.remote = Remote { agent: Some(Agent { line: id, pid }), known, families, ..Remote::default() };
        answer_json(msg, links)
    }

    /// What else the agent says.
    pub fn agent_says(&mut self, ctx: &mut Context, id: ConnId, msg: &Msg) -> Result<(), Misbehaved> {
        match msg.kind {
            agent::LINK => self.link(ctx, IpAddr::V6(Ipv6Addr::from(msg.addr.ip)).to_canonical(), msg.arg0 == 1),
            agent::COUNTS => self.remote.counts = (msg.id, [msg.arg0, msg.arg1]),
            agent::TAKE => self.agent_takes(ctx, msg),
            agent::REFUSE => self.agent_refuses(msg.id),
            agent::PAIR => {
                let result = self.pair(ctx, msg).err().map_or(0, |e| e.raw_os_error());
                ctx.clients.send(id, Outgoing { msg: Msg { result, ..reply(msg) }, fd: None, unasked: false });
            }
            _ => return Err(Misbehaved("the agent says something unknown")),
        }
        Ok(())
    }

    fn link(&mut self, ctx: &Context, host: IpAddr, up: bool) {
        let configured = ctx.config.links.as_ref().is_some_and(|l| l.peers.iter().any(|p| p.ip() == host));
        if up && configured && !ctx.locals.contains(&wire(SocketAddr::new(host, 0)).0) {
            tracing::info!(%host, "connections to this host may go over");
            self.remote.linked.insert(host);
            self.remote.known.insert(host);
            let family = self.remote.agent(ctx).and_then(|id| ctx.clients.get(id)).map(|c| c.family);
            self.remote.families.extend(family);
            self.registry.set_pairs();
        } else if self.remote.linked.remove(&host) {
            tracing::info!(%host, "connections to this host do not go over any more");
        }
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
        let at = &ch.mem.slot(msg.arg0 as usize).migrated[0];
        let counts = [at.base.load(Ordering::Relaxed), at.limit.load(Ordering::Relaxed)];
        self.remote.last_wish += 1;
        let wish = self.remote.last_wish;
        self.remote.wishes.insert(wish, Wish { channel, asked: *msg });
        let line = self.remote.agent.as_ref().map(|a| a.line).ok_or(Errno::NOENT)?;
        let named = |kind| Msg { id: wish, ..Msg::new(kind) };
        let said = Msg { arg0: counts[0], arg1: counts[1], ..named(agent::COUNTS) };
        let open = agent::with_ends(named(agent::OPEN), [wire(end.1), wire(end.2)]);
        for msg in [said, open] {
            ctx.clients.send(line, Outgoing { msg, fd: None, unasked: true });
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
