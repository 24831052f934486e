//! Asking peers to mark an item when something happens.

use super::Item;
use crate::epoll::instance::{of, Ep, Inner};
use crate::ready::{self, IN, OUT, RDNORM};
use crate::table::Kind;
use crate::waker::Waker;
use crate::{chan, listen, stats};
use core::sync::atomic::Ordering;
use fsocket_abi::arena::Reason;
use fsocket_ring as ring;
use fsocket_sync::doorbell::Batch;

impl Item {
    /// Asks the peer to mark a new item when data comes, because the instance also watches
    /// others. This serves only to learn which item was ready first. It needs no fence, because
    /// the library still looks at the item.
    pub(super) fn hint(&self, ep: &Ep, g: &mut Inner) {
        let Some(d) = self.desc().filter(|d| d.is_conn() && self.wanted() & (IN | RDNORM) != 0) else { return };
        let Some(c) = chan::of(d) else { return };
        let Some(b) = ep.need_waker() else { return };
        let Some(w) = c.waiter_for(b) else { return };
        if g.links.add(c, w, b) {
            d.rx().1.want_data.hint(1 << w);
        }
    }

    /// Asks the peer to mark the item when something happens. The caller holds the lock of `g`,
    /// runs the fence of `batch`, and looks at the item again.
    pub fn arm(&self, b: &Waker, g: &mut Inner, root: &Ep, batch: &mut Batch<'static>) {
        // A live item keeps its connection until it is killed, which takes the lock.
        let Some(d) = self.desc().filter(|_| self.live.load(Ordering::Relaxed)) else { return };
        match d.kind() {
            Kind::Shm => {
                let Some(c) = chan::of(d) else { return };
                let Some(w) = c.waiter_for(b).filter(|w| g.links.add(c, *w, b)) else {
                    // No waiter is free. The item stays active, and sleeps are short.
                    stats::fall_back(Reason::Resource);
                    return;
                };
                let (_, rx, _) = d.rx();
                batch.arm(&rx.want_data, 1 << w);
                let (_, tx, h) = d.tx();
                if self.wanted() & OUT != 0 && !ready::can_send(d) {
                    tx.prod.space_at.store(ring::space_target(tx, h), Ordering::Relaxed);
                    batch.arm(&tx.want_space, 1 << w);
                }
                self.armed.store(true, Ordering::Relaxed);
            }
            Kind::Listener => {
                if let Some(l) = listen::of(d) {
                    self.recheck.store(false, Ordering::Relaxed);
                    l.arm(b, batch);
                    let linked = l.chans().all(|c| c.waiter_for(b).is_none_or(|w| g.links.add(c, w, b)));
                    self.armed.store(linked, Ordering::Relaxed);
                }
            }
            Kind::Epoll => {
                if let Some(inner) = of(d).filter(|inner| !core::ptr::eq(*inner, root)) {
                    inner.arm_inner(root);
                }
            }
            _ => {}
        }
    }
}
