//! Edges: events that came after the last report of an item. An item reports an edge once,
//! whichever thread looks.

use super::{Item, Reported, DATA, ET, ONESHOT};
use crate::epoll::instance::{of, Ep};
use crate::listen;
use crate::ready::{self, IN, OUT, RDNORM};
use crate::table::{Desc, Kind};
use core::sync::atomic::Ordering;
use fsocket_abi::channel::status;
use fsocket_abi::flags::FlagSet;
use fsocket_abi::path_switch::{Event, Next};
use fsocket_ring as ring;
use fsocket_sys as sys;

/// Flags of this side whose change counts as an edge.
const EDGES: FlagSet = FlagSet::SHUT_RD.or(FlagSet::SHUT_WR).or(FlagSet::SENT_AFTER_CLOSE);

impl Item {
    /// Has an event come that the kernel would have passed to an outer instance?
    pub fn pulse(&self) -> bool {
        if !self.live.load(Ordering::Relaxed) || self.disabled.load(Ordering::Relaxed) {
            return false;
        }
        let Some(d) = self.desc() else { return false };
        let came = self.has_arrived(d) | self.edge(d, &self.passed, true);
        let fresh = self.events_at_first(d, &self.passed) != 0;
        if fresh {
            self.passed.fresh.store(false, Ordering::Relaxed);
        }
        came || fresh
    }

    /// Has a connection come to a listener? Another thread may have accepted it already. The
    /// kernel would have notified the outer instance all the same, and the outer instance then
    /// looks whether anything else in this one is ready.
    fn has_arrived(&self, d: &Desc) -> bool {
        let Some(now) = listen::of(d).and_then(listen::Listener::arrivals) else { return false };
        self.passed.scan.swap(now, Ordering::Relaxed) != now
    }

    /// The kernel's instance has reported a one-shot item, so the library must not report it as
    /// well.
    pub fn fired_in_kernel(&self, data: u64) {
        let once = self.kernel.load(Ordering::Relaxed) && self.events.load(Ordering::Relaxed) & ONESHOT != 0;
        if once && self.live.load(Ordering::Acquire) && self.data.load(Ordering::Relaxed) == data {
            self.disabled.store(true, Ordering::Relaxed);
        }
    }

    /// The library has reported a one-shot item, so the kernel's instance must not report it as well.
    pub fn silence_kernel(&self, ep: &Ep) {
        if self.kernel.load(Ordering::Relaxed) && self.disabled.load(Ordering::Relaxed) {
            let (kernels, fd) = (ep.fd.load(Ordering::Relaxed), self.fd.load(Ordering::Relaxed));
            let _ = sys::epoll_ctl(kernels, libc::EPOLL_CTL_MOD, fd, Some(&self.event()));
        }
    }

    /// Called before the kernel's instance is asked to report the item again. (If the kernel
    /// reports the item at that moment, that disables the item again.)
    pub fn rearm(&self) {
        self.disabled.store(false, Ordering::Relaxed);
    }

    /// The events of an item for which an edge has come. An outer instance reports the inner one
    /// if any descriptor in it is ready, even a kernel descriptor, because the kernel does not
    /// know of the edge.
    pub(super) fn events_at_edge(&self, d: &Desc) -> u32 {
        match ready::events(d, self.wanted()) {
            0 if of(d).is_some_and(Ep::is_readable_in_kernel) => self.wanted() & (IN | RDNORM),
            events => events,
        }
    }

    /// The events that count as an edge because the item has not reported anything yet. 0: there
    /// are none.
    fn events_at_first(&self, d: &Desc, last: &Reported) -> u32 {
        if !last.fresh.load(Ordering::Relaxed) || ready::events(d, self.wanted()) == 0 {
            return 0;
        }
        // More events may come after `edge` has looked, and would count a second time. So the
        // counts are noted first; the events that are read afterwards include all that were
        // noted.
        self.edge(d, last, true);
        ready::events(d, self.wanted())
    }

