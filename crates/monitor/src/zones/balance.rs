//! Load balancing in a listener group: which worker may steal connections from which. See ADR 26.
//!
//! The monitor measures the queues ten times a second while connections come. When none come it
//! sleeps, and the BPF program wakes it for the next one.

use super::group::GroupId;
use super::queues::{Balance, Shared, Stolen};
use super::state::Zones;
use crate::answer::Answer;
use crate::broker::clone::listening;
use crate::clients::Outgoing;
use crate::context::Context;
use crate::descriptor;
use crate::event::FIRST_WAKER;
use crate::foreign::ForeignFd;
use crate::steer::front::Front;
use crate::steer::{Also, Move};
use crate::ConnId;
use fsocket_abi::balance::QUEUES;
use fsocket_proto::{answer, notice, request};
use fsocket_reuseport::listener;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::fd::AsRawFd;
use rustix::io::Errno;
use std::rc::Rc;
use std::time::Instant;

impl Zones {
    /// [`request::Balance`].
    pub fn balance(&mut self, ctx: &Context, id: ConnId, msg: request::Balance) -> Answer<answer::Balance> {
        let off = ctx.config.balance.off;
        let g = self.all.get_mut(&msg.group).filter(|g| g.holders.contains(&id)).ok_or(Errno::NOENT)?;
        if off {
            return Err(Errno::OPNOTSUPP);
        }
        if g.balance.is_none() {
            g.balance = Some(Balance::new(g.select.balance()).map_err(|_| Errno::OPNOTSUPP)?);
            let data = EventData::new_u64(FIRST_WAKER | g.id);
            epoll::add(&*ctx.epoll, g.select.waker(), data, EventFlags::IN)?;
        }
        let map = rustix::io::fcntl_dupfd_cloexec(g.select.balance(), 0)?;
        Ok((answer::Balance {}, Some(Rc::new(ForeignFd::new(map, 0)))))
    }

    /// [`request::Share`]. `None`: the socket must not be shared.
    pub fn share(&mut self, ctx: &mut Context, id: ConnId, msg: request::Share, fd: Option<ForeignFd>) -> Option<()> {
        let fd = fd?;
        let (shape, _) = listening(fd.as_fd()).ok()?;
        let netns = descriptor::netns_cookie(fd.as_fd()).ok()?;
        let place = Some(msg.place).filter(|p| (1..=QUEUES as u32).contains(p))?;
        let g = self.all.get_mut(&msg.group)?;
        let cpu = g.members.get(&place).filter(|m| m.conn == id)?.cpu;
        // Checked as for LOCAL: a process must not give the others a listener that is not theirs.
        if g.netns != netns || g.shape != shape.addr() {
            return None;
        }
        let mut others = g.conns_that_share();
        if g.own.is_some() {
            // The workers may have been started one by one, so they need not be related. Each
            // process at this address must serve all connections to this address. But processes of
            // another user get nothing, although they may have the socket.
            let uid = |conn: ConnId| ctx.clients.get(conn).map(|c| c.uid);
            others.retain(|other| uid(*other) == uid(id));
        }
        let is_first = !others.contains(&id);
        let balance = g.balance.as_mut()?;
        let socket = Rc::new(fd);
        balance.enter(place, socket.clone());
        balance.set_limits(&ctx.config.balance, !g.guests.is_empty());
        balance.park();
        let peer = |place: u32, cpu: u32, fd: &Rc<ForeignFd>| {
            Outgoing::with(notice::Peer { group: g.id, place, cpu }, fd.clone())
        };
        for other in others.iter().copied().filter(|other| *other != id) {
            // (A worker that does not read its messages is not told.)
            ctx.clients.send_for(id, other, peer(place, cpu, &socket));
        }
        if is_first {
            for (p, m) in g.members.iter().filter(|(_, m)| m.conn != id && others.contains(&m.conn)) {
                if let Some(s) = g.balance.as_ref().and_then(|b| b.shared.get(p)) {
                    ctx.clients.send(id, peer(*p, m.cpu, &s.socket));
                }
            }
        }
        tracing::debug!(group = g.id, process = %ctx.clients.name(id), place, "balanced");
        self.balance_at(Instant::now() + ctx.config.balance.interval);
        Some(())
    }

    /// Forgets the shared socket at this place: its worker has ended or has closed it.
    pub fn unshare(&mut self, ctx: &mut Context, group: GroupId, place: u32, owner: ConnId) {
        let Some(g) = self.all.get_mut(&group) else { return };
        let Some(balance) = g.balance.as_mut() else { return };
        if !balance.leave(place) {
            return;
        }
        balance.set_limits(&ctx.config.balance, !g.guests.is_empty());
        for other in g.conns_that_share().into_iter().filter(|other| *other != owner) {
            ctx.clients.notify(other, notice::PeerGone { group, place });
        }
    }

