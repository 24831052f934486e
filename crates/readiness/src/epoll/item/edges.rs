//! What has come since an item was reported last.

use super::{Item, Reported, DATA, ET, ONESHOT};
use crate::epoll::instance::{of, Ep};
use crate::listen;
use crate::ready::{self, IN, OUT, RDNORM};
use crate::stage;
use crate::table::{Desc, Kind};
use core::sync::atomic::Ordering;
use fsocket_abi::channel::status;
use fsocket_abi::flags::FlagSet;
use fsocket_ring as ring;

/// What of this side is an edge.
const EDGES: FlagSet = FlagSet::SHUT_RD.or(FlagSet::SHUT_WR).or(FlagSet::SENT_AFTER_CLOSE);

impl Item {
    /// Has something come for it that the kernel would have told an outer instance of?
    pub fn pulse(&self) -> bool {
        if !self.live.load(Ordering::Relaxed) || self.disabled.load(Ordering::Relaxed) {
            return false;
        }
        let Some(d) = self.desc() else { return false };
        let came = self.edge(d, &self.passed, true);
        let fresh = self.events_at_first(d, &self.passed) != 0;
        if fresh {
            self.passed.fresh.store(false, Ordering::Relaxed);
        }
        came || fresh
    }

    /// The events of an item of which nothing was reported yet, and which are an edge for that reason; 0: none.
    fn events_at_first(&self, d: &Desc, last: &Reported) -> u32 {
        if !last.fresh.load(Ordering::Relaxed) || ready::events(d, self.wanted()) == 0 {
            return 0;
        }
        // They may have come after `edge` has looked, and would be an edge once more. So they are noted. The events are
        // asked for afterwards, and contain all that was noted.
        self.edge(d, last, true);
        ready::events(d, self.wanted())
    }

    /// The events to report now; 0: none.
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
            if stage::is_moving(d) {
                return 0; // no edge is told of now, so none is noted
            }
            match self.edge(d, &self.reported, true) {
                true => ready::events(d, self.wanted()),
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

    /// What is ready is an edge, also if it was reported.
    pub fn forget_edges(&self) {
        for last in [&self.reported, &self.passed] {
            last.fresh.store(true, Ordering::Relaxed);
        }
    }

    /// An instance tells those that watch it of EPOLLIN alone: an item that does not ask
    /// for that is ready if it was when it was added, until it is not once.
    pub(super) fn shut_both(&self, d: &Desc) -> bool {
        d.kind() == Kind::Epoll && self.events.load(Ordering::Relaxed) & IN == 0
    }

    /// Has something happened since the last report? With `note`, that counts
    /// as reported.
    pub(super) fn edge(&self, d: &Desc, last: &Reported, note: bool) -> bool {
        match d.kind() {
            Kind::Shm => {
                let (r, rx, h) = d.rx();
                // What TCP would have sent a segment for.
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
                // What this process cannot take has not been reported: it may be left to it later.
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
