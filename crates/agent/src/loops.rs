//! The event loop: programs' stand-ins, other agents, the monitor.

use crate::carriers;
use crate::hooked::Poll;
use crate::line::{Line, Links};
use crate::link::{self, what, Control, Frame, Made, Out};
use crate::mirror::{After, Mirror, BUFFER};
use crate::peer::Peer;
use crate::stand_in::{Maker, StandIn};
use anyhow::Context as _;
use fsocket_proto::{agent, Msg};
use fsocket_rdma::agree::{self, Key, Role};
use rustix::event::{eventfd, EventfdFlags};
use rustix::fd::{AsFd, OwnedFd};
use std::collections::{BTreeMap, HashSet, VecDeque};
use std::net::IpAddr;
use std::path::Path;
use std::sync::mpsc::{channel, Receiver};
use std::sync::Arc;
use std::time::Instant;

/// In what is looked at: what an event is about, and which one.
const LINE: u64 = 1 << 32;
const BELL: u64 = 2 << 32;
const STRANGERS: u64 = 3 << 32;
const CONTROL: u64 = 4 << 32;
const CARRIER: u64 = 5 << 32;
const MIRROR: u64 = 6 << 32;

pub struct Agent {
    line: Line,
    maker: Maker,
    poll: Poll,
    bell: Arc<OwnedFd>,
    made: Receiver<Made>,
    peers: Vec<Peer>,
    /// In numbers of this agent's, from 1.
    mirrors: BTreeMap<u32, Mirror>,
    last: u32,
    /// Of those that have not gone over here, the last.
    never: VecDeque<u32>,
    /// Of this host.
    own: IpAddr,
    key: Arc<Key>,
    /// Which agent this is.
    instance: u64,
    /// The counts of the next wish.
    counts: [u64; 2],
    /// To be served before the next sleep.
    due: HashSet<u32>,
    buffer: Vec<u8>,
}

impl Agent {
    pub fn new(socket: &Path) -> anyhow::Result<Agent> {
        carriers::check()?;
        let (line, links) = Line::new(socket)?;
        let Links { address, peers, key } = links;
        let secret = std::fs::read(&key).with_context(|| key.display().to_string())?;
        let key = Arc::new(Key::new(&secret)?);
        let bell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let (give, made) = channel();
        let out = || Out { made: give.clone(), bell: bell.clone() };
        link::accept(address, &peers, &key, out).with_context(|| address.to_string())?;
        let connecting = |(number, at): (usize, &std::net::SocketAddr)| {
            let (again, asked) = channel();
            let connects = link::connects(address.ip(), at.ip());
            if connects {
                link::keep_connected(number, *at, key.clone(), out(), asked);
            }
            Peer::new(*at, connects.then_some(again))
        };
        let peers = peers.iter().enumerate().map(connecting).collect();
        let mut instance = [0; 8];
        agree::random(&mut instance)?;
        let agent = Agent {
            line,
            maker: Maker::new(address.ip()).with_context(|| address.to_string())?,
            poll: Poll::new()?,
            bell,
            made,
            peers,
            mirrors: BTreeMap::new(),
            last: 0,
            never: VecDeque::new(),
            own: address.ip(),
            key,
            instance: u64::from_le_bytes(instance) | 1,
            counts: [0; 2],
            due: HashSet::new(),
            buffer: vec![0; BUFFER],
        };
        agent.poll.add(agent.line.fd.as_fd(), libc::EPOLLIN, LINE)?;
        agent.poll.add(agent.bell.as_fd(), libc::EPOLLIN, BELL)?;
        agent.poll.add(agent.maker.listener().as_fd(), libc::EPOLLIN, STRANGERS)?;
        Ok(agent)
    }

    /// Until the monitor ends.
    pub fn run(mut self) -> anyhow::Result<()> {
        // Of looks at what programs have read, milliseconds: seldom while they read nothing.
        let mut pause = 1;
        loop {
            let looks = self.mirrors.values().any(Mirror::is_to_be_looked_at);
            let full = self
                .peers
                .iter()
                .any(|p| p.is_full() || p.is_up() && !p.shown || p.control.is_some() && p.carrier.is_none())
                || self.mirrors.values().any(|m| self.peers[m.peer].lost.is_some());
            let limit = match (self.due.is_empty(), looks, full) {
                (false, ..) => 0,
                (_, true, _) => pause,
                (_, _, true) => 500,
                _ => -1,
            };
            let events = self.poll.wait(limit)?;
            pause = if events.is_empty() && looks { (pause * 2).min(64) } else { 1 };
            if looks {
                self.due.extend(self.mirrors.iter().filter(|(_, m)| m.is_to_be_looked_at()).map(|(id, _)| *id));
            }
            for (name, events) in events {
                self.event(name, events)?;
            }
            for id in std::mem::take(&mut self.due) {
                self.serve(id);
            }
            self.look_after_peers()?;
        }
    }

