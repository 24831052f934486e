//! Descriptors that a client takes from another process by `pidfd_getfd`. The holder must then
//! move the connection to the kernel.
//!
//! The taker first names the other process by a pidfd. Then it shows the socket taken from there.
//! It can have that socket only if the kernel lets it take descriptors of that process. The holder
//! is told which socket it is, and does nothing if the socket is not the one it has. Only the
//! taker gets the holder's answer, once.

use crate::answer::Answer;
use crate::clients::Outgoing;
use crate::context::Context;
use crate::foreign::ForeignFd;
use crate::pidfd::pid_of;
use crate::shm::state::Shm;
use crate::shm::transfers::Transfer;
use crate::shm::wake::wake_side;
use crate::ConnId;
use fsocket_abi::channel::SLOTS;
use fsocket_abi::sock::Place;
use fsocket_proto::{answer, notice, request};
use rustix::io::Errno;
use rustix::net::sockopt::socket_cookie;

impl Shm {
    /// [`request::Transfer`].
    pub fn take(
        &mut self,
        ctx: &mut Context,
        id: ConnId,
        msg: request::Transfer,
        fd: Option<ForeignFd>,
    ) -> Answer<answer::Transfer> {
        let fd = fd.ok_or(Errno::BADF)?;
        let number = match msg.shown {
            false => self.name_holder(ctx, id, msg, &fd)?,
            true => self.ask_holder(ctx, id, msg.number, &fd)?,
        };
        Ok((answer::Transfer { number, descriptor: 0, cookie: 0 }, None))
    }

    fn name_holder(
        &mut self,
        ctx: &Context,
        id: ConnId,
        msg: request::Transfer,
        pidfd: &ForeignFd,
    ) -> Result<u64, Errno> {
        let taker = ctx.clients.get(id).ok_or(Errno::BADF)?.uid;
        let pid = pid_of(pidfd.as_fd()).ok_or(Errno::INVAL)?;
        // A child that was forked in another PID namespace has reported its number there.
        let pids = [pid, msg.pid];
        let is_meant = |c: &crate::clients::Client| c.is_process() && pids.contains(&c.pid);
        let (holders, uids): (Vec<ConnId>, Vec<u32>) = ctx
            .clients
            .iter()
            .filter(|(other, c)| *other != id && is_meant(c))
            .map(|(other, c)| (other, c.uid))
            .unzip();
        if holders.is_empty() {
            return Err(Errno::NOENT);
        }
        // A user must not be able to slow down processes of other users.
        if taker != 0 && uids.iter().any(|uid| *uid != taker) {
            return Err(Errno::PERM);
        }
        Ok(self.transfers.begin(Transfer { taker: id, holders, descriptor: msg.descriptor, is_shown: false }))
    }

    fn ask_holder(&mut self, ctx: &mut Context, id: ConnId, number: u64, socket: &ForeignFd) -> Result<u64, Errno> {
        let cookie = socket_cookie(socket.as_fd())?;
        let transfer = self.transfers.of(number, id).ok_or(Errno::NOENT)?;
        transfer.is_shown = true;
        let (holders, descriptor) = (transfer.holders.clone(), transfer.descriptor);
        for holder in holders {
            let Some((nonce, family)) = ctx.clients.get(holder).map(|c| (c.nonce, c.family)) else { continue };
            let told = answer::Transfer { number, descriptor, cookie };
            if ctx.clients.send_for(id, holder, Outgoing::of(told)) {
                self.wake_holder(ctx, holder, nonce, family);
            }
        }
        Ok(0)
    }

    /// Wakes threads that sleep on a connection, because such threads do not read the monitor's
    /// messages.
    pub fn wake_holder(&self, ctx: &Context, id: ConnId, nonce: u64, family: u64) {
        for mem in ctx.arenas.used_by(id) {
            for sock in mem.open_socks().filter(|s| s.is_held_by(nonce)) {
                let Place { channel, slot, side } = sock.place();
                let channel = self.channels.get(channel);
                if let Some(ch) = channel.filter(|ch| side < 2 && slot < SLOTS && ch.is_party(side, family)) {
                    wake_side(ch, slot, side, &ctx.clients);
                }
            }
        }
    }

    /// [`request::Transferred`].
    pub fn taken(&mut self, ctx: &mut Context, id: ConnId, request::Transferred { number }: request::Transferred) {
        if let Some(taker) = self.transfers.answered(number, id) {
            ctx.clients.send_for(id, taker, Outgoing::of(notice::Transferred { number }));
        }
    }
}
