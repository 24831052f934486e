//! Whether clients find a listener, or the kernel serves it.

use crate::answer::{reply, Answer};
use crate::context::Context;
use crate::foreign::ForeignFd;
use crate::shm::listeners::{Listener, Shown};
use crate::shm::state::Shm;
use crate::{ConnId, ListenerId};
use fsocket_proto::{unpublish, Msg};
use fsocket_sync::atomic::Ordering;
use rustix::io::Errno;

impl Shm {
    /// [`fsocket_proto::kind::UNPUBLISH`]. `fd`: a socket of the listener's network namespace.
    pub fn unpublish(&mut self, ctx: &mut Context, id: ConnId, msg: &Msg, fd: Option<ForeignFd>) -> Answer {
        if !ctx.clients.get(id).is_some_and(|c| c.holds.contains(&msg.id)) {
            return Err(Errno::NOENT);
        }
        let l = self.listeners.get_mut(msg.id).ok_or(Errno::NOENT)?;
        l.held_elsewhere |= msg.arg0 == unpublish::UNLESS_SERVED;
        let others_serve = match (l.held_elsewhere, msg.arg0) {
            (_, unpublish::FOR_GOOD) => false,
            (_, unpublish::UNLESS_SERVED) => l.accepting().next().is_some(),
            (true, _) => l.accepting().any(|worker| worker != id),
            (false, _) => l.holders.len() > 1,
        };
        if others_serve {
            return Err(Errno::BUSY);
        }
        let until = if l.held_elsewhere && msg.arg0 != unpublish::FOR_GOOD { Shown::WhenServed } else { Shown::Never };
        self.hide_listener(msg.id, until);
        // Nothing is left behind, whatever rights the requester has to do that itself.
        self.move_waiting(ctx, msg.id, fd.as_ref().map(ForeignFd::as_fd));
        Ok((reply(msg), None))
    }

    /// New connections to a listener use the kernel.
    pub fn hide_listener(&mut self, listener: ListenerId, until: Shown) {
        let Some(l) = self.listeners.get_mut(listener).filter(|l| l.shown != Shown::Never) else { return };
        let was_shown = std::mem::replace(&mut l.shown, until) == Shown::Yes;
        if !was_shown {
            return;
        }
        self.registry.remove(listener);
        self.listeners.hide(listener);
        self.set_closed(listener, true);
        // A client that queued before it could see that is in the queue by now.
        crate::membarrier::heavy_fence();
    }

    /// Clients find a listener again that was hidden until now.
    pub fn show_listener(&mut self, listener: ListenerId) {
        let hidden = |l: &&mut Listener| matches!(l.shown, Shown::WhenServed | Shown::WhenAccepted);
        let Some(l) = self.listeners.get_mut(listener).filter(hidden) else { return };
        let info = l.info;
        if !self.registry.add(listener, info.netns, &info.addr) {
            return;
        }
        l.shown = Shown::Yes;
        self.listeners.show(listener);
        self.set_closed(listener, false);
    }

    fn set_closed(&self, listener: ListenerId, closed: bool) {
        let Some(l) = self.listeners.get(listener) else { return };
        let channels = l.channels.iter().filter_map(|ch| self.channels.get(*ch));
        channels.for_each(|ch| ch.mem.listener_closed().store(closed.into(), Ordering::SeqCst));
    }
}
