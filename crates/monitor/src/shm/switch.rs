//! Connections that move from shared memory to kernel TCP: both ends of the kernel connection,
//! until every process that needs one has taken its copy.
//!
//! The monitor makes the ends ([`crate::maker`]) and hands each side only its own. An explicitly
//! bound socket keeps its port when it is disconnected, so a client with the server's end could
//! take over the server's port. The monitor does for the requester what has to be done at the other
//! end: send unread bytes, end a direction. See ADR 33.

use crate::address::{destination, is_loopback, is_v4};
use crate::answer::Answer;
use crate::context::Context;
use crate::descriptor;
use crate::foreign::ForeignFd;
use crate::maker::{self, End, Order};
use crate::shm::channels::Channel;
use crate::shm::ends::act_at;
use crate::shm::state::Shm;
use crate::shm::switched::{Named, Release, Switched};
use crate::{shares, ChannelId, ConnId};
use fsocket_abi::channel::{slot_state, status, CLIENT, SERVER};
use fsocket_proto::registry::lessee;
use fsocket_proto::switch::act;
use fsocket_proto::values::{Acts, Switching};
use fsocket_proto::{answer, request};
use fsocket_sync::atomic::Ordering;
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use rustix::net::sockopt::socket_type;
use rustix::net::SocketType;
use std::net::Ipv4Addr;
use std::rc::Rc;

impl Shm {
    /// The channel, if the requester is on a side of it.
    pub fn party(&self, ctx: &Context, id: ConnId, channel: ChannelId) -> Result<&Channel, Errno> {
        let family = ctx.clients.get(id).ok_or(Errno::BADF)?.family;
        let ch = self.channels.get(channel).ok_or(Errno::NOENT)?;
        if !ch.is_party(CLIENT, family) && !ch.is_party(SERVER, family) {
            return Err(Errno::NOENT);
        }
        Ok(ch)
    }

    /// The channel, if the requester is on the side of it that the message names.
    fn own_side(&self, ctx: &Context, id: ConnId, named: &Named) -> Result<&Channel, Errno> {
        let family = ctx.clients.get(id).ok_or(Errno::BADF)?.family;
        let ch = self.channels.get(named.channel).ok_or(Errno::NOENT)?;
        if !ch.is_party(named.side, family) {
            return Err(Errno::NOENT);
        }
        Ok(ch)
    }

    /// [`request::Switch`].
    pub fn switch(
        &mut self,
        ctx: &mut Context,
        id: ConnId,
        msg: request::Switch,
        fd: Option<ForeignFd>,
    ) -> Answer<answer::Switch> {
        let named = Named::of(msg.channel, msg.end, msg.generation);
        let uid = ctx.clients.get(id).ok_or(Errno::BADF)?.uid;
        let ch = self.own_side(ctx, id, &named)?;
        let slot = ch.mem.slot(named.slot);
        let in_use = slot.state.load(Ordering::Acquire) != slot_state::FREE
            && slot.generation.load(Ordering::Relaxed) == named.generation;
        if !in_use {
            return Err(Errno::NOENT);
        }
        let mut all = ch.switched.borrow_mut();
        let place = fd.as_ref().map(ForeignFd::as_fd);
        let end = match msg.what {
            Switching::Return => {
                take_idle(&named, &mut all)?;
                None
            }
            Switching::Make => self.make_ends(ctx, (ch, uid), &named, &mut all, place)?,
            Switching::Act => {
                act_for_other(ch, &named, &mut all, msg.acts)?;
                None
            }
            Switching::Dial if named.side == SERVER => {
                self.dial(ctx, (ch, uid), &named, &mut all, place)?;
                None
            }
            Switching::Dial => return Err(Errno::INVAL),
            Switching::Alone | Switching::OwnReady | Switching::OtherReady => {
                keep_shown(ch, &named, &mut all, msg.what, fd.ok_or(Errno::BADF)?)?;
                None
            }
            Switching::Keep => {
                // (For all users together and alone, a quarter stays for what is more urgent.)
                if !self.has_share(ctx, uid, ctx.descriptors / 4) {
                    return Err(Errno::MFILE);
                }
                keep_idle(ch, &named, &mut all, fd.ok_or(Errno::BADF)?)?;
                None
            }
        };
        Ok((answer::Switch {}, end))
    }