    fn event(&mut self, name: u64, events: u32) -> anyhow::Result<()> {
        let number = name as u32;
        match name & !u64::from(u32::MAX) {
            LINE => {
                while let Some(msg) = self.line.next().context("the monitor has ended")? {
                    self.told(&msg)?;
                }
            }
            BELL => {
                let _ = rustix::io::read(&*self.bell, &mut [0; 8]);
                while let Ok(made) = self.made.try_recv() {
                    self.made(made)?;
                }
            }
            STRANGERS => self.maker.turn_away(),
            CONTROL => self.heard(number as usize)?,
            CARRIER => self.carried(number as usize),
            _ => {
                if let Some(m) = self.mirrors.get_mut(&number) {
                    m.ended |= events & (libc::EPOLLRDHUP | libc::EPOLLHUP) as u32 != 0;
                    self.due.insert(number);
                }
            }
        }
        Ok(())
    }

    fn made(&mut self, made: Made) -> anyhow::Result<()> {
        match made {
            Made::Control(number, stream) => {
                // The one before may not have been found dead yet. (If it has, a carrier that is there is the new one: the
                // two come by threads of their own.)
                if self.peers[number].control.is_some() {
                    self.lose(number)?;
                }
                let peer = &mut self.peers[number];
                let Ok(control) = Control::new(stream) else { return Ok(()) };
                self.poll.add(
                    control.stream.as_fd(),
                    libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLET,
                    CONTROL | number as u64,
                )?;
                (peer.control, peer.lost, peer.since) = (Some(control), None, Instant::now());
                peer.say(Frame { what: what::HELLO, a: self.instance, ..Frame::default() });
            }
            Made::Data(number, stream) => {
                let peer = &mut self.peers[number];
                let role = if peer.again.is_some() { Role::Connecting } else { Role::Accepting };
                let carrier = match carriers::make(self.own, stream, role, &self.key) {
                    Ok(carrier) => carrier,
                    Err(e) => {
                        tracing::warn!(peer = %peer.at, error = %e, "no carrier");
                        peer.control_failed = true;
                        return Ok(());
                    }
                };
                peer.drop_carrier();
                self.poll.add(carrier.fd(), libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLET, CARRIER | number as u64)?;
                peer.carrier = Some(carrier);
                self.carried(number);
            }
        }
        Ok(())
    }

    /// There is no agent at the other end of a control connection any more.
    fn lose(&mut self, number: usize) -> anyhow::Result<()> {
        let peer = &mut self.peers[number];
        peer.drop_carrier();
        (peer.control, peer.control_failed, peer.greeted) = (None, false, false);
        peer.lost.get_or_insert_with(Instant::now);
        // What was being agreed on never will be.
        let half: Vec<u32> =
            self.mirrors.iter().filter(|(_, m)| m.peer == number && m.remote == 0).map(|(id, _)| *id).collect();
        for id in half {
            self.refuse(id)?;
        }
        Ok(())
    }

    fn look_after_peers(&mut self) -> anyhow::Result<()> {
        for number in 0..self.peers.len() {
            let peer = &mut self.peers[number];
            peer.look();
            if peer.carrier_failed && peer.control.is_some() {
                tracing::warn!(peer = %peer.at, "the link has failed: connections go back to TCP");
                peer.drop_carrier();
                self.all_go_back(number);
            }
            if self.peers[number].control_failed {
                self.lose(number)?;
                self.connect_again(number);
            }
            if self.peers[number].is_lost() {
                self.reset_all(number);
            }
            // Both connections are made anew.
            let idle = !self.mirrors.values().any(|m| m.peer == number);
            if idle && self.peers[number].has_no_carrier() {
                self.lose(number)?;
                self.connect_again(number);
            }
            let peer = &mut self.peers[number];
            if peer.is_up() != peer.shown {
                peer.shown = peer.is_up();
                let ip = match peer.at.ip() {
                    IpAddr::V4(v4) => v4.to_ipv6_mapped(),
                    IpAddr::V6(v6) => v6,
                };
                let addr = fsocket_proto::Addr { ip: ip.octets(), ..Default::default() };
                let up = peer.shown;
                let at = peer.at;
                let known = self.line.request(Msg { arg0: up.into(), addr, ..Msg::new(agent::LINK) })?;
                tracing::info!(peer = %at, up, known, "link");
                if up && !known {
                    // The library has not reached the monitor in time: once more.
                    self.peers[number].shown = false;
                    self.maker.renew()?;
                    self.poll.add(self.maker.listener().as_fd(), libc::EPOLLIN, STRANGERS)?;
                } else if up {
                    // The monitor records accepted connections from here on.
                    let _ = self.maker.prepare();
                }
            }
        }
        Ok(())
    }

