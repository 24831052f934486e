//! Rights: processes that give some up, and who may share memory on the server's side.
//!
//! A channel is mapped by every worker of its listener. So all of them must be allowed to do what
//! the others do: the same user with the same [`Rights`]. The first worker decides whose
//! listener it is. Where workers with other rights come while those are there, or after them, the
//! kernel serves the listener from then on: it has one queue for all, and gives each connection
//! to one process.

use crate::answer::Misbehaved;
use crate::clients::Client;
use crate::context::Context;
use crate::descriptor;
use crate::foreign::ForeignFd;
use crate::shm::listeners::Shown;
use crate::shm::state::Shm;
use crate::shm::wake::end_listening;
use crate::{shares, ConnId, ListenerId};
use fsocket_proto::notice;

impl Shm {
    /// A process has other credentials from now on, and talks to us over a socket made with
    /// those. It keeps its listeners. The process of before is then at its end.
    pub fn renew(&mut self, ctx: &mut Context, id: ConnId, fd: Option<ForeignFd>) -> Result<(), Misbehaved> {
        let fd =
            fd.filter(|fd| descriptor::is_control_socket(fd.as_fd())).ok_or(Misbehaved("RENEW of something else"))?;
        let Some(old) = ctx.clients.get(id) else { return Ok(()) };
        let (pid, uid) = descriptor::peer(fd.as_fd()).map_err(|_| Misbehaved("RENEW by nobody"))?;
        // Down from root, or as the same user with fewer rights. A socket that another user has made
        // does not lend that user's name. (The user of a private monitor vouches for the programs started under it.)
        let allowed = old.uid == 0 || old.uid == uid || ctx.config.private;
        let (nonce, was, holds, off, program) = (old.nonce, old.uid, old.holds.clone(), old.off, old.program);
        if allowed && self.has_share(ctx, uid, shares::CLIENT) {
            crate::wire::ask_for_senders(fd.as_fd());
            ctx.vouch(uid, fd.as_fd());
            let family = ctx.new_family();
            self.passed.leave(was, id, true);
            let mut new = Client::new(fd, uid, pid, family);
            new.nonce = nonce;
            (new.off, new.program) = (off, program);
            new.holds = holds.clone();
            if let Ok(new) = ctx.clients.add(new) {
                for listener in holds {
                    if let Some(l) = self.listeners.get_mut(listener) {
                        l.holders.insert(new);
                    }
                }
                tracing::debug!(process = %ctx.clients.name(new), uid, "other credentials");
            }
        } else {
            tracing::warn!(was = old.uid, uid, "other credentials refused");
        }
        Ok(())
    }

    /// May this process be a worker of a listener, on the memory of those that are or were?
    pub fn may_serve(&mut self, ctx: &mut Context, id: ConnId, listener: ListenerId) -> bool {
        let Some(rights) = ctx.clients.get(id).map(Client::rights) else { return false };
        let Some(l) = self.listeners.get_mut(listener) else { return false };
        let untouched = |c| self.channels.get(c).is_none_or(|ch| ch.mem.is_untouched_by_servers());
        let vacant = || l.accepting().next().is_none() && l.channels.iter().all(|c| untouched(*c));
        if l.is_mixed {
            return false;
        }
        if l.served_by != Some(rights) && (l.served_by.is_none() || vacant()) {
            l.served_by = Some(rights);
        }
        if l.served_by == Some(rights) {
            return true;
        }
        l.is_mixed = true;
        let (workers, channels): (Vec<_>, Vec<_>) = (l.accepting().collect(), l.channels.iter().copied().collect());
        tracing::info!(listener, "workers with different rights: the kernel serves it");
        self.hide_listener(listener, Shown::Never);
        for worker in &workers {
            ctx.clients.notify(*worker, notice::OtherRights { listener });
        }
        if !self.move_waiting(ctx, listener, None) && workers.is_empty() {
            // No process can take the connections that wait there.
            for ch in channels.into_iter().filter_map(|c| self.channels.get(c)) {
                end_listening(ch, &ctx.clients);
            }
        }
        false
    }
}
