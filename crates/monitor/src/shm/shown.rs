//! Whether clients find a listener, or the kernel serves it.

use crate::answer::Answer;
use crate::context::Context;
use crate::foreign::ForeignFd;
use crate::shm::listeners::{Listener, Shown};
use crate::shm::state::Shm;
use crate::{ConnId, ListenerId};
use fsocket_proto::values::Unpublishing;
use fsocket_proto::{answer, request};
use fsocket_sync::atomic::Ordering;
use rustix::io::Errno;

impl Shm {
    /// [`request::Unpublish`]. `fd`: a socket of the listener's network namespace.
    pub fn unpublish(
        &mut self,
        ctx: &mut Context,
        id: ConnId,
        request::Unpublish { listener, how }: request::Unpublish,
        fd: Option<ForeignFd>,
    ) -> Answer<answer::Unpublish> {
        if !ctx.clients.get(id).is_some_and(|c| c.holds.contains(&listener)) {
            return Err(Errno::NOENT);
        }
        let l = self.listeners.get_mut(listener).ok_or(Errno::NOENT)?;
        l.held_elsewhere |= how == Unpublishing::UnlessServed;
        let others_serve = match (l.held_elsewhere, how) {
            (_, Unpublishing::ForGood) => false,
            (_, Unpublishing::UnlessServed) => l.accepting().next().is_some(),
            (true, Unpublishing::IfLast) => l.accepting().any(|worker| worker != id),
            (false, Unpublishing::IfLast) => l.holders.len() > 1,
        };
        if others_serve {
            return Err(Errno::BUSY);
        }
        let for_now = l.held_elsewhere && how != Unpublishing::ForGood;
        self.hide_listener(listener, if for_now { Shown::WhenServed } else { Shown::Never });
        // The monitor moves all waiting connections to the kernel, whatever the requesting process
        // can do itself.
        self.move_waiting(ctx, listener, fd.as_ref().map(ForeignFd::as_fd));
        Ok((answer::Unpublish {}, None))
    }

    /// From now on, new connections to a listener use the kernel.
    pub fn hide_listener(&mut self, listener: ListenerId, until: Shown) {
        let Some(l) = self.listeners.get_mut(listener).filter(|l| l.shown != Shown::Never) else { return };
        let was_shown = std::mem::replace(&mut l.shown, until) == Shown::Yes;
        if !was_shown {
            return;
        }
        self.registry.remove(listener);
        self.listeners.hide(listener);
        self.set_closed(listener, true);
        // After this fence, a client that did not see the change has its connection in the queue.
        crate::membarrier::heavy_fence();
    }

    /// Lets clients find a hidden listener again.
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