    /// Makes both ends. Returns the requester's end.
    fn make_ends(
        &self,
        ctx: &Context,
        (ch, uid): (&Channel, u32),
        named: &Named,
        all: &mut Switched,
        place: Option<BorrowedFd<'_>>,
    ) -> Result<Option<Rc<ForeignFd>>, Errno> {
        if all.of(named).is_some() {
            return Err(Errno::ALREADY);
        }
        if !self.has_share(ctx, uid, shares::SWITCHED) {
            return Err(Errno::MFILE);
        }
        let order = self.order(ctx, ch, named);
        let made = ctx.broker.connection(&order, ch.netns, place);
        let ends = made.inspect_err(|e| all.elsewhere |= *e == Errno::XDEV)?;
        all.keep(named, ends.map(|end| Some(ForeignFd::new(end, uid))), true);
        tracing::debug!(channel = named.channel, slot = named.slot, "switched to the kernel");
        Ok(all.end(named, named.side))
    }

    /// The connection in a slot. The values that both sides can write there decide only which of this
    /// host's own addresses the connection has. A value that gives a right is not believed: the
    /// client's port is one that was leased to the client.
    fn order(&self, ctx: &Context, ch: &Channel, named: &Named) -> Order {
        let control = ch.mem.slot(named.slot);
        let claimed = destination(std::array::from_fn(|i| control.dst[i].load(Ordering::Relaxed)));
        let any = ch.addr.ip == crate::address::V4_ANY || ch.addr.ip == crate::address::V6_ANY;
        let dst = if any { claimed } else { ch.addr.ip };
        let port = control.client_port.load(Ordering::Relaxed);
        let here = is_loopback(&dst) || (ch.netns == ctx.netns && ctx.locals.contains(&dst));
        let src = if is_v4(&dst) && is_loopback(&dst) { Ipv4Addr::LOCALHOST.to_ipv6_mapped().octets() } else { dst };
        let v6 = |family: u16| i32::from(family) == libc::AF_INET6;
        Order {
            client: End { v6: v6(control.family.load(Ordering::Relaxed).into()), ip: src, port, uid: ch.client_uid },
            server: End { v6: v6(ch.addr.family), ip: dst, port: ch.addr.port, uid: ch.server_uid },
            named: here && port >= 1024 && self.registry.owner(port) == lessee(ch.id),
            holder: ch.bound.get(&port).copied(),
        }
    }

    /// Connects the client's end to the listener, in the network namespace of `place`.
    ///
    /// EINPROGRESS: it has begun, and the caller has to ask again.
    pub(super) fn dial(
        &self,
        ctx: &Context,
        (ch, uid): (&Channel, u32),
        named: &Named,
        all: &mut Switched,
        place: Option<BorrowedFd<'_>>,
    ) -> Result<(), Errno> {
        if all.of(named).is_some() {
            return Err(Errno::ALREADY);
        }
        let started = all.dialling.get(&named.slot).is_some_and(|(generation, _)| *generation == named.generation);
        if !started {
            // The client did not mean another listener that is at that address now.
            if ch.listener_gone {
                return Err(Errno::NOENT);
            }
            if !self.has_share(ctx, uid, shares::SWITCHED) {
                return Err(Errno::MFILE);
            }
            let order = self.order(ctx, ch, named);
            let begun = ctx.broker.dial(&order, ch.netns, place).inspect_err(|e| all.elsewhere |= *e == Errno::XDEV)?;
            all.dialling.insert(named.slot, (named.generation, ForeignFd::new(begun, uid)));
        }
        let (_, fd) = all.dialling.get(&named.slot).ok_or(Errno::NOENT)?;
        match maker::dialled(fd.as_fd()) {
            Ok(false) => Err(Errno::INPROGRESS),
            Ok(true) => {
                let (_, fd) = all.dialling.remove(&named.slot).ok_or(Errno::NOENT)?;
                all.keep(named, [Some(fd), None], true);
                Ok(())
            }
            Err(e) => {
                all.dialling.remove(&named.slot);
                Err(e)
            }
        }
    }

