//! Moves kernel connections between two clients of the monitor to shared memory.
//!
//! Both sides show their ends as descriptors. The kernel's facts about the two descriptors decide
//! whether they are the ends of one connection. Claims of the processes do not count.

use crate::address::{canonical, V4_ANY, V6_ANY};
use crate::answer::Answer;
use crate::clients::{Client, Outgoing};
use crate::context::Context;
use crate::descriptor;
use crate::foreign::ForeignFd;
use crate::policy::rules::{Destination, Inet};
use crate::shm::listeners::Listeners;
use crate::shm::offers::{End, Here};
use crate::shm::state::Shm;
use crate::sockdiag::SockDiag;
use crate::{ConnId, ListenerId};
use fsocket_abi::channel::{CLIENT, SERVER};
use fsocket_proto::{answer, notice, request};
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use rustix::net::sockopt::socket_cookie;
use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

pub fn end_of(fd: BorrowedFd<'_>) -> Result<End, Errno> {
    descriptor::tcp(fd, true)?;
    let own = SocketAddr::try_from(rustix::net::getsockname(fd)?).map_err(|_| Errno::INVAL)?;
    let peer = rustix::net::getpeername(fd)?.ok_or(Errno::NOTCONN)?;
    let peer = SocketAddr::try_from(peer).map_err(|_| Errno::INVAL)?;
    Ok((descriptor::netns_cookie(fd)?, canonical(own), canonical(peer)))
}

impl Shm {
    /// [`request::Offer`].
    pub fn offer_upgrade(
        &mut self,
        ctx: &mut Context,
        id: ConnId,
        msg: request::Offer,
        fd: Option<ForeignFd>,
    ) -> Answer<answer::Offer> {
        let fd = fd.ok_or(Errno::BADF)?;
        if descriptor::is_unix(fd.as_fd()) {
            return self.offer_unix(ctx, id, msg, fd.as_fd()).map(|()| (answer::Offer {}, None));
        }
        let end = end_of(fd.as_fd())?;
        let socket = socket_cookie(fd.as_fd())?;
        let listener = match msg.received {
            false => None,
            true => self.received(ctx, id, socket, &end)?,
        };
        self.offers.add(end, id, Here { name: msg.name, listener, socket });
        if msg.across {
            self.offer_pair(ctx, id, msg.name, end, fd.as_fd())?;
        }
        Ok((answer::Offer {}, None))
    }

    /// The offer for the socket that is at this end now. The process that made the offer may have
    /// closed its socket without a message; then the next socket at this end belongs to another
    /// process. `place`: a TCP socket of the network namespace.
    pub fn offer_at(&mut self, ctx: &Context, end: &End, place: BorrowedFd<'_>) -> Result<(ConnId, Here), Errno> {
        let (by, here) = self.offers.get(end).ok_or(Errno::NOENT)?;
        // (Asks in another namespace only while a listener exists there: the monitor closes its
        // socket there with the last listener.)
        let place = self.listeners.iter().any(|l| l.info.netns == end.0).then_some(place);
        let is_there = |diag: &mut SockDiag| diag.is_end(end.1, end.2, here.socket);
        if !self.closings.diag(ctx, end.0, place).is_none_or(is_there) {
            self.offers.take(end);
            return Err(Errno::NOENT);
        }
        Ok((by, here))
    }

    /// [`request::Upgrade`].
    pub fn upgrade(
        &mut self,
        ctx: &mut Context,
        id: ConnId,
        msg: request::Upgrade,
        fd: Option<ForeignFd>,
    ) -> Answer<answer::Upgrade> {
        let fd = fd.ok_or(Errno::BADF)?;
        let patience = match msg.met {
            _ if descriptor::is_unix(fd.as_fd()) => self.upgrade_unix(ctx, id, msg, fd.as_fd())?,
            true => self.upgrade_pair(ctx, id, msg, fd.as_fd())?,
            false => self.upgrade_here(ctx, id, msg, fd.as_fd()).map(|()| 0)?,
        };
        Ok((answer::Upgrade { patience }, None))
    }

