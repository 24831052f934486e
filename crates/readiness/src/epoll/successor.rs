//! Epoll instances that the parent process has made and in which the child waits.

use super::instance::Ep;
use super::item::{self, Item};
use crate::listen;
use core::sync::atomic::Ordering;

impl Ep {
    /// Called before a wait. A thread that waits in an instance of its parent accepts connections
    /// of the listeners in there, although this process has not added them.
    #[inline]
    pub(super) fn join_inherited(&self) {
        if self.inherited.load(Ordering::Relaxed) {
            self.join_listeners();
        }
    }
    #[cold]
    fn join_listeners(&self) {
        if !self.inherited.swap(false, Ordering::AcqRel) || self.items.load(Ordering::Relaxed) == 0 {
            return;
        }
        // The library's entries go into a wrapper, because several processes of the fork group
        // wait in the instance itself.
        self.is_watched();
        let listeners = || item::of_listeners(self, |l| l.id.load(Ordering::Relaxed) != 0).filter_map(Item::listener);
        if listeners().next().is_some() {
            listeners().for_each(listen::Listener::join);
            self.watch_ctl();
        }
    }
}