    /// [`request::Claim`].
    pub fn claim(&self, ctx: &Context, id: ConnId, msg: request::Claim) -> Answer<answer::Claim> {
        let named = Named::of(msg.channel, msg.end, msg.generation);
        let ch = self.own_side(ctx, id, &named)?;
        let mut all = ch.switched.borrow_mut();
        let ends = all.of_mut(&named).ok_or(Errno::NOENT)?;
        if !ends.ready {
            return Err(Errno::AGAIN);
        }
        ends.poured[named.side] |= msg.pours;
        ends.claimed[named.side] = true;
        let end = ends.end[named.side].clone().ok_or(Errno::NOENT)?;
        Ok((answer::Claim {}, Some(end)))
    }

    /// [`request::Release`].
    pub fn release(&mut self, ctx: &mut Context, id: ConnId, msg: request::Release) -> Answer<answer::Release> {
        let (slot, side) = (msg.end.slot, msg.end.side);
        if let Ok(ch) = self.party(ctx, id, msg.channel) {
            let how = match msg.read_all {
                true => Release::ReadAll(ch.mem.carried(slot, 1 - side)),
                false => Release::Copied,
            };
            let mut all = ch.switched.borrow_mut();
            all.release(slot, side, msg.generation, how);
            all.idle.release(slot, msg.generation);
        }
        self.sweep(ctx);
        Ok((answer::Release {}, None))
    }
}

/// [`Switching::Act`].
fn act_for_other(ch: &Channel, named: &Named, all: &mut Switched, Acts(mut what): Acts) -> Result<(), Errno> {
    let other = 1 - named.side;
    let end = all.end(named, other).ok_or(Errno::NOENT)?;
    // The requester has not waited for this, and the other side was faster.
    if all.of(named).is_some_and(|ends| ends.poured[other]) {
        what &= !act::POUR;
    }
    let done = act_at(ch, named, &end, what);
    drop(end);
    if what & act::LEAVE != 0 {
        all.release(named.slot, other, named.generation, Release::Copied);
    }
    done
}

/// [`Switching::Keep`].
fn keep_idle(ch: &Channel, named: &Named, all: &mut Switched, fd: ForeignFd) -> Result<(), Errno> {
    if !ch.is_unix() || !descriptor::is_unix(fd.as_fd()) || socket_type(fd.as_fd())? != SocketType::STREAM {
        return Err(Errno::INVAL);
    }
    // Both sides can write both rings. The mover would have bytes of its own sent in the name of another user, and could
    // pass its socket on to a process that asks the kernel whose they are (SO_PEERCRED).
    if ch.client_uid != ch.server_uid {
        return Err(Errno::PERM);
    }
    let is_open = |slot: usize, generation: u32| {
        let control = ch.mem.slot(slot);
        let closed = |side: usize| control.dir[side].prod.status.load(Ordering::Acquire) & status::CLOSED != 0;
        control.state.load(Ordering::Acquire) != slot_state::FREE
            && control.generation.load(Ordering::Relaxed) == generation
            && !(closed(CLIENT) && closed(SERVER))
    };
    all.idle.keep((named.slot, named.side, named.generation), fd, is_open)
}

/// [`Switching::Return`].
fn take_idle(named: &Named, all: &mut Switched) -> Result<(), Errno> {
    if all.of(named).is_some() {
        return Err(Errno::ALREADY);
    }
    let mut end = [None, None];
    let other = all.idle.take_other((named.slot, named.side, named.generation));
    end[1 - named.side] = Some(other.ok_or(Errno::NOENT)?);
    all.keep(named, end, true);
    Ok(())
}

/// Keeps a kernel socket that the requester has made: its own end of the connection, or both sides' if there is no
/// other way.
fn keep_shown(ch: &Channel, named: &Named, all: &mut Switched, what: Switching, fd: ForeignFd) -> Result<(), Errno> {
    if what == Switching::Alone {
        descriptor::tcp(fd.as_fd(), false)?;
        if all.of(named).is_some() {
            return Err(Errno::ALREADY);
        }
        let mut end = [None, None];
        end[named.side] = Some(fd);
        all.keep(named, end, true);
        return Ok(());
    }
    // The other side would get a socket that the requester has made, and both could change its
    // mode. So this is allowed only if there is no other way.
    if !all.elsewhere {
        return Err(Errno::PERM);
    }
    descriptor::tcp(fd.as_fd(), true)?;
    if descriptor::netns_cookie(fd.as_fd())? != ch.netns {
        return Err(Errno::INVAL);
    }
    all.ready_made(named, what == Switching::OwnReady, fd)
}
