//! Moves Unix connections to shared memory.
//!
//! As in [`super::crossing`], the kernel has made the connection, and each side shows its end as a
//! descriptor. The kernel socket stays idle behind the descriptor, for the way back. Here
//! sock_diag(7) says which two sockets are connected. The processes do not name their peers, so
//! they cannot lie about them. A socket stays the same if it is passed to another process.
//!
//! A channel needs a listener, but the monitor does not know listening Unix sockets. So it makes a
//! stand-in listener for each fork group and socket name, and the channels of such connections
//! lead there. No address leads to a stand-in.

use crate::answer::Answer;
use crate::context::Context;
use crate::descriptor::{self, Listening};
use crate::policy::rules::Destination;
use crate::shm::offers::Accepted;
use crate::shm::state::Shm;
use crate::sockdiag::Connected;
use crate::{limits, shares, ConnId, ListenerId};
use fsocket_abi::channel::{CLIENT, SERVER};
use fsocket_proto::{answer, request, Addr};
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use rustix::net::sockopt;
use rustix::net::{AddressFamily, SocketType};
use std::rc::Rc;

/// An end that a process has just shown.
struct Shown {
    inode: u32,
    netns: u64,
    kernel: Connected,
}

/// The address of a stand-in listener, which has only a family.
fn address() -> Addr {
    Addr { family: AddressFamily::UNIX.as_raw(), ..Addr::default() }
}

impl Shm {
    /// Reads an end. EXDEV: the kernel tells no peer, or nothing about that namespace.
    fn unix_end(&mut self, ctx: &Context, fd: BorrowedFd<'_>) -> Result<Shown, Errno> {
        if sockopt::socket_type(fd)? != SocketType::STREAM {
            return Err(Errno::INVAL);
        }
        let inode = u32::try_from(rustix::fs::fstat(fd)?.st_ino).map_err(|_| Errno::INVAL)?;
        let netns = descriptor::netns_cookie(fd)?;
        let diag = self.closings.diag(ctx, netns, Some(fd)).ok_or(Errno::XDEV)?;
        let kernel = diag.unix(inode).ok_or(Errno::XDEV)?;
        if kernel.cookie != sockopt::socket_cookie(fd)? {
            return Err(Errno::XDEV);
        }
        Ok(Shown { inode, netns, kernel })
    }

    /// Counts a refused end: it does not belong to the process alone, or a rule denies it. (ENOENT
    /// is no refusal: the other end is not offered yet.)
    fn counted<T>(&mut self, end: Result<T, Errno>) -> Result<T, Errno> {
        if let Err(Errno::XDEV | Errno::INVAL | Errno::AGAIN | Errno::PERM | Errno::ACCESS) = end {
            self.unix_refused += 1;
        }
        end
    }

    /// [`request::Offer`] of a Unix socket.
    pub fn offer_unix(
        &mut self,
        ctx: &mut Context,
        id: ConnId,
        msg: request::Offer,
        fd: BorrowedFd<'_>,
    ) -> Result<(), Errno> {
        let offered = self.offer_unix_end(ctx, id, msg, fd);
        self.counted(offered)
    }

    fn offer_unix_end(
        &mut self,
        ctx: &mut Context,
        id: ConnId,
        msg: request::Offer,
        fd: BorrowedFd<'_>,
    ) -> Result<(), Errno> {
        let name = msg.name;
        let Shown { inode, netns, kernel } = self.unix_end(ctx, fd)?;
        self.is_alone(ctx, id, msg.received, kernel.cookie)?;
        let _ = ctx.note_party(id, true);
        let listener = self.unix_listener(ctx, id, (netns, kernel.cookie), descriptor::unix_name(fd)?.into())?;
        self.unix.add(inode, id, Accepted { name, netns, kernel, listener });
        Ok(())
    }

    /// Whether the process alone has the socket; EAGAIN: other processes have it, too. If the
    /// process says that it has received or inherited the socket, then only the reports of all
    /// holders can prove that.
    fn is_alone(&self, ctx: &Context, id: ConnId, received: bool, cookie: u64) -> Result<(), Errno> {
        let uid = ctx.clients.get(id).ok_or(Errno::BADF)?.uid;
        let alone = match received {
            true => self.passed.alone((uid, cookie), id).is_some(),
            false => !self.passed.has_others((uid, cookie), id),
        };
        if alone {
            Ok(())
        } else {
            Err(Errno::AGAIN)
        }
    }

