//! The event loop. It serves the stand-ins of programs, the other agents, and the monitor.

use crate::carriers;
use crate::link::{self, what, Control, Frame, Made};
use crate::mirror::{After, Mirror};
use crate::opening::never_here;
use crate::peer::LOST;
use crate::state::*;
use anyhow::Context as _;
use fsocket_proto::{notice, request, Message, Msg};
use fsocket_rdma::agree::Role;
use rustix::fd::AsFd;
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// When the agent ends, its connections may take this long to move back to the kernel.
const STOPPING: Duration = Duration::from_secs(5);

impl Agent {
    /// Runs until the monitor ends, or the agent is told to end.
    pub fn run(mut self) -> anyhow::Result<()> {
        // Milliseconds between two checks of how much programs have read. The pause grows while
        // programs read nothing.
        let mut pause = 1;
        loop {
            let looks = self.mirrors.values().any(Mirror::is_to_be_looked_at);
            let full = self.peers.iter().any(|p| p.is_full() || p.is_up() && !p.shown || p.lacks_carrier())
                || self.mirrors.values().any(|m| self.peers[m.peer].lost.is_some());
            let full = full || self.stops.is_some();
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
            if self.stops.is_some_and(|at| at.elapsed() > STOPPING || !self.mirrors.values().any(|m| m.remote != 0)) {
                return Ok(());
            }
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
            WAKER => {
                let _ = rustix::io::read(&*self.out.waker, &mut [0; 8]);
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
            Made::Stop => {
                tracing::info!("connections go back to TCP, and the agent ends");
                self.stops.get_or_insert_with(Instant::now);
                self.peers.iter_mut().for_each(|p| p.carrier_failed = true);
            }
            // Ignore this if another agent has connected meanwhile.
            Made::Nobody(number) if self.peers[number].control.is_none() => {
                tracing::info!(peer = %self.peers[number].at, "no agent any more");
                self.reset_all(number);
            }
            Made::Nobody(_) => {}
            Made::Data(..) if self.stops.is_some() => {}
            Made::Control(number, stream) => {
                // The old control connection may be dead without our having noticed it.
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
                (peer.control, peer.lost) = (Some(control), None);
                peer.say(Frame { what: what::HELLO, a: self.instance, ..Frame::default() });
            }
            Made::Data(number, stream) => {
                let peer = &mut self.peers[number];
                if peer.carrier.is_some() {
                    // The other agent has noticed that the old carrier is dead.
                    peer.drop_carrier();
                    self.all_go_back(number);
                }
                let peer = &mut self.peers[number];
                let role = if peer.dial.is_some() { Role::Connecting } else { Role::Accepting };
                if let Some(dial) = &mut peer.dial {
                    dial.awaits_data = false;
                }
                let carrier = match carriers::make(self.own, stream, role, &self.key) {
                    Ok(carrier) => carrier,
                    Err(e) => {
                        tracing::warn!(peer = %peer.at, error = %e, "no carrier");
                        peer.fail_carrier();
                        return Ok(());
                    }
                };
                self.poll.add(carrier.fd(), libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLET, CARRIER | number as u64)?;
                peer.carrier = Some(carrier);
                self.carried(number);
            }
        }
        Ok(())
    }

    /// The control connection has ended. There may be no agent at its other end any more.
    fn lose(&mut self, number: usize) -> anyhow::Result<()> {
        let peer = &mut self.peers[number];
        peer.drop_carrier();
        (peer.control, peer.control_failed, peer.greeted) = (None, false, false);
        peer.lost.get_or_insert_with(Instant::now);
        // The other agent will not answer the requests in flight.
        let half: Vec<u32> =
            self.mirrors.iter().filter(|(_, m)| m.peer == number && m.remote == 0).map(|(id, _)| *id).collect();
        for id in half {
            self.refuse(id)?;
        }
        // If only the network has cut the connection, the agents will connect again. So ask
        // whether an agent is there.
        if self.mirrors.values().any(|m| m.peer == number) {
            link::ask_after(number, self.peers[number].at, self.out.clone(), LOST);
        }
        Ok(())
    }

    fn look_after_peers(&mut self) -> anyhow::Result<()> {
        for number in 0..self.peers.len() {
            let peer = &mut self.peers[number];
            peer.look();
            if peer.carrier_failed && peer.control.is_some() {
                tracing::warn!(peer = %peer.at, "the link has failed: connections go back to TCP");
                peer.fail_carrier();
                self.all_go_back(number);
            }
            if self.peers[number].control_failed {
                self.lose(number)?;
                if let Some(dial) = &self.peers[number].dial {
                    dial.control();
                }
            }
            if self.peers[number].is_lost() {
                self.reset_all(number);
            }
            if self.stops.is_none()
                && self.peers[number].lacks_carrier()
                && !self.mirrors.values().any(|m| m.peer == number)
            {
                self.peers[number].make_carrier();
            }
            let peer = &mut self.peers[number];
            if peer.is_up() != peer.shown {
                peer.shown = peer.is_up();
                let ip = match peer.at.ip() {
                    IpAddr::V4(v4) => v4.to_ipv6_mapped(),
                    IpAddr::V6(v6) => v6,
                };
                let up = peer.shown;
                let at = peer.at;
                let known = self.line.request(request::Link { up, host: ip.octets() })?;
                tracing::info!(peer = %at, up, known, "link");
                if up && !known {
                    // The library could not reach the monitor in time. The loop tries again.
                    self.peers[number].shown = false;
                    self.maker.renew()?;
                    self.poll.add(self.maker.listener().as_fd(), libc::EPOLLIN, STRANGERS)?;
                } else if up {
                    // From now on the monitor records the connections that the stand-ins accept.
                    let _ = self.maker.prepare();
                }
            }
        }
        Ok(())
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
        let (frames, end) = control.poll();
        for frame in frames {
            tracing::trace!(?frame, "heard");
            self.hear(number, &frame)?;
        }
        if let Err(e) = end {
            tracing::debug!(error = %e, "control");
            self.peers[number].control_failed = true;
        }
        Ok(())
    }

    fn hear(&mut self, number: usize, frame: &Frame) -> anyhow::Result<()> {
        let peer = &mut self.peers[number];
        match frame.what {
            what::HELLO => {
                peer.greeted = true;
                if std::mem::replace(&mut peer.instance, frame.a) != frame.a {
                    // The new agent does not know these connections.
                    self.reset_all(number);
                } else {
                    self.all_go_back(number);
                }
                return Ok(());
            }
            what::OPEN => return self.open(number, frame),
            what::DOWN => {
                peer.carrier_failed |= peer.carrier.is_some();
                return Ok(());
            }
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
            what::CONFIRM => m.confirmed(peer, frame.a != 0),
            what::DONE => m.done_there(),
            what::LEFT => m.leaves_there(peer, frame.a, frame.b),
            _ => After::Keep,
        };
        match after {
            After::Gone => drop(self.mirrors.remove(&id)),
            After::Keep => drop(self.due.insert(id)),
        }
        Ok(())
    }

    /// Handles a message from the monitor.
    fn told(&mut self, msg: &Msg) -> anyhow::Result<()> {
        match Message::decode(msg) {
            Ok(Message::RemoteCounts(counts)) => self.counts = [counts.sent, counts.received],
            Ok(Message::Open(notice::Open { wish, ends })) => {
                let to = IpAddr::V6(ends[1].0.into()).to_canonical();
                let number = self.peers.iter().position(|p| p.at.ip() == to && p.is_up());
                let Some(number) = number else {
                    self.line.tell(request::Refuse { wish })?;
                    return Ok(());
                };
                let id = self.add(|id| Mirror::new(id, number, 0, Some(wish), None));
                let [a, b] = self.counts;
                self.peers[number].say(Frame { what: what::OPEN, to: 0, from: id.into(), a, b, ends });
            }
            _ => {}
        }
        Ok(())
    }
}
