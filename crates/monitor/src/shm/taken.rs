//! Descriptors that a client takes from another one by `pidfd_getfd`: the holder is told to
//! make what it has there the kernel's.

use crate::answer::{reply, Answer};
use crate::clients::Outgoing;
use crate::context::Context;
use crate::foreign::ForeignFd;
use crate::pidfd::pid_of;
use crate::shm::state::Shm;
use crate::shm::wake::wake_side;
use crate::ConnId;
use fsocket_abi::channel::SLOTS;
use fsocket_proto::{kind, Msg};
use fsocket_sync::atomic::Ordering;
use rustix::io::Errno;

impl Shm {
    /// [`kind::TRANSFER`].
    pub fn take(&mut self, ctx: &mut Context, id: ConnId, msg: &Msg, fd: Option<ForeignFd>) -> Answer {
        let taker = ctx.clients.get(id).ok_or(Errno::BADF)?.uid;
        let pid = pid_of(fd.ok_or(Errno::BADF)?.as_fd()).ok_or(Errno::INVAL)?;
        // A child that was forked in a namespace of its own has told us what it is there.
        let pids = [u64::from(pid), msg.arg1];
        let holders: Vec<(ConnId, u64, u64, u32)> = ctx
            .clients
            .iter()
            .filter(|(other, c)| *other != id && c.is_process() && pids.contains(&u64::from(c.pid)))
            .map(|(other, c)| (other, c.nonce, c.family, c.uid))
            .collect();
        if holders.is_empty() {
            return Err(Errno::NOENT);
        }
        // Whom it may really take from the kernel says; it may not make others slow.
        if taker != 0 && holders.iter().any(|h| h.3 != taker) {
            return Err(Errno::PERM);
        }
        for (holder, nonce, family, _) in holders {
            let out = Msg { id, arg0: msg.arg0, ..Msg::new(kind::TRANSFER) };
            ctx.clients.send(holder, Outgoing { msg: out, fd: None, unasked: true });
            self.wake_holder(ctx, holder, nonce, family);
        }
        Ok((reply(msg), None))
    }

    /// Threads that sleep on a connection do not see our messages.
    pub fn wake_holder(&self, ctx: &Context, id: ConnId, nonce: u64, family: u64) {
        for mem in ctx.arenas.used_by(id) {
            for sock in mem.open_socks().filter(|s| s.holders.iter().any(|h| h.load(Ordering::Acquire) == nonce)) {
                let side = sock.side.load(Ordering::Relaxed) as usize;
                let slot = sock.slot.load(Ordering::Relaxed) as usize;
                let channel = self.channels.get(sock.channel.load(Ordering::Relaxed));
                if let Some(ch) = channel.filter(|ch| side < 2 && slot < SLOTS && ch.is_party(side, family)) {
                    wake_side(ch, slot, side, &ctx.clients);
                }
            }
        }
    }

    /// [`kind::TRANSFERRED`].
    pub fn taken(&mut self, ctx: &mut Context, msg: &Msg) {
        if ctx.clients.get(msg.id).is_some_and(|c| c.is_process()) {
            let out = Msg::new(kind::TRANSFERRED);
            ctx.clients.send(msg.id, Outgoing { msg: out, fd: None, unasked: true });
        }
    }
}
