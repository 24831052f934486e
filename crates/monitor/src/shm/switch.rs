//! Connections that go over from shared memory to kernel TCP: both ends of the
//! kernel connection, until every process that needs one has taken its copy.
//!
//! The monitor makes the ends ([`crate::maker`]) and hands each side its own, nobody the other's: a
//! socket that was bound explicitly keeps its port when it is disconnected, so a client that holds
//! the server's end could take over the server's port. What the requester has to do at the other end
//! (send what it has not read yet, end a direction) the monitor does for it. See ADR 33.

use crate::address::{destination, is_loopback, is_v4};
use crate::answer::Answer;
use crate::context::Context;
use crate::descriptor;
use crate::foreign::ForeignFd;
use crate::maker::{self, End, Order};
use crate::shm::channels::Channel;
use crate::shm::state::Shm;
use crate::shm::switched::{Named, Release, Switched};
use crate::{shares, ChannelId, ConnId};
use fsocket_abi::channel::{slot_state, CLIENT, RING_CAP, SERVER};
use fsocket_abi::half::Half;
use fsocket_proto::registry::lessee;
use fsocket_proto::switch::act;
use fsocket_proto::values::{Acts, Switching};
use fsocket_proto::{answer, request};
use fsocket_ring::{self as ring, Mapped};
use fsocket_sync::atomic::Ordering;
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use rustix::net::Shutdown;
use std::net::Ipv4Addr;
use std::rc::Rc;

/// Bytes moved per step.
const STEP: usize = 16 * 1024;

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
            Switching::Make => self.make_ends(ctx, (ch, uid), &named, &mut all, place)?,
            Switching::Act => {
                act_for_other(ch, &named, &all, msg.acts)?;
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
        };
        Ok((answer::Switch {}, end))
    }

    /// Makes both ends. Returns the requester's.
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

    /// The connection in a slot. What the two sides can write there decides only which of this host's
    /// own addresses it has, and none of it is believed that gives a right: the client's port is one
    /// that was leased to it.
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
    /// # Errors
    /// EINPROGRESS: it has begun, and the caller asks again.
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
            // Another listener at that address is not the one that the client meant.
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
            ch.switched.borrow_mut().release(slot, side, msg.generation, how);
        }
        self.sweep(ctx);
        Ok((answer::Release {}, None))
    }
}

/// [`Switching::Act`].
fn act_for_other(ch: &Channel, named: &Named, all: &Switched, Acts(mut what): Acts) -> Result<(), Errno> {
    let other = 1 - named.side;
    let end = all.end(named, other).ok_or(Errno::NOENT)?;
    // The requester has not waited for this, and the other side was faster.
    if all.of(named).is_some_and(|ends| ends.poured[other]) {
        what &= !act::POUR;
    }
    act(ch, named, &end, what)
}

/// An end that the requester has made.
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
    // The other side gets a socket of the requester's making, whose mode both can change:
    // only where there is no other way.
    if !all.elsewhere {
        return Err(Errno::PERM);
    }
    descriptor::tcp(fd.as_fd(), true)?;
    if descriptor::netns_cookie(fd.as_fd())? != ch.netns {
        return Err(Errno::INVAL);
    }
    all.ready_made(named, what == Switching::OwnReady, fd)
}

/// [`act`] of the monitor's own, of a side that no process has.
pub(super) fn at_other_end(ch: &Channel, named: &Named, what: u32) {
    let end = ch.switched.borrow().end(named, 1 - named.side);
    if let Some(end) = end {
        let _ = act(ch, named, &end, what);
    }
}

/// At the other side's end, in that side's name. None of it blocks.
fn act(ch: &Channel, named: &Named, end: &ForeignFd, what: u32) -> Result<(), Errno> {
    if what & act::POUR != 0 {
        pour(ch, named, end)?;
    }
    if what & act::FIN != 0 {
        end.shutdown(Shutdown::Write);
    }
    if what & act::RESET != 0 {
        end.reset_on_close();
    }
    if what & act::SHUT_BOTH != 0 {
        end.shutdown(Shutdown::Both);
    }
    if what & act::SPEAK != 0 {
        let mut fds = [PollFd::from_borrowed_fd(end.as_fd(), PollFlags::empty())];
        if poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) == Ok(0) {
            let _ = end.send(&[0]);
        }
    }
    Ok(())
}

/// Sends what `named.side` has not read. What does not fit stays for the other side to send again.
/// Everything in the ring and beside it is written by others: read once and checked.
fn pour(ch: &Channel, named: &Named, end: &ForeignFd) -> Result<(), Errno> {
    let from = 1 - named.side;
    let mem = ch.mem.ring(named.slot, from).map_err(|_| Errno::NOMEM)?;
    let control = ch.mem.slot(named.slot);
    let (dir, at) = (&control.dir[from], &control.migrated[from]);
    // SAFETY: a Half is atomics only; zero is valid.
    let h: Half = unsafe { std::mem::zeroed() };
    let head = dir.cons.head.load(Ordering::Acquire);
    let (base, limit) = (at.base.load(Ordering::Acquire), at.limit.load(Ordering::Acquire));
    let off = head.wrapping_sub(base) & (RING_CAP as u64 - 1);
    if base > head || limit > RING_CAP as u64 - off {
        return Err(Errno::INVAL);
    }
    h.pos.store(head, Ordering::Relaxed);
    h.base.store(base, Ordering::Relaxed);
    h.limit.store(limit, Ordering::Relaxed);
    // SAFETY: `mem` is RING_CAP bytes, page-aligned, and lives as long as `r` is used.
    let r = unsafe { Mapped::new(mem.start()) };
    let mut buf = [0u8; STEP];
    // A peer that goes on writing must not keep us here: no more than a ring full.
    for _ in 0..RING_CAP / STEP * 2 {
        // SAFETY: `buf` has STEP bytes; nobody else has `h`.
        let n = match unsafe { ring::recv(r, dir, &h, Some(buf.as_mut_ptr()), STEP, true) } {
            Ok(n @ 1..) => n,
            _ => break,
        };
        match end.send(&buf[..n]) {
            Ok(k) => {
                // SAFETY: nothing is written.
                let _ = unsafe { ring::recv(r, dir, &h, None, k, false) };
            }
            Err(Errno::INTR) => {}
            // Gone, or full.
            Err(_) => break,
        }
    }
    at.base.store(h.base.load(Ordering::Relaxed), Ordering::Relaxed);
    at.limit.store(h.limit.load(Ordering::Relaxed), Ordering::Release);
    Ok(())
}
