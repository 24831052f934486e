//! Listeners whose socket is gone, or that a nearer one hides.

use crate::context::Context;
use crate::shm::state::Shm;
use crate::ListenerId;
use fsocket_proto::Addr;
use rustix::fd::BorrowedFd;

impl Shm {
    /// Whether the socket behind a listener still listens, as far as can be
    /// told. `place`: a TCP socket of its network namespace.
    pub fn still_listens(&mut self, ctx: &mut Context, listener: ListenerId, place: Option<BorrowedFd<'_>>) -> bool {
        let Some(info) = self.listeners.get(listener).map(|l| l.info) else { return false };
        self.closings.diag(ctx, info.netns, place).is_none_or(|diag| diag.listens(&info))
    }

    /// Whether the kernel would lead a connection to `ip` to this listener, as far as can be told; else one
    /// of the kernel's alone is nearer. `place`: a TCP socket of its network namespace.
    pub fn is_reached(&mut self, ctx: &mut Context, listener: ListenerId, ip: [u8; 16], place: BorrowedFd<'_>) -> bool {
        let Some(info) = self.listeners.get(listener).map(|l| l.info) else { return false };
        self.closings.diag(ctx, info.netns, Some(place)).is_none_or(|diag| diag.is_reached(ip, &info))
    }

    /// Whether both hold, as one question says; else they are to be asked one by one.
    pub fn leads_to(&mut self, ctx: &Context, listener: ListenerId, ip: [u8; 16], place: BorrowedFd<'_>) -> bool {
        let Some(info) = self.listeners.get(listener).map(|l| l.info) else { return false };
        self.closings.diag(ctx, info.netns, Some(place)).is_some_and(|diag| diag.leads_to(ip, &info))
    }

    /// Ends listeners at this address whose socket is gone.
    pub fn drop_stale(&mut self, ctx: &mut Context, netns: u64, addr: &Addr) {
        for listener in self.listeners.siblings(netns, addr) {
            if !self.still_listens(ctx, listener, None) {
                self.end_listener(ctx, listener);
            }
        }
    }
}
