//! The start of a connection between hosts: it moves on both hosts, or on neither.

use crate::link::{what, Frame};
use crate::mirror::Mirror;
use crate::peer::Peer;
use crate::stand_in::StandIn;
use crate::state::{Agent, MIRROR};
use fsocket_proto::{request, Ends};
use rustix::fd::AsFd;
use std::net::IpAddr;

impl Agent {
    pub fn add(&mut self, make: impl FnOnce(u32) -> Mirror) -> u32 {
        self.last = self.last.wrapping_add(1).max(1);
        self.mirrors.insert(self.last, make(self.last));
        self.last
    }

    pub fn watch(&mut self, id: u32, stand_in: &StandIn) -> anyhow::Result<()> {
        let events = libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLRDHUP | libc::EPOLLET;
        self.poll.add(stand_in.near.as_fd(), events, MIRROR | u64::from(id))?;
        self.due.insert(id);
        Ok(())
    }

    /// Handles OPEN: a program on the other host has opened a connection. Tries to move the end on
    /// this host, and answers.
    pub fn open(&mut self, number: usize, frame: &Frame) -> anyhow::Result<()> {
        let answer = |what, from: u32| Frame { what, to: frame.from, from: from.into(), ..Frame::default() };
        // The ends as this host sees them. The other agent may only name addresses that belong to
        // its own host.
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

    fn goes_over(&mut self, ends: Ends, [sent, received]: [u64; 2]) -> anyhow::Result<Option<StandIn>> {
        let Ok(stand_in) = self.maker.opening() else { return Ok(None) };
        let name = stand_in.cookie;
        self.line.tell(request::RemoteCounts { name, sent, received })?;
        let granted = self.line.request(request::Pair { name, ends })?;
        let over = granted && stand_in.open().is_some();
        tracing::debug!(granted, over, "a connection from another host");
        Ok(over.then_some(stand_in))
    }

    /// Handles OPENED: the connection has moved on the other host. Tries to move it here.
    pub fn opened(&mut self, id: u32, from: u64) -> anyhow::Result<()> {
        let Some(m) = self.mirrors.get_mut(&id) else { return Ok(()) };
        let (Some(wish), number) = (m.wish.take(), m.peer) else { return Ok(()) };
        let stand_in = self.maker.accepting().ok().filter(|_| self.peers[number].is_up());
        let taken = match &stand_in {
            Some(s) => {
                self.line.tell(request::Take { wish, cookie: s.cookie, sent: 0, received: 0 })?;
                s.taken().is_some()
            }
            None => false,
        };
        tracing::debug!(taken, "a connection to another host");
        let Some(stand_in) = stand_in.filter(|_| taken) else {
            never_here(&mut self.peers[number], from);
            self.drop_half(id);
            self.line.tell(request::Refuse { wish })?;
            return Ok(());
        };
        self.watch(id, &stand_in)?;
        if let Some(m) = self.mirrors.get_mut(&id) {
            (m.remote, m.stand_in) = (from, Some(stand_in));
        }
        let _ = self.maker.prepare();
        Ok(())
    }

    pub fn drop_half(&mut self, id: u32) -> Option<u64> {
        const KNOWN: usize = 4096;
        if self.never.len() == KNOWN {
            self.never.pop_front();
        }
        self.never.push_back(id);
        self.mirrors.remove(&id).and_then(|m| m.wish)
    }

    /// Handles REFUSED: the connection has not moved on the other host.
    pub fn refuse(&mut self, id: u32) -> anyhow::Result<()> {
        if let Some(wish) = self.drop_half(id) {
            self.line.tell(request::Refuse { wish })?;
        }
        Ok(())
    }
}

/// A connection has moved only on the other host. Tells that agent to return it to the kernel;
/// nothing was read.
pub fn never_here(peer: &mut Peer, to: u64) {
    for what in [what::BACK, what::CONFIRM, what::DONE] {
        peer.say(Frame { what, to, ..Frame::default() });
    }
}