    /// The stand-in listener for connections that this process's fork group has accepted under
    /// this name.
    fn unix_listener(
        &mut self,
        ctx: &mut Context,
        id: ConnId,
        (netns, cookie): (u64, u64),
        name: Rc<str>,
    ) -> Result<ListenerId, Errno> {
        let client = ctx.clients.get_mut(id).ok_or(Errno::BADF)?;
        let stands_for = |l: &&ListenerId| self.listeners.get(**l).is_some_and(|l| l.unix.as_ref() == Some(&name));
        if let Some(known) = client.holds.iter().find(stands_for) {
            return Ok(*known);
        }
        let (uid, family) = (client.uid, client.family);
        if uid != 0 && self.listeners.owned_by(uid) >= limits::LISTENERS_PER_UID
            || !self.has_share(ctx, uid, shares::LISTENER)
        {
            return Err(Errno::MFILE);
        }
        let new = self.listeners.add_unix(Listening { cookie, netns, addr: address() }, uid, name);
        if let Some(l) = self.listeners.get_mut(new) {
            l.holders.insert(id);
            l.families.insert(family);
        }
        if let Some(client) = ctx.clients.get_mut(id) {
            client.holds.insert(new);
        }
        Ok(new)
    }

    /// The offered end of the connection whose other end is shown here. The kernel is asked again:
    /// the process that offered it may have closed it without a message, and another socket may
    /// have its number.
    fn offered_unix(
        &mut self,
        ctx: &Context,
        id: ConnId,
        fd: BorrowedFd<'_>,
    ) -> Result<(u32, ConnId, Accepted), Errno> {
        let own = self.unix_end(ctx, fd)?;
        let peer = own.kernel.peer;
        let (by, there) = self.unix.get(&peer).ok_or(Errno::NOENT)?;
        if by == id {
            // Both ends are in one process. It waits for this answer and cannot take over the
            // other end meanwhile.
            return Err(Errno::XDEV);
        }
        let now = self.closings.diag(ctx, there.netns, None).and_then(|diag| diag.unix(peer));
        if now != Some(there.kernel) || there.kernel.peer != own.inode {
            self.unix.take(&peer);
            return Err(Errno::NOENT);
        }
        Ok((peer, by, there))
    }

    fn judge_unix(&self, ctx: &mut Context, id: ConnId, listener: ListenerId, by: ConnId) -> Result<(), Errno> {
        let name = self.listeners.get(listener).and_then(|l| l.unix.clone()).ok_or(Errno::NOENT)?;
        self.judge_pair(ctx, id, listener, by, &Destination::Unix(&name))
    }

    /// [`request::Meet`] of a Unix socket.
    pub fn meet_unix(&mut self, ctx: &mut Context, id: ConnId, fd: BorrowedFd<'_>) -> Answer<answer::Meet> {
        let met = self.offered_unix(ctx, id, fd);
        let met = met.and_then(|(_, by, there)| self.judge_unix(ctx, id, there.listener, by).map(|()| there));
        let there = self.counted(met)?;
        self.channel_to(ctx, id, there.listener, None).map(|(answer, fd)| (answer.into(), fd))
    }

    /// Handles [`request::Upgrade`] for a Unix socket, after [`Shm::meet_unix`] for this or
    /// another one.
    pub fn upgrade_unix(
        &mut self,
        ctx: &mut Context,
        id: ConnId,
        msg: request::Upgrade,
        fd: BorrowedFd<'_>,
    ) -> Result<u64, Errno> {
        let upgraded = self.upgrade_unix_end(ctx, id, msg, fd);
        self.counted(upgraded)
    }

    fn upgrade_unix_end(
        &mut self,
        ctx: &mut Context,
        id: ConnId,
        msg: request::Upgrade,
        fd: BorrowedFd<'_>,
    ) -> Result<u64, Errno> {
        self.is_alone(ctx, id, msg.received, sockopt::socket_cookie(fd)?)?;
        let (peer, by, there) = self.offered_unix(ctx, id, fd)?;
        let family = ctx.clients.get(id).ok_or(Errno::BADF)?.family;
        let other_family = ctx.clients.get(by).ok_or(Errno::NOENT)?.family;
        let ch = self.party(ctx, id, msg.channel)?;
        if !ch.is_party(CLIENT, family) || ch.listener != there.listener {
            return Err(Errno::INVAL);
        }
        match self.judge_unix(ctx, id, there.listener, by) {
            Err(Errno::PERM | Errno::ACCESS) => return Err(Errno::XDEV),
            judged => judged?,
        }
        self.unix.take(&peer);
        if let Some(ch) = self.channels.get_mut(msg.channel) {
            ch.server_families.insert(other_family);
        }
        debug_assert!(self.channels.get(msg.channel).is_some_and(|ch| ch.is_party(SERVER, other_family)));
        self.hand_over(ctx, &msg, by, there.name)?;
        Ok(0)
    }
}