    fn connect_again(&mut self, number: usize) {
        if let Some(again) = &self.peers[number].again {
            let _ = again.send(());
        }
    }

    fn all_go_back(&mut self, number: usize) {
        let peer = &mut self.peers[number];
        self.mirrors.values_mut().filter(|m| m.peer == number).for_each(|m| m.go_back(peer));
    }

    fn reset_all(&mut self, number: usize) {
        self.mirrors.retain(|_, m| m.peer != number || m.reset() == After::Keep);
    }

    fn serve(&mut self, id: u32) {
        let Some(m) = self.mirrors.get_mut(&id) else { return };
        if m.serve(&mut self.peers[m.peer], &mut self.buffer) == After::Gone {
            self.mirrors.remove(&id);
        }
    }

    fn carried(&mut self, number: usize) {
        let Some(mut carrier) = self.peers[number].carrier.take() else { return };
        let Agent { mirrors, peers, due, buffer, .. } = self;
        let peer = &mut peers[number];
        let polled = carrier.poll(&mut |[what, to, a], bytes| {
            let Some(m) = u32::try_from(to).ok().and_then(|id| Some((id, mirrors.get_mut(&id)?))) else { return };
            let (id, m) = m;
            if m.peer != number {
                return;
            }
            match m.came(peer, what, a, bytes, buffer) {
                After::Gone => drop(mirrors.remove(&id)),
                After::Keep => drop(due.insert(id)),
            }
        });
        peer.carrier = Some(carrier);
        match polled {
            Err(e) => {
                tracing::debug!(error = %e, "carrier");
                peer.carrier_failed = true;
            }
            Ok(true) => {
                peer.has_room();
                due.extend(mirrors.iter().filter(|(_, m)| m.peer == number).map(|(id, _)| *id));
            }
            Ok(false) => {}
        }
    }

    fn heard(&mut self, number: usize) -> anyhow::Result<()> {
        let Some(control) = &mut self.peers[number].control else { return Ok(()) };
        let frames = match control.poll() {
            Ok(frames) => frames,
            Err(e) => {
                tracing::debug!(error = %e, "control");
                self.peers[number].control_failed = true;
                return Ok(());
            }
        };
        for frame in frames {
            tracing::trace!(?frame, "heard");
            self.hear(number, &frame)?;
        }
        Ok(())
    }

    fn hear(&mut self, number: usize, frame: &Frame) -> anyhow::Result<()> {
        let peer = &mut self.peers[number];
        match frame.what {
            what::HELLO => {
                peer.greeted = true;
                if std::mem::replace(&mut peer.instance, frame.a) != frame.a {
                    // It knows none of them.
                    self.reset_all(number);
                } else {
                    self.all_go_back(number);
                }
                return Ok(());
            }
            what::OPEN => return self.open(number, frame),
            _ => {}
        }
        let id = u32::try_from(frame.to).unwrap_or_default();
        let Some(m) = self.mirrors.get_mut(&id).filter(|m| m.peer == number) else {
            match frame.what {
                what::OPENED | what::BACK if self.never.contains(&id) => never_here(peer, frame.from),
                what::OPENED | what::BACK | what::LEFT => {
                    peer.say(Frame { what: what::CANCEL, to: frame.from, ..Frame::default() });
                }
                _ => {}
            }
            return Ok(());
        };
        let after = match frame.what {
            what::OPENED => return self.opened(id, frame.from),
            what::REFUSED => return self.refuse(id),
            what::CANCEL if m.has_ended() => After::Gone,
            what::CANCEL => m.reset(),
            what::BACK => m.comes_back(peer, frame.a, &mut self.buffer),
            what::CONFIRM => m.confirmed(frame.a != 0),
            what::LEFT => m.leaves_there(peer, frame.a, frame.b),
            _ => After::Keep,
        };
        match after {
            After::Gone => drop(self.mirrors.remove(&id)),
            After::Keep => drop(self.due.insert(id)),
        }
        Ok(())
    }

    /// From the monitor.
    fn told(&mut self, msg: &Msg) -> anyhow::Result<()> {
        match msg.kind {
            agent::COUNTS => self.counts = [msg.arg0, msg.arg1],
            agent::OPEN => {
                let ends = agent::ends(msg);
                let to = IpAddr::V6(ends[1].0.into()).to_canonical();
                let number = self.peers.iter().position(|p| p.at.ip() == to && p.is_up());
                let Some(number) = number else {
                    self.line.tell(&Msg { id: msg.id, ..Msg::new(agent::REFUSE) })?;
                    return Ok(());
                };
                let id = self.add(|id| Mirror::new(id, number, 0, Some(msg.id), None));
                let [a, b] = self.counts;
                self.peers[number].say(Frame { what: what::OPEN, to: 0, from: id.into(), a, b, ends });
            }
            _ => {}
        }
        Ok(())
    }

