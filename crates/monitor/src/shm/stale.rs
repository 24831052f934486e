//! Finds listeners whose socket is closed, or whose address another listener covers more exactly.

use crate::context::Context;
use crate::shm::state::Shm;
use crate::ListenerId;
use fsocket_proto::Addr;
use rustix::fd::BorrowedFd;

impl Shm {
    /// Whether the socket of a listener still listens, as far as the monitor can find out.
    /// `place`: a TCP socket of the same network namespace.
    pub fn still_listens(&mut self, ctx: &mut Context, listener: ListenerId, place: Option<BorrowedFd<'_>>) -> bool {
        let Some(info) = self.listeners.get(listener).map(|l| l.info) else { return false };
        self.closings.diag(ctx, info.netns, place).is_none_or(|diag| diag.listens(&info))
    }

    /// Whether the kernel would lead a connection to `ip` to this listener, as far as the monitor
    /// can find out. If not, a listener without the library fits the address better. `place`: a
    /// TCP socket of the same network namespace.
    pub fn is_reached(&mut self, ctx: &mut Context, listener: ListenerId, ip: [u8; 16], place: BorrowedFd<'_>) -> bool {
        let Some(info) = self.listeners.get(listener).map(|l| l.info) else { return false };
        self.closings.diag(ctx, info.netns, Some(place)).is_none_or(|diag| diag.is_reached(ip, &info))
    }

    /// Answers both questions with one request to the kernel. False: the caller must ask both one
    /// by one.
    pub fn leads_to(&mut self, ctx: &Context, listener: ListenerId, ip: [u8; 16], place: BorrowedFd<'_>) -> bool {
        let Some(info) = self.listeners.get(listener).map(|l| l.info) else { return false };
        self.closings.diag(ctx, info.netns, Some(place)).is_some_and(|diag| diag.leads_to(ip, &info))
    }

    /// Ends listeners at this address whose socket does not listen any more.
    pub fn drop_stale(&mut self, ctx: &mut Context, netns: u64, addr: &Addr) {
        for listener in self.listeners.siblings(netns, addr) {
            if !self.still_listens(ctx, listener, None) {
                self.end_listener(ctx, listener);
            }
        }
    }
}