    /// Handles a connection whose ends are in one network namespace of this host.
    fn upgrade_here(
        &mut self,
        ctx: &mut Context,
        id: ConnId,
        msg: request::Upgrade,
        fd: BorrowedFd<'_>,
    ) -> Result<(), Errno> {
        let channel = msg.channel;
        let (netns, own, peer) = end_of(fd)?;
        if msg.received {
            self.received(ctx, id, socket_cookie(fd)?, &(netns, own, peer))?;
        }
        let family = ctx.clients.get(id).ok_or(Errno::BADF)?.family;
        let ch = self.party(ctx, id, channel)?;
        if !ch.is_party(CLIENT, family) {
            return Err(Errno::INVAL);
        }
        if netns != ch.netns {
            // On the way back to the kernel, new sockets are made in the network namespace of the
            // channel.
            return Err(Errno::XDEV);
        }
        let there = (netns, peer, own);
        let (other, Here { name, listener, .. }) = self.offer_at(ctx, &there, fd)?;
        let ch = self.party(ctx, id, channel)?;
        if other == id {
            // Both ends are in one process, which cannot answer while it waits for this request.
            return Err(Errno::XDEV);
        }
        let accepted = ctx.clients.get(other).ok_or(Errno::NOENT)?;
        let other_family = accepted.family;
        let received = || listener == Some(ch.listener) && self.is_served_by(ch.listener, accepted);
        if !ch.is_party(SERVER, other_family) && !received() {
            return Err(Errno::NOENT);
        }
        if ctx.is_off(id) || ctx.is_off(other) {
            return Err(Errno::BUSY);
        }
        // This process may be another one of the fork group than those for which the channel was
        // allowed.
        ctx.may_pair(ctx.known_as(id)?, other, &Destination::Inet(destination_of(peer))).map_err(|_| Errno::XDEV)?;
        self.offers.take(&there);
        if let Some(ch) = self.channels.get_mut(channel) {
            ch.server_families.insert(other_family);
        }
        self.hand_over(ctx, &msg, other, name)
    }

    /// [`request::Passed`].
    pub fn note_passed(&mut self, ctx: &Context, id: ConnId, msg: request::Passed) {
        if let Some(uid) = ctx.clients.get(id).map(|c| c.uid) {
            self.passed.note((uid, msg.cookie), id, msg.what);
        }
    }

    /// Checks a socket that the process says it has received. EAGAIN: other processes have it,
    /// too. Otherwise returns the sender's listener at the socket's own address, if the sender and
    /// the listener's workers have the same rights as this process.
    pub fn received(&self, ctx: &Context, id: ConnId, cookie: u64, end: &End) -> Result<Option<ListenerId>, Errno> {
        let client = ctx.clients.get(id).ok_or(Errno::BADF)?;
        let by = self.passed.alone((client.uid, cookie), id).ok_or(Errno::AGAIN)?;
        let sender = by.and_then(|by| ctx.clients.get(by)).filter(|s| s.rights() == client.rights());
        let listener = sender.and_then(|s| listener_at(&self.listeners, &s.holds, end));
        Ok(listener.filter(|l| self.is_served_by(*l, client)))
    }

    /// Whether the workers of a listener have the rights of this process, which would get memory
    /// that they map.
    fn is_served_by(&self, listener: ListenerId, client: &Client) -> bool {
        self.listeners.get(listener).is_some_and(|l| l.served_by.is_none_or(|rights| rights == client.rights()))
    }

    /// Tells the process with the accepted end, which knows this connection as `name`.
    pub fn hand_over(
        &mut self,
        ctx: &mut Context,
        &request::Upgrade { channel, slot, generation, met, .. }: &request::Upgrade,
        to: ConnId,
        name: u64,
    ) -> Result<(), Errno> {
        let ch = self.channels.get_mut(channel).ok_or(Errno::NOENT)?;
        ch.known_to.insert(to);
        let told = notice::UpgradeSrv { channel, listener: ch.listener, slot, generation, name, met };
        let out = Outgoing::with(told, ch.mem.fd());
        tracing::debug!(channel, slot, to, "a kernel connection moves to shared memory");
        ctx.clients.send(to, out);
        Ok(())
    }
}

/// Finds the listener among these that can have accepted a connection with this end.
pub fn listener_at(all: &Listeners, of: &BTreeSet<ListenerId>, (netns, own, _): &End) -> Option<ListenerId> {
    let ip = match own.ip() {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    };
    let fits = |l: &&ListenerId| {
        let Some(l) = all.get(**l) else { return false };
        let addr = &l.info.addr;
        l.info.netns == *netns && addr.port == own.port() && (addr.ip == ip || [V4_ANY, V6_ANY].contains(&addr.ip))
    };
    of.iter().find(fits).copied()
}

pub fn destination_of(peer: SocketAddr) -> Inet {
    let ip = match peer.ip() {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    };
    Inet { ip, port: peer.port(), netns: None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;

    #[test]
    fn the_two_ends_of_a_connection_find_each_other() {
        for any in ["127.0.0.1:0", "[::]:0"] {
            let l = TcpListener::bind(any).unwrap();
            let c = TcpStream::connect(("127.0.0.1", l.local_addr().unwrap().port())).unwrap();
            let (s, _) = l.accept().unwrap();
            let ((n1, own1, peer1), (n2, own2, peer2)) = (end_of(c.as_fd()).unwrap(), end_of(s.as_fd()).unwrap());
            assert_eq!((n1, own1, peer1), (n2, peer2, own2));
            assert!(end_of(l.as_fd()).is_err());
        }
    }
}