    /// [`request::Waiting`]. Answers with a socket at which a connection waits. If there is none,
    /// the process gets a message when one comes.
    pub fn waiting(&mut self, ctx: &Context, id: ConnId, msg: request::Waiting) -> Answer<answer::Waiting> {
        let off = ctx.config.balance.off;
        let known = self.all.get_mut(&msg.group).filter(|g| !off && g.own.is_none() && g.holders.contains(&id));
        let g = known.ok_or(Errno::NOENT)?;
        let length = |s: &Shared| listener::backlog(s.socket.as_fd().as_raw_fd()).map_or(0, |(_, n)| n);
        let waits =
            |b: &Balance| b.shared.iter().find(|(_, s)| length(s) > 0).map(|(place, s)| (*place, s.socket.clone()));
        let mut found = g.balance.as_ref().and_then(waits);
        if found.is_none() && g.guests.insert(id) {
            if let Some(b) = &mut g.balance {
                b.set_limits(&ctx.config.balance, true);
                b.park();
                // From here on, new connections are counted, so the queues are read once more.
                found = waits(b);
            }
            self.balance_at(Instant::now() + ctx.config.balance.interval);
        }
        let (place, socket) = found.ok_or(Errno::AGAIN)?;
        Ok((answer::Waiting { place }, Some(socket)))
    }

    /// [`request::Shut`].
    pub fn shut_group(&mut self, ctx: &mut Context, id: ConnId, msg: request::Shut) -> Answer<answer::Shut> {
        let known = self.all.get_mut(&msg.group).filter(|g| g.own.is_none() && g.holders.contains(&id));
        let g = known.ok_or(Errno::NOENT)?;
        if msg.goes_on {
            g.withdrawn = true;
            g.assign();
        }
        for s in g.balance.iter().flat_map(|b| b.shared.values()) {
            s.socket.shutdown(rustix::net::Shutdown::Read);
        }
        self.call(msg.group);
        self.zones_look(ctx);
        Ok((answer::Shut {}, None))
    }

    /// [`request::PeerClosed`].
    pub fn peer_closed(&mut self, ctx: &mut Context, id: ConnId, msg: request::PeerClosed) {
        if self.all.get(&msg.group).is_some_and(|g| g.holders.contains(&id)) {
            self.call(msg.group);
            self.zones_look(ctx);
        }
    }

    /// Handles a wake-up by the BPF program of a group.
    pub fn balance_rung(&mut self, group: GroupId) {
        if let Some(g) = self.all.get_mut(&group) {
            g.select.heard();
            if let Some(b) = &mut g.balance {
                b.parked = false;
            }
        }
        self.balance_at(Instant::now());
    }

    /// Measures the queues if it is time. Returns a request to steering, if there is one.
    pub fn balance_if_due(&mut self, ctx: &mut Context, steers: &mut Front) -> Option<Also> {
        let now = Instant::now();
        if self.balance_next.is_none_or(|at| at > now) {
            return None;
        }
        self.balance_next = None;
        let mut moves = Vec::new();
        let mut zones = Vec::new();
        let mut hints = Vec::new();
        let mut again = false;
        let knobs = &ctx.config.balance;
        for g in self.all.values_mut() {
            let has_flows = knobs.migrate && !steers.has_groups(g.netns);
            g.fit_flows(has_flows, now);
            let members = &g.members;
            let Some(b) = g.balance.as_mut().filter(|b| !b.parked && !b.shared.is_empty()) else {
                // No connections come, so flow groups return to their own CPUs.
                again |= g.move_flows(&[], steers.spare(now), knobs.groups, now);
                continue;
            };
            let before: u64 = b.shared.values().map(|s| s.added).fold(0, u64::wrapping_add);
            let found = b.look(now, |place| members.get(&place).map(|m| m.cpu));
            let came = b.shared.values().map(|s| s.added).fold(0, u64::wrapping_add).wrapping_sub(before);
            if came == 0 {
                b.park();
            }
            again |= !b.parked;
            zones.extend(b.shared.keys().filter_map(|place| Some((g.netns, members.get(place)?.cpu))));
            let netns = g.netns;
            let of = |Stolen { from, to, busy, most }| Move { netns, from, to, busy, most };
            let stolen: Vec<Move> = found.moves.into_iter().map(of).collect();
            again |= g.move_flows(&stolen, steers.spare(now), knobs.groups, now);
            moves.extend(stolen);
            if found.waits {
                hints.extend(std::mem::take(&mut g.guests).into_iter().map(|conn| (g.id, conn)));
            }
            if found.stuck {
                hints.extend(g.conns_that_share().into_iter().map(|conn| (g.id, conn)));
            }
        }
        self.hint(ctx, hints);
        let knobs = ctx.config.balance.clone();
        if again {
            self.balance_at(now + knobs.interval);
        }
        knobs.migrate.then_some(Also::Migrate { moves, zones, asked: knobs.groups })
    }

    pub fn hint(&mut self, ctx: &mut Context, whom: Vec<(GroupId, ConnId)>) {
        for (group, conn) in whom {
            ctx.clients.notify(conn, notice::WakeHint { group });
        }
    }
}
