//! Moves kernel connections between network namespaces to shared memory.
//!
//! This works as in [`super::upgrade`], but addresses do not identify a connection here. They may
//! be translated (bridges), or be the same in several namespaces. Instead, the kernel's record
//! says which two sockets are connected (`fsocket_bpf::pairs`), and processes show both ends as
//! descriptors. The kernel has made the handshake, so its policy allows the connection. The
//! administrator's rules apply as for any channel. The kernel connection stays idle behind the
//! descriptors. If a later rule or a lost link ends it, the connection in shared memory ends, too.
//! ADR 50.

use crate::answer::Answer;
use crate::context::Context;
use crate::descriptor;
use crate::foreign::ForeignFd;
use crate::policy::rules::{Destination, Inet};
use crate::shm::offers::End;
use crate::shm::state::Shm;
use crate::shm::upgrade::{destination_of, end_of, listener_at};
use crate::shm::wake::close_side;
use crate::{ConnId, ListenerId};
use fsocket_abi::channel::{slot_state, status, CLIENT, SERVER};
use fsocket_abi::path_switch::PeerStatus;
use fsocket_proto::{answer, request};
use fsocket_sync::atomic::Ordering;
use rustix::event::epoll::{add, EventData, EventFlags};
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use rustix::net::sockopt::socket_cookie;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Pause before the monitor asks again for a record that is still being loaded.
const LOADING: Duration = Duration::from_millis(20);

/// The other end of a connection, which its process has offered.
struct Offered {
    own: u64,
    other: u64,
    by: ConnId,
    name: u64,
    listener: ListenerId,
    /// The destination of the process that opened the connection.
    to: SocketAddr,
}

