//! Instances that the parent has made.

use super::instance::Ep;
use super::item::{self, Item};
use crate::listen;
use core::sync::atomic::Ordering;

impl Ep {
    /// Before a wait: who waits on an instance that its parent has made accepts what the listeners in
    /// there get, although it has added none.
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
        // What is ours goes into a wrapper: processes of the fork group wait in the instance itself.
        self.is_watched();
        let listeners = || item::of_listeners(self, |l| l.id.load(Ordering::Relaxed) != 0).filter_map(Item::listener);
        if listeners().next().is_some() {
            listeners().for_each(listen::Listener::join);
            self.watch_ctl();
        }
    }
}