    fn add(&mut self, make: impl FnOnce(u32) -> Mirror) -> u32 {
        self.last = self.last.wrapping_add(1).max(1);
        self.mirrors.insert(self.last, make(self.last));
        self.last
    }

    fn watch(&mut self, id: u32, stand_in: &StandIn) -> anyhow::Result<()> {
        let events = libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLRDHUP | libc::EPOLLET;
        self.poll.add(stand_in.near.as_fd(), events, MIRROR | u64::from(id))?;
        self.due.insert(id);
        Ok(())
    }

    /// A program on the other host has opened a connection; has this host's end of it gone over?
    fn open(&mut self, number: usize, frame: &Frame) -> anyhow::Result<()> {
        let answer = |what, from: u32| Frame { what, to: frame.from, from: from.into(), ..Frame::default() };
        // The ends as this host sees them; and only what is the other host's own.
        let ends = [frame.ends[1], frame.ends[0]];
        let theirs = IpAddr::V6(ends[1].0.into()).to_canonical() == self.peers[number].at.ip();
        let made = if theirs && self.peers[number].is_up() { self.goes_over(ends, [frame.a, frame.b])? } else { None };
        let Some(stand_in) = made else {
            self.peers[number].say(answer(what::REFUSED, 0));
            return Ok(());
        };
        let id = self.add(|id| Mirror::new(id, number, frame.from, None, None));
        self.watch(id, &stand_in)?;
        if let Some(m) = self.mirrors.get_mut(&id) {
            m.stand_in = Some(stand_in);
        }
        self.peers[number].say(answer(what::OPENED, id));
        Ok(())
    }

    fn goes_over(&mut self, ends: agent::Ends, [sent, received]: [u64; 2]) -> anyhow::Result<Option<StandIn>> {
        let Ok(stand_in) = self.maker.opening() else { return Ok(None) };
        let named = |kind| Msg { id: stand_in.cookie, ..Msg::new(kind) };
        self.line.tell(&Msg { arg0: sent, arg1: received, ..named(agent::COUNTS) })?;
        let granted = self.line.request(agent::with_ends(named(agent::PAIR), ends))?;
        let over = granted && stand_in.open().is_some();
        tracing::debug!(granted, over, "a connection from another host");
        Ok(over.then_some(stand_in))
    }

    /// It has gone over there; and here?
    fn opened(&mut self, id: u32, from: u64) -> anyhow::Result<()> {
        let Some(m) = self.mirrors.get_mut(&id) else { return Ok(()) };
        let (Some(wish), number) = (m.wish.take(), m.peer) else { return Ok(()) };
        let stand_in = self.maker.accepting().ok().filter(|_| self.peers[number].is_up());
        let taken = match &stand_in {
            Some(s) => {
                self.line.tell(&Msg { id: wish, arg0: s.cookie, ..Msg::new(agent::TAKE) })?;
                s.taken().is_some()
            }
            None => false,
        };
        tracing::debug!(taken, "a connection to another host");
        let Some(stand_in) = stand_in.filter(|_| taken) else {
            never_here(&mut self.peers[number], from);
            self.drop_half(id);
            self.line.tell(&Msg { id: wish, ..Msg::new(agent::REFUSE) })?;
            return Ok(());
        };
        self.watch(id, &stand_in)?;
        if let Some(m) = self.mirrors.get_mut(&id) {
            (m.remote, m.stand_in) = (from, Some(stand_in));
        }
        let _ = self.maker.prepare();
        Ok(())
    }

    fn drop_half(&mut self, id: u32) -> Option<u64> {
        const KNOWN: usize = 4096;
        if self.never.len() == KNOWN {
            self.never.pop_front();
        }
        self.never.push_back(id);
        self.mirrors.remove(&id).and_then(|m| m.wish)
    }

    /// It has not gone over there.
    fn refuse(&mut self, id: u32) -> anyhow::Result<()> {
        if let Some(wish) = self.drop_half(id) {
            self.line.tell(&Msg { id: wish, ..Msg::new(agent::REFUSE) })?;
        }
        Ok(())
    }
}

/// A connection has gone over there alone: it goes back, and nothing was read.
fn never_here(peer: &mut Peer, to: u64) {
    for what in [what::BACK, what::CONFIRM] {
        peer.say(Frame { what, to, ..Frame::default() });
    }
}