/// The destination of a socket, for the rules.
fn seen_from(ctx: &Context, socket: BorrowedFd<'_>, to: SocketAddr) -> Destination<'static> {
    let netns = if ctx.config.rules.needs_netns() { ctx.broker.netns_inode(socket) } else { None };
    Destination::Inet(Inet { netns, ..destination_of(to) })
}

impl Shm {
    /// Handles a new client with this control socket. The record is started for the first client
    /// in another network namespace, so that hosts without containers pay nothing.
    pub fn came_from(&mut self, ctx: &Context, control: BorrowedFd<'_>) {
        let is_elsewhere = descriptor::netns_cookie(control).is_ok_and(|netns| netns != ctx.netns);
        if !is_elsewhere || std::mem::replace(&mut self.pairs.asked, true) {
            return;
        }
        self.ask_for_pairs(ctx);
    }

    fn ask_for_pairs(&mut self, ctx: &Context) {
        let record = ctx.broker.pairs();
        self.pairs.ask_at = (record.as_ref().err() == Some(&Errno::AGAIN)).then(|| Instant::now() + LOADING);
        let Ok(record) = record else { return };
        let data = EventData::new_u64(crate::event::PAIRS);
        if add(&*ctx.epoll, record.events(), data, EventFlags::IN).is_ok() {
            self.pairs.record = Some(record);
            self.registry.set_pairs();
            tracing::info!("connections between network namespaces are recorded");
        }
    }

    /// Asks again for a record that was being loaded, if it is time.
    pub fn ask_for_pairs_if_due(&mut self, ctx: &Context) {
        if self.pairs.ask_at.is_some_and(|at| at <= Instant::now()) {
            self.ask_for_pairs(ctx);
        }
    }

    /// Notes the accepted end of a connection, which a process offers. EXDEV: the other end is on
    /// another host. ENOENT: no known listener of the process can have accepted it.
    pub fn offer_pair(
        &mut self,
        ctx: &Context,
        id: ConnId,
        name: u64,
        end: End,
        fd: BorrowedFd<'_>,
    ) -> Result<(), Errno> {
        if let Some(result) = self.offer_remote(ctx, id, name, &end, fd) {
            return result;
        }
        let cookie = socket_cookie(fd)?;
        let record = self.pairs.record.as_ref().ok_or(Errno::XDEV)?;
        record.peer_of(cookie).ok_or(Errno::XDEV)?;
        let works = &ctx.clients.get(id).ok_or(Errno::BADF)?.works;
        let listener = listener_at(&self.listeners, works, &end).ok_or(Errno::NOENT)?;
        // The kernel watches this socket from now on: when the connection moves, only the other
        // end is shown.
        record.watch(fd).map_err(|_| Errno::NOMEM)?;
        self.pairs.offers.add(cookie, id, (name, listener));
        Ok(())
    }

    fn offered(&self, id: ConnId, fd: BorrowedFd<'_>) -> Result<Offered, Errno> {
        let (_, _, to) = end_of(fd)?;
        let own = socket_cookie(fd)?;
        let other = self.pairs.record.as_ref().and_then(|record| record.peer_of(own)).ok_or(Errno::XDEV)?;
        let (by, (name, listener)) = self.pairs.offers.get(&other).ok_or(Errno::NOENT)?;
        if by == id {
            // Both ends are in one process, which cannot answer while it waits for this request.
            return Err(Errno::XDEV);
        }
        Ok(Offered { own, other, by, name, listener, to })
    }

    /// Finds the other end in the same network namespace. A process has offered that end after
    /// receiving the socket from another process.
    fn offered_here(
        &mut self,
        ctx: &Context,
        id: ConnId,
        fd: BorrowedFd<'_>,
    ) -> Result<(ListenerId, ConnId, SocketAddr), Errno> {
        let (netns, own, peer) = end_of(fd)?;
        let (by, here) = self.offer_at(ctx, &(netns, peer, own), fd)?;
        let listener = here.listener.filter(|_| by != id).ok_or(Errno::NOENT)?;
        Ok((listener, by, peer))
    }

    /// [`request::Meet`].
    pub fn meet(
        &mut self,
        ctx: &mut Context,
        id: ConnId,
        request::Meet { here }: request::Meet,
        fd: Option<ForeignFd>,
    ) -> Answer<answer::Meet> {
        let fd = fd.ok_or(Errno::BADF)?;
        if descriptor::is_unix(fd.as_fd()) {
            return self.meet_unix(ctx, id, fd.as_fd());
        }
        let listener = match self.meet_remote(ctx, id, fd.as_fd()).filter(|_| !here) {
            Some(listener) => listener?,
            None => {
                let (listener, by, to) = match here {
                    false => self.offered(id, fd.as_fd()).map(|there| (there.listener, there.by, there.to))?,
                    true => self.offered_here(ctx, id, fd.as_fd())?,
                };
                let to = seen_from(ctx, fd.as_fd(), to);
                self.judge_pair(ctx, id, listener, by, &to)?;
                listener
            }
        };
        self.channel_to(ctx, id, listener, None).map(|(answer, fd)| (answer.into(), fd))
    }

    /// Whether process `id` may have this connection, whose other end process `by` has, in a
    /// channel to `listener`. Checked for each connection: having a channel is no permission.
    pub fn judge_pair(
        &self,
        ctx: &mut Context,
        id: ConnId,
        listener: ListenerId,
        by: ConnId,
        to: &Destination,
    ) -> Result<(), Errno> {
        if ctx.is_off(id) || ctx.is_off(by) {
            return Err(Errno::BUSY);
        }
        let uid = ctx.clients.get(id).ok_or(Errno::BADF)?.uid;
        if self.distrust.refuses(listener, uid, id) {
            return Err(Errno::ACCESS);
        }
        let party = ctx.note_party(id, true)?;
        // The workers map the channel, too, so the rules must allow them as well.
        let workers = self.listeners.get(listener).into_iter().flat_map(|l| l.accepting());
        for server in workers.chain([by]) {
            ctx.may_pair(&party, server, to)?;
        }
        Ok(())
    }

    /// [`request::Upgrade`] after [`Shm::meet`], perhaps for another connection to the same
    /// listener. Returns how long the client should wait for the other side.
    pub fn upgrade_pair(
        &mut self,
        ctx: &mut Context,
        id: ConnId,
        msg: request::Upgrade,
        fd: BorrowedFd<'_>,
    ) -> Result<u64, Errno> {
        if let Some(patience) = self.upgrade_remote(ctx, id, msg, fd) {
            return patience;
        }
        let there = self.offered(id, fd)?;
        let family = ctx.clients.get(id).ok_or(Errno::BADF)?.family;
        let other_family = ctx.clients.get(there.by).ok_or(Errno::NOENT)?.family;
        let ch = self.party(ctx, id, msg.channel)?;
        if !ch.is_party(CLIENT, family) || ch.listener != there.listener {
            return Err(Errno::INVAL);
        }
        if !ch.is_party(SERVER, other_family) {
            return Err(Errno::NOENT);
        }
        // Checked again: time may have passed since MEET, or MEET was about another connection.
        let to = seen_from(ctx, fd, there.to);
        match self.judge_pair(ctx, id, there.listener, there.by, &to) {
            Err(Errno::PERM | Errno::ACCESS) => return Err(Errno::XDEV),
            judged => judged?,
        }
        let record = self.pairs.record.as_ref().ok_or(Errno::XDEV)?;
        record.watch(fd).map_err(|_| Errno::NOMEM)?;
        self.pairs.offers.take(&there.other);
        self.pairs.goes_over((msg.channel, msg.slot), msg.generation, [there.own, there.other]);
        self.hand_over(ctx, &msg, there.by, there.name)?;
        Ok(0)
    }

    /// Ends connections in shared memory whose idle kernel connection the kernel has ended.
    pub fn pairs_ended(&mut self, ctx: &Context) {
        for ((channel, slot), generation) in self.pairs.ended() {
            let Some(ch) = self.channels.get(channel) else { continue };
            let control = ch.mem.slot(slot);
            let is_back = control.dir.iter().any(|dir| PeerStatus::look(&dir.prod).has_begun_to_move());
            let is_that = control.generation.load(Ordering::Relaxed) == generation
                && control.state.load(Ordering::Acquire) == slot_state::ESTABLISHED;
            if !is_that || is_back {
                continue;
            }
            tracing::debug!(channel, slot, "the kernel has ended a connection that had moved to shared memory");
            // Both sides are marked before either wakes. Otherwise a side that closes at once
            // would look as if it had closed first.
            for side in [CLIENT, SERVER] {
                control.dir[side].prod.status.fetch_or(status::RST, Ordering::Release);
            }
            for side in [CLIENT, SERVER] {
                close_side(ch, slot, side, status::RST, &ctx.clients);
            }
        }
    }
}