    /// The events to report now. 0: there are none.
    pub fn take(&self) -> u32 {
        if !self.live.load(Ordering::Relaxed) || self.disabled.load(Ordering::Relaxed) {
            return 0;
        }
        let Some(d) = self.desc() else { return 0 };
        if self.shut_both(d) {
            let ready = self.reported.fresh.load(Ordering::Relaxed) && ready::events(d, self.wanted()) != 0;
            if !ready {
                self.reported.fresh.store(false, Ordering::Relaxed);
                return 0;
            }
        }
        let events = self.events.load(Ordering::Relaxed);
        let edge = events & ET != 0;
        let ev = if edge && self.pending().is_none() {
            if d.path_state().next(Event::Look) == Next::Later {
                return 0; // no edge is told of now, so none is noted
            }
            match self.edge(d, &self.reported, true) {
                true => self.events_at_edge(d),
                false => self.events_at_first(d, &self.reported),
            }
        } else {
            ready::events(d, self.wanted())
        };
        if ev == ready::PENDING {
            return ev;
        }
        if ev != 0 {
            if edge {
                self.reported.fresh.store(false, Ordering::Relaxed);
            }
            if events & ONESHOT != 0 {
                self.disabled.store(true, Ordering::Relaxed);
            }
        }
        ev
    }

    /// Readiness counts as an edge again, even if it was reported.
    pub fn forget_edges(&self) {
        for last in [&self.reported, &self.passed] {
            last.fresh.store(true, Ordering::Relaxed);
        }
    }

    /// Is this an instance whose item does not ask for EPOLLIN? An instance passes only EPOLLIN
    /// to its watchers. Such an item counts as ready if it was ready when it was added, until a
    /// look finds it not ready.
    pub(super) fn shut_both(&self, d: &Desc) -> bool {
        d.kind() == Kind::Epoll && self.events.load(Ordering::Relaxed) & IN == 0
    }

    /// Has something happened since the last report? With `note`, the change counts as reported.
    pub(super) fn edge(&self, d: &Desc, last: &Reported, note: bool) -> bool {
        match d.kind() {
            Kind::Shm => {
                let (r, rx, h) = d.rx();
                // Events for which TCP would have sent a segment.
                let status = (rx.prod.status.load(Ordering::Acquire) & (status::FIN | status::RST)) as u64
                    | u64::from(d.sock().flags.get().only(EDGES).bits()) << 32;
                let status = status | (d.sock().edges() as u64) << 40;
                let (data, at) = ring::scan(r, rx, h, last.scan.load(Ordering::Relaxed));
                let data = data && self.wanted() & (IN | RDNORM | DATA) != 0;
                let state = status != last.seen.load(Ordering::Relaxed);
                let blocked = d.sock().blocked_sends();
                let space =
                    blocked != last.blocked.load(Ordering::Relaxed) && self.wanted() & OUT != 0 && ready::can_send(d);
                if note {
                    last.scan.store(at, Ordering::Relaxed);
                    last.seen.store(status, Ordering::Relaxed);
                    if space {
                        last.blocked.store(blocked, Ordering::Relaxed);
                    }
                }
                data || state || space
            }
            Kind::Listener => {
                let Some(l) = listen::of(d) else { return false };
                let now = l.arrivals();
                // Connections that this process cannot accept are not reported, because this
                // process may be able to accept them later.
                let news = last.has_grown(now) && l.has_syn(true);
                if let Some(now) = now.filter(|_| news && note) {
                    last.seen.store(now, Ordering::Relaxed);
                }
                news
            }
            Kind::Epoll => {
                let now = of(d).map_or(0, Ep::pulses_so_far) as u64;
                let grown = last.has_grown(Some(now));
                if note {
                    last.seen.store(now, Ordering::Relaxed);
                }
                grown
            }
            _ => false,
        }
    }
}
