//! Reports of processes about listeners: requests without an answer, or with an empty one.

use crate::answer::Answer;
use crate::context::Context;
use crate::descriptor;
use crate::foreign::ForeignFd;
use crate::shm::state::Shm;
use crate::ConnId;
use fsocket_proto::{answer, request};

impl Shm {
    /// [`request::Unlisten`].
    pub fn closes(
        &mut self,
        ctx: &mut Context,
        id: ConnId,
        msg: request::Unlisten,
        fd: Option<ForeignFd>,
    ) -> Answer<answer::Unlisten> {
        let shown = fd.and_then(|fd| descriptor::listening(fd.as_fd()).ok());
        let listener = shown.map_or(Some(msg.listener), |info| self.listeners.by_cookie(info.cookie));
        if let Some(listener) = listener {
            self.unlisten(ctx, id, listener, msg.for_all);
        }
        Ok((answer::Unlisten {}, None))
    }

    /// [`request::Nearer`].
    pub fn nearer(&mut self, ctx: &Context, id: ConnId, request::Nearer { addr }: request::Nearer) {
        let Some(uid) = ctx.clients.get(id).map(|c| c.uid) else { return };
        if self.listeners.has_port(addr.port) {
            self.have_ask_again(uid, uid == 0 || ctx.config.private);
        }
    }
}
