//! Rights: processes that give up rights, and processes that may share memory on the server side.
//!
//! Every worker of a listener maps the listener's channels. So all workers must have the same user
//! and the same [`Rights`]. The first worker decides which rights these are. If a worker with
//! other rights comes, the kernel serves the listener from then on: it has one queue for all
//! workers, and gives each connection to one of them.

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
    /// Handles a process that has changed its credentials and shows a new socket, made with the
    /// new ones. The process keeps its listeners. Its old identity counts as a process that has
    /// ended.
    pub fn renew(&mut self, ctx: &mut Context, id: ConnId, fd: Option<ForeignFd>) -> Result<(), Misbehaved> {
        let fd =
            fd.filter(|fd| descriptor::is_control_socket(fd.as_fd())).ok_or(Misbehaved("RENEW of something else"))?;
        let Some(old) = ctx.clients.get(id) else { return Ok(()) };
        let (pid, uid) = descriptor::peer(fd.as_fd()).map_err(|_| Misbehaved("RENEW by an unknown process"))?;
        // Allowed: from root to any user, or to the same user with fewer rights. A socket made by
        // another user does not give that user's rights. (A private monitor allows any change: its
        // user is responsible for the programs started under it.)
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

    /// Whether this process may become a worker of a listener, and thereby map the memory of the
    /// other workers.
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
            // No process can take the connections in these queues.
            for ch in channels.into_iter().filter_map(|c| self.channels.get(c)) {
                end_listening(ch, &ctx.clients);
            }
        }
        false
    }
}
